"""Fill README's figures from the shipped comparison and docs/latency.json; nothing there is typed by hand.

    .venv/bin/python -m scripts.readme [--check]

`--check` changes nothing and fails when the README says something else than the files.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import pandas as pd
import pyarrow.parquet as pq

from benchmarks.compare import BETWEEN
from chord_lab.scenarios import get_scenario

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
LATENCY = ROOT / "docs" / "latency.json"
BENCHES = "data/nvidia_h200/bench-*.parquet"  # the newest by name is shown
DOUBT, DRIFT = "†", 0.05
BEGIN, END = "<!-- figures: written by `make readme` -->", "<!-- end of figures -->"
SCENARIOS = (
    "kimi-k2/ep8/decode", "kimi-k2/ep8/prefill", "kimi-k2/tp8/decode", "kimi-k2/tp8/prefill",
    "kimi-k2/ep8/grouped_prefill", "kimi-k2/ep8/grouped_decode",
)  # fmt: skip


def main() -> int:
    """Write or check the block between the marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        print("readme: README.md must hold one of each mark", file=sys.stderr)
        return 2
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    made = f"{before}{BEGIN}\n{figures()}\n{END}{after}"
    if arguments.check:
        if made != text:
            print("readme: README.md differs from what the records say; run `make readme`", file=sys.stderr)
        return int(made != text)
    unfinished = README.with_name("README.md.tmp")
    unfinished.write_text(made, encoding="utf-8")
    unfinished.replace(README)
    print("readme: README.md is filled")
    return 0


def figures() -> str:
    """The block: a line for each layer that was compared, then the panels' latency."""
    path = max(ROOT.glob(BENCHES))
    frame = pq.read_table(path).to_pandas()
    device, date = frame["device"].iloc[0], frame["date"].max()[:10]
    parts = [
        f"Layer time (gate_up + down) in microseconds, recorded on {device}, {date} "
        f"(`{path.relative_to(ROOT).as_posix()}`; `make bench` measures it anew); routing, activation and "
        "communication are not in it. Ours is the schedule that the package's table chooses. Humming 0.1.19 ran on the "
        "same routing in the same process, with its own heuristics and, beside it, with its fastest forced tile; above "
        "1 ours is faster. "
        "Tokens are those of a chunk that all 8 GPUs share in EP8 prefill, each GPU's own in EP8 decode, the batch's "
        "in TP8; each is routed to 8 experts by the draw. In grouped scenarios every expert gets that many, "
        "under zipf:1.0 on average.",
        "",
        "| scenario | draw | tokens | rows/expert | ours | Humming | ratio | its best tile | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for scenario in SCENARIOS:
        parts += scenario_rows(frame[frame["scenario"] == scenario], scenario)
    if any(DOUBT in part for part in parts):
        parts += ["", f"{DOUBT} a projection's repeats, ours or the peer's, differ by more than {DRIFT:.0%}."]
    return "\n".join([*parts, "", *latency()])


def scenario_rows(frame: pd.DataFrame, scenario: str) -> list[str]:
    """A line for each token count and draw at which both projections were timed."""
    layer = get_scenario(scenario)
    shown = {p.num_tokens for p in layer.points if p.published} | set(BETWEEN.get(scenario, ()))
    frame = frame[frame["profile"] == layer.profile]
    rows = []
    for (other, draw, tokens), point in frame.groupby([frame["routing"] != layer.draw, "routing", "num_tokens"]):
        ours = layer_us(point, "w4a16_moe")
        if ours is None or (not other and tokens not in shown):
            continue
        per_expert = point["routed_m"].iloc[0] / layer.problem("gate_up").num_experts
        mark = f" {DOUBT}" if drifted(point) else ""
        cells = [
            scenario,
            str(draw),
            f"{tokens:,}{mark}",
            f"{per_expert:{'.2g' if per_expert < 10 else '.0f'}}",
            f"{ours:.1f}",
        ]
        for peer in ("humming", "humming_best_tile"):
            time = layer_us(point, peer)
            cells += ["-", "-"] if time is None else [f"{time:.1f}", f"{time / ours:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def layer_us(point: pd.DataFrame, implementation: str) -> float | None:
    """gate_up + down of one implementation; None where one of them was not timed."""
    times = point[point["implementation"] == implementation].set_index("projection")["time_us"].dropna()
    return float(times["gate_up"] + times["down"]) if {"gate_up", "down"} <= set(times.index) else None


def drifted(point: pd.DataFrame) -> bool:
    """Whether an implementation's interleaved repeats lie further apart than `DRIFT`."""
    compared = point[point["implementation"].isin(["w4a16_moe", "humming", "humming_best_tile"])]
    return any(len(r) > 1 and max(r) - min(r) > DRIFT * pd.Series(r).median() for r in compared["rounds_us"])


def latency() -> list[str]:
    """One line about the panels, if they were measured."""
    if not LATENCY.exists():
        return []
    found = json.loads(LATENCY.read_text(encoding="utf-8"))
    return [
        f"In the notebooks a slider's move redraws its figures in {found['median_ms']:.0f} ms (median; 95 % within "
        f"{found['p95_ms']:.0f} ms) on {found['cores']} cores with {found['records']:,} records, measured in Chromium "
        f"{found['chromium']} on {found['date']} (`docs/latency.json`)."
    ]


if __name__ == "__main__":
    sys.exit(main())

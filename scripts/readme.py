"""Fill README's figures from the shipped records and docs/latency.json; nothing there is typed by hand.

    .venv/bin/python -m scripts.readme [--check]

`--check` changes nothing and fails when the README says something else than the files.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import pandas as pd
from w4a16_moe.resolve import resolve_schedule

from chord_lab import analysis
from chord_lab.errors import UserError
from chord_lab.scenarios import get_scenario
from chord_lab.widgets.measurements import Measurements

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
LATENCY = ROOT / "docs" / "latency.json"
DOUBT = "†"
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
    """The block: a table of each scenario, then the panels' latency."""
    data = Measurements.recorded()
    parts = [
        f"Layer time (gate_up + down) in microseconds, {data.source()}; routing, activation and communication are not "
        "in it. Ours is the schedule that the package's table chooses. Humming 0.1.19 ran on the same routing in the "
        "same process, with its own heuristics and, beside it, with its fastest forced tile; above 1 ours is faster. "
        "Tokens are those of a chunk that all 8 GPUs share in EP8 prefill, each GPU's own in EP8 decode, the batch's "
        "in TP8; each is routed to 8 experts by a uniform draw. In grouped scenarios every expert gets that many.",
        "",
        "| scenario | tokens | rows/expert | ours | Humming | ratio | its best tile | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for scenario in SCENARIOS:
        parts += scenario_rows(data, scenario)
    if any(DOUBT in part for part in parts):
        named = "`chord-lab winners data/nvidia_h200` names it"
        parts += ["", f"{DOUBT} a projection's repeats drifted by more than 5 %: {named}."]
    return "\n".join([*parts, "", *latency()])


def scenario_rows(data: Measurements, scenario: str) -> list[str]:
    """A line for each published token count; none where the scenario was not recorded."""
    layer = get_scenario(scenario)
    try:
        chosen = chosen_labels(data, scenario)
        info = analysis.layer_info(data.alike(scenario)[0], draw=layer.draw, chosen=chosen)
    except UserError:
        return []
    doubted = {w.num_tokens for w in data.winners(scenario, draw=layer.draw) if w.flags}
    published = {point.num_tokens for point in layer.points if point.published}
    rows = []
    for i, tokens in enumerate(info.num_tokens):
        if tokens not in published:
            continue
        rows_per_expert = info.tokens_per_expert[i]
        mark = f" {DOUBT}" if tokens in doubted else ""
        cells = [scenario, f"{tokens:,}{mark}", f"{rows_per_expert:{'.2g' if rows_per_expert < 10 else '.0f'}}"]
        cells.append(f"{info.ours_us[i]:.1f}")
        own = other(info, "humming", i)
        best = other(info, "humming_best_tile", i) or other(info, "humming_tile", i)
        for time in (own, best):
            cells += ["-", "-"] if time is None else [f"{time:.1f}", f"{time / info.ours_us[i]:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def chosen_labels(data: Measurements, scenario: str) -> dict[tuple[str, int, str], str]:
    """(projection, routed_m, draw) -> label of the schedule that the package runs there, where that was recorded."""
    layer, profile = get_scenario(scenario), data.profile_of(scenario)
    labels: dict[tuple[str, int, str], str] = {}
    for projection, problem in layer.problems.items():
        for point in layer.points:
            resolved = resolve_schedule(problem, point.routed_m, profile, data.device.slug)
            if resolved.schedule is not None:
                labels[projection, point.routed_m, layer.draw] = resolved.schedule.label()
    return labels


def other(info: analysis.LayerInfo, name: str, point: int) -> float | None:
    """Layer time of another implementation; None where it was not recorded."""
    if name not in info.implementation:
        return None
    time = info.other_us[point][info.implementation.index(name)]
    return None if time is None or pd.isna(time) else float(time)


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

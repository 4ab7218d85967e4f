"""What the package runs, untuned and by its tables, stands up to what was recorded; the READMEs say how far."""

from __future__ import annotations

import pathlib
from collections import defaultdict

from w4a16_moe.devices import DEVICES
from w4a16_moe.resolve import resolve_schedule

from chord_lab.records import read_records
from chord_lab.records.attempt import Point
from chord_lab.records.statistics import median_us
from chord_lab.sweeps.space import default_schedule

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "nvidia_h200"
# Over the fastest recorded schedule, at the points of the indexed interface, skewed draws among them.
MEAN, CLOSE, CLOSE_SHARE = 0.02, 0.05, 0.9


def test_untuned_schedules_are_near_the_fastest_recorded():
    """Of the kernels recorded last."""
    times: dict[Point, dict] = {}
    records = read_records(DATA).records
    kernels = max(records, key=lambda record: record.date).environment.kernels
    for record in records:
        profile = record.profile
        if (
            record.kind == "candidate"
            and record.environment.kernels == kernels
            and record.status == "ok"
            and profile.startswith("h200")
            and "grouped" not in profile
        ):
            point = Point(
                scenario=record.scenario,
                projection=record.projection,
                problem=record.problem,
                profile=profile,
                num_tokens=record.num_tokens,
                routing=record.routing,
            )
            times.setdefault(point, {})[record.schedule] = median_us(record)
    regrets = {}
    for point, known in times.items():
        chosen = default_schedule(point, DEVICES["nvidia_h200"])
        if chosen in known:
            regrets[point.label()] = known[chosen] / min(known.values()) - 1
    assert len(regrets) > 0.9 * len(times) > 100
    late = {label: f"{regret:.1%}" for label, regret in regrets.items() if regret > CLOSE}
    assert len(late) < (1 - CLOSE_SHARE) * len(regrets), late
    assert sum(regrets.values()) / len(regrets) < MEAN, late


def test_what_the_readmes_say_of_the_tables_is_so():
    candidates, peers = defaultdict(dict), defaultdict(list)  # times at a place: by schedule, and of Humming's tiles
    for record in read_records(DATA).records:
        if record.status != "ok" or record.routing is None:
            continue
        place = (record.scenario, record.num_tokens, record.routing.draw, record.projection)
        if record.implementation.startswith("humming"):
            peers[place].append(median_us(record))
        elif record.kind == "candidate" and record.profile.startswith("h200"):
            served = resolve_schedule(record.problem, record.routed_m, record.profile, "nvidia_h200").schedule
            candidates[place][record.schedule] = median_us(record)
            if record.schedule == served:
                candidates[place]["served"] = median_us(record)
    regrets, layers = defaultdict(list), defaultdict(list)
    for place, times in candidates.items():
        if "served" in times:
            regrets[place[2]].append(times["served"] / min(times.values()) - 1)
            if place in peers:
                layers[place[:3]].append((times["served"], min(peers[place])))
    whole = {place: [sum(parts) for parts in zip(*pairs, strict=True)] for place, pairs in layers.items() if pairs[1:]}
    behind = {place: ours / theirs - 1 for place, (ours, theirs) in whole.items() if ours > theirs}
    assert behind.keys() == {
        ("kimi-k2/tp8/decode", 32, "balanced"),
        ("kimi-k2/ep16/prefill", 2048, "balanced"),
        ("kimi-k2/ep16/prefill", 8192, "balanced"),
    }
    assert {round(100 * share) for share in behind.values()} == {1, 2}
    text, kernels = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "kernels/README.md"))
    assert f"Of {len(whole)} recorded layers" in text
    mean = {draw: f"{100 * sum(shares) / len(shares):.1f} %" for draw, shares in regrets.items()}
    assert f"The tables are {mean['uniform']} from it under uniform" in kernels
    assert f"and {mean['zipf:1.0']} under zipf:1.0, {100 * max(regrets['zipf:1.0']):.0f} % at worst" in kernels

"""What the package runs untuned stands up to what was recorded."""

from __future__ import annotations

import pathlib

from w4a16_moe.devices import DEVICES

from chord_lab.records import read_records
from chord_lab.records.attempt import Point
from chord_lab.records.statistics import median_us
from chord_lab.sweeps.space import default_schedule

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "nvidia_h200"
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

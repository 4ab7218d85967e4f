"""A million replayed candidates: seconds and memory of plan, replay and winners (made-up times; no GPU).

    python benchmarks/million_replayed.py --out runs/million

Asked for: at most 60 s and 2 GB on 2 cores, reading the records included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import resource
import shutil
import sys
import time

import numpy as np
import pyarrow as pa

from chord_lab.measurement.replay import ReplayMeasure
from chord_lab.records.attempt import Point
from chord_lab.records.parquet import read_tables, to_table, write_parquet
from chord_lab.records.record import Environment, Record
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.recorded import of_scenario, recorded_plan
from chord_lab.sweeps.run import run
from chord_lab.sweeps.space import schedules
from chord_lab.sweeps.winners import winners

SCENARIO = "kimi-k2/ep8/decode"


def make_records(count: int, path: pathlib.Path) -> pathlib.Path:
    """`count` records of three repeats each: real points, schedules of the full space, times by a formula."""
    points = scenario_points(SCENARIO, profile="portable")
    per_point = -(-count // len(points))
    environment = Environment(device="nvidia_h200", device_name="NVIDIA H200", num_sms=132)
    chosen = [s for s, _ in zip(schedules("portable", "full"), range(per_point), strict=False)]
    template = to_table(
        [
            Record(
                run_id="made", date="2026-11-29T00:00:00+00:00", scenario=SCENARIO, projection="gate_up",
                profile="portable", problem=points[0].problem, schedule=schedule, routing=points[0].routing,
                environment=environment, num_tokens=1, routed_m=points[0].routed_m,
                times_us=((1.0,), (1.0,), (1.0,)), rounds=(0, 1, 2), default=index == 0,
            )
            for index, schedule in enumerate(chosen)
        ]
    )  # fmt: skip
    generator = np.random.default_rng(0)
    parts = []
    for point in points:
        part = template
        head = to_table([_at(point, environment)]).to_pydict()
        for name in ("projection", "N", "K", "top_k", "num_tokens", "routed_m", "routing_num_tokens", "tok_e", "seed"):
            column = pa.array(head[name] * len(part)).cast(part.schema.field(name).type)
            part = part.set_column(part.schema.get_field_index(name), part.schema.field(name), column)
        base = 200 + 100 * generator.random(len(part))
        times = (base[:, None] * (1 + 0.005 * generator.standard_normal((len(part), 3)))).astype(np.float32)
        inner = pa.ListArray.from_arrays(np.arange(3 * len(part) + 1, dtype=np.int32), pa.array(times.ravel()))
        outer = pa.ListArray.from_arrays(np.arange(0, 3 * len(part) + 1, 3, dtype=np.int32), inner)
        parts.append(part.set_column(part.schema.get_field_index("times_us"), part.schema.field("times_us"), outer))
    table = pa.concat_tables(parts).unify_dictionaries().slice(0, count)
    return write_parquet(table, path, level=3)


def _at(point: Point, environment: Environment) -> Record:
    return Record(
        run_id="made", date="", scenario=SCENARIO, projection=point.projection, profile="portable",
        problem=point.problem, routing=point.routing, environment=environment, num_tokens=point.num_tokens,
        routed_m=point.routed_m,
    )  # fmt: skip


def measure(path: pathlib.Path, out: pathlib.Path) -> dict[str, float]:
    """Seconds of each step, and the peak memory of this process."""
    marks = {"start": time.perf_counter()}
    table, _ = read_tables(path)
    rows, _ = of_scenario(table, SCENARIO)
    marks["read"] = time.perf_counter()
    plan = recorded_plan(rows)
    marks["plan"] = time.perf_counter()
    run(plan, ReplayMeasure(rows), out)
    marks["replay"] = time.perf_counter()
    candidates = len(plan)
    del table, rows, plan
    replayed, _ = read_tables(out)
    found = winners(replayed)
    marks["winners"] = time.perf_counter()
    names = list(marks)
    steps = {name: marks[name] - marks[before] for before, name in itertools.pairwise(names)}
    scale = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    total = marks["winners"] - marks["start"]
    return {**steps, "total": total, "peak_gb": peak / 1e9, "candidates": candidates, "points": len(found)}


def main() -> None:
    """Make the records in one process, measure in another: memory is that of the work alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/million"))
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--measure-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = options.out / "records" / "made.parquet"
    if options.measure_only:
        print(json.dumps(measure(path, options.out / "run")))
        return
    import subprocess

    shutil.rmtree(options.out, ignore_errors=True)
    make_records(options.count, path)
    done = subprocess.run(
        [sys.executable, __file__, "--out", str(options.out), "--measure-only"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    for name, value in result.items():
        print(f"{name:<12} {value:,.2f}")


if __name__ == "__main__":
    main()

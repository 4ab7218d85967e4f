"""Our kernels, as their tables choose, against Humming with its own tile and its best forced one, in one process.

    python -m benchmarks.compare [--out out/bench] [--budget-seconds 450]
    python -m benchmarks.compare --from data/nvidia_h200/records-2026-11-29.parquet --out data/nvidia_h200

The second form measures nothing: a recording holds what the package runs and the peer's of one run already.

Every published point of every scenario that the peer can run, uniform and skewed (zipf:1.0) routing, three or more
interleaved rounds with the order rotated, L2 cleared, ceilings measured in the same run. Writes
``<out>/bench-<date>.parquet``: one row per measurement, raw times included.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from w4a16_moe import resolve_schedule

from chord_lab.cli.measuring import Request, live_device, live_settings, visible_gpus
from chord_lab.errors import UserError
from chord_lab.measurement.live import LiveMeasure, require_gpu
from chord_lab.records.attempt import Candidate, Point
from chord_lab.records.parquet import read_records
from chord_lab.records.record import Record
from chord_lab.records.statistics import median_us, num_bytes
from chord_lab.sweeps.plan import Plan
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.run import Budget, run

SCENARIOS = (
    "kimi-k2/ep8/decode",
    "kimi-k2/ep8/prefill",
    "kimi-k2/ep8/grouped_prefill",
    "kimi-k2/ep8/grouped_decode",
    "kimi-k2/tp8/prefill",
    "kimi-k2/tp8/decode",
)
BETWEEN = {"kimi-k2/ep8/decode": (64, 80, 96)}  # tokens: 512, 640, 768 rows, between decode and prefill


def bench_points() -> list[Point]:
    """Published points, those between decode and prefill, then the skewed ones; one problem after the other."""
    points = [p for name in SCENARIOS for p in scenario_points(name, tokens="published")]
    points += [p for name, tokens in BETWEEN.items() for p in scenario_points(name, tokens=tokens)]
    points += [p for name in SCENARIOS for p in scenario_points(name, tokens="published", draws=["zipf:1.0"])]
    return sorted(points, key=lambda p: (p.problem.num_experts, p.problem.N, p.routing.draw != "uniform"))


def bench_plan(points: list[Point], device: str) -> Plan:
    """One candidate a point: what the package runs there."""
    candidates = []
    for point in points:
        schedule = resolve_schedule(point.problem, point.routed_m, point.profile, device).schedule
        candidates.append(Candidate(schedule=schedule, default=True))
    unique = list(dict.fromkeys(candidates))
    pairs = [(index, unique.index(candidate)) for index, candidate in enumerate(candidates)]
    return Plan(points, unique, np.array(pairs, dtype=np.int32).reshape(-1, 2))


def time_of(record: Record) -> float:
    """Median repeat in microseconds; infinite where there is none."""
    time_us = median_us(record)
    return float("inf") if time_us is None else time_us


def with_best_tiles(records: list[Record]) -> list[Record]:
    """Of the peer's forced tiles only the fastest, its own included, as ``humming_best_tile``."""
    kept = [record for record in records if record.implementation != "humming_tile"]
    tiles = fastest(record for record in records if record.implementation in ("humming", "humming_tile"))
    return kept + [replace(record, implementation="humming_best_tile") for record in tiles]


def what_the_package_runs(records: list[Record]) -> list[Record]:
    """Of our candidates at a point and profile what the tables choose there, and everybody else's records."""
    kept = [record for record in records if record.implementation != "w4a16_moe"]
    for record in records:
        if record.implementation == "w4a16_moe" and record.problem is not None and record.schedule is not None:
            device = record.environment.device
            chosen = resolve_schedule(record.problem, record.routed_m, record.profile, device).schedule
            kept += [record] if record.schedule == chosen else []
    return kept


def fastest(records: Iterable[Record]) -> list[Record]:
    """The fastest of each point and profile."""
    best: dict[Any, Record] = {}
    for record in records:
        place = (record.scenario, record.projection, record.profile, record.routing)
        if record.status == "ok" and (place not in best or time_of(record) < time_of(best[place])):
            best[place] = record
    return list(best.values())


def bench_table(records: list[Record]) -> pa.Table:
    """One row per measurement; times in microseconds, bytes and FLOPs of real rows and active experts."""
    rows = []
    for record in with_best_tiles(records):
        median = median_us(record) if record.status == "ok" else None
        problem, routing = record.problem, record.routing
        row = {
            "scenario": record.scenario,
            "projection": record.projection,
            "profile": record.profile,
            "num_tokens": record.num_tokens,
            "routed_m": routing.routed_m if routing else None,
            "routing": routing.draw if routing else "",
            "active_experts": routing.active_experts if routing else None,
            "implementation": record.implementation,
            "configuration": record.schedule.label() if record.schedule else record.config,
            "status": record.status,
            "time_us": median,
            "bandwidth_gbps": None,
            "tflops": None,
            "rel_error": record.rel_error,
            "rounds_us": [statistics.median(times) for times in record.times_us if times],
            "times_us": [list(times) for times in record.times_us],
            "sm_mhz": list(record.sm_mhz),
            "timer": record.method.timer if record.method else "",
            "device": record.environment.device_name,
            "driver": record.environment.driver,
            "torch": record.environment.torch,
            "triton": record.environment.triton,
            "peers": record.environment.peers,
            "kernels": record.environment.kernels,
            "date": record.date,
        }
        if median and problem is not None and routing is not None:
            row["bandwidth_gbps"] = num_bytes(record) / median / 1e3
            row["tflops"] = problem.flops(routing.routed_m) / median / 1e6
        rows.append(row)
    return pa.Table.from_pylist(rows)


def summary(table: pa.Table) -> str:
    """Per point: our time and the peer's over ours, its own tile and its best."""
    frame = table.select(
        ["scenario", "profile", "projection", "routed_m", "routing", "implementation", "time_us", "tflops"]
    )
    frame = frame.to_pandas()
    frame = frame[frame.routed_m.notna()]
    times = frame.pivot_table(
        index=["scenario", "profile", "routed_m", "projection"], columns="implementation", values="time_us"
    )
    for peer in ("humming", "humming_best_tile"):
        if peer in times:
            times[f"{peer}/ours"] = times[peer] / times["w4a16_moe"]
    return times.round(2).to_string()


def main() -> None:
    """Measure, write the file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/bench"))
    parser.add_argument("--budget-seconds", type=float, default=450.0)
    parser.add_argument("--rep-ms", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--from", dest="recording", type=pathlib.Path, help="a recording, instead of measuring")
    arguments = parser.parse_args()
    began = time.monotonic()
    recording = arguments.recording
    records = what_the_package_runs(read_records([recording]).records) if recording else measure(arguments)
    table = bench_table(records)
    day = max(record.date for record in records)[:10]
    path = arguments.out / f"bench-{day}.parquet"
    pq.write_table(table, path.with_suffix(".tmp"), compression="zstd")
    path.with_suffix(".tmp").replace(path)
    print(summary(table))
    where = records[0].environment.device_name
    print(f"{path}  {table.num_rows} rows in {time.monotonic() - began:.0f} s, measured on {where}")


def measure(arguments: argparse.Namespace) -> list[Record]:
    """Run the comparison on this machine's GPU."""
    gpus = visible_gpus()
    require_gpu(gpus)
    request = Request(
        scenario=",".join(SCENARIOS), source="live", peers="tiles", min_rounds=arguments.rounds, rep_ms=arguments.rep_ms
    )
    settings = replace(live_settings(request, arguments.out, gpus[0]), baseline=False)  # it never competes, and is slow
    device = live_device(settings, gpus[0])
    plan = bench_plan(bench_points(), device.slug)
    budget = Budget(arguments.budget_seconds)
    run(plan, LiveMeasure(settings), arguments.out, resume=arguments.resume, budget=budget, about=request.about())
    found = read_records(sorted(arguments.out.glob("journal-*.jsonl")))
    for notice in found.notices:
        print(notice, file=sys.stderr)
    return found.records


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"compare: {error}")

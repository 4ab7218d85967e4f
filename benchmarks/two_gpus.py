"""One GPU against all of this host's: the same sweep, candidates a minute, and whether the winners agree.

    python benchmarks/two_gpus.py --out runs/two_gpus

Runs the plan on the first GPU, then over dask workers on every visible GPU (one each), both with kernels compiled
before the clock starts. Writes two_gpus.json and the records of both runs into --out.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import time
from dataclasses import asdict
from typing import Any

import pandas as pd
import pyarrow as pa

from chord_lab.errors import UserError
from chord_lab.measurement.cluster import ClusterMeasure
from chord_lab.measurement.compile_ahead import CompileAhead
from chord_lab.measurement.cores import compilers
from chord_lab.measurement.live import LiveMeasure, LiveSettings, require_gpu
from chord_lab.measurement.nvml import visible_gpus
from chord_lab.measurement.rounds import RoundsPolicy
from chord_lab.measurement.stage import job_of
from chord_lab.measurement.worker import WorkerSettings
from chord_lab.records.attempt import Measure
from chord_lab.records.parquet import read_records, read_tables
from chord_lab.sweeps.plan import Plan, make_plan
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.run import run
from chord_lab.sweeps.space import device_named
from chord_lab.sweeps.winners import Winner, winners

DEVICE = "nvidia_h200"
WHOLE_POINT = 1000  # candidates of a share: points enough for every GPU, so none needs to be cut


def compile_all(plan: Plan) -> float:
    """Seconds to compile every kernel of the plan into Triton's cache."""
    began = time.perf_counter()
    ahead = CompileAhead(device_named(DEVICE).capability)
    jobs = list(dict.fromkeys(job_of(point, c) for point, candidates in plan.by_point() for c in candidates))
    ahead.submit(jobs)
    while ahead.num_pending():
        ahead.wait_any(1.0)
    ahead.close()
    return time.perf_counter() - began


def timed(plan: Plan, measure: Measure, out: pathlib.Path, gpus: int) -> tuple[dict[str, float], list[Winner]]:
    """Seconds (starting the processes included), candidates a minute once all GPUs measure, and verdicts of one run."""
    began = time.perf_counter()
    run(plan, measure, out)
    seconds = time.perf_counter() - began
    table = read_tables(out)[0]
    return {"seconds": seconds, "per_minute": steady_rate(table, gpus)}, winners(table)


def steady_rate(table: pa.Table, gpus: int) -> float:
    """Candidates a minute from the end of the first point to the end of the last.

    A point's records come together, at its end. The first point of each GPU is not counted: starting the processes
    weighs on none. Dates are whole seconds, so a rate over T seconds is good to a share of 1/T; measure for minutes.
    """
    frame = table.select(["kind", "date", "projection", "num_tokens"]).to_pandas()
    frame = frame[frame["kind"] == "candidate"]
    ended = pd.to_datetime(frame["date"].astype(str))
    points = ended.groupby([frame["projection"].astype(str), frame["num_tokens"]]).agg(["max", "size"])
    points = points.sort_values("max")
    seconds = (points["max"].iloc[-1] - points["max"].iloc[0]).total_seconds()
    return float(points["size"].iloc[gpus:].sum() / seconds * 60) if seconds else math.nan


def settings_for(gpu: str | None, workers: int, log: pathlib.Path, min_rounds: int) -> LiveSettings:
    """The same work per candidate on one GPU and on many."""
    return LiveSettings(
        worker=WorkerSettings(gpu=gpu, log=log),
        policy=RoundsPolicy(min_rounds=min_rounds),
        peers="none",
        baseline=False,
        ceilings=False,
        jobs=compilers(share=workers),
        log=log,
    )


def agree(one: list[Winner], many: list[Winner]) -> list[dict[str, Any]]:
    """Point by point: the same schedule, or both within each other's margin."""
    by_point = {(w.projection, w.routed_m): w for w in many}
    rows = []
    for w in one:
        other = by_point[(w.projection, w.routed_m)]
        same = w.best == other.best
        close = w.best in other.within or other.best in w.within
        rows.append(
            {
                "projection": w.projection,
                "routed_m": w.routed_m,
                "one": w.best.label() if w.best else None,
                "many": other.best.label() if other.best else None,
                "one_us": w.time_us,
                "many_us": other.time_us,
                "agree": "same" if same else "within the margin" if close else "no",
            }
        )
    return rows


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/two_gpus"))
    parser.add_argument("--scenario", default="kimi-k2/ep8/decode")
    parser.add_argument("--tokens", default="20,24,30,36,40,48,50,60")
    parser.add_argument("--profile", default="portable")
    parser.add_argument("--min-rounds", type=int, default=3)
    options = parser.parse_args()
    gpus = visible_gpus()
    require_gpu(gpus)
    if len(gpus) < 2:
        sys.exit(f"this compares one GPU with several; {len(gpus)} is visible")
    if options.out.exists():
        sys.exit(f"{options.out} exists; choose another --out")
    options.out.mkdir(parents=True)
    tokens = [int(part) for part in options.tokens.split(",")]
    points = scenario_points(options.scenario, tokens=tokens, profile=options.profile)
    plan = make_plan(points, device_named(DEVICE))
    compiling = compile_all(plan)
    print(f"{len(plan)} candidates, kernels compiled before ({compiling:.1f} s)", flush=True)
    log = (options.out / "children.log").resolve()
    one = settings_for(gpus[0], 1, log, options.min_rounds)
    many = settings_for(None, len(gpus), log, options.min_rounds)
    rates_one, verdicts_one = timed(plan, LiveMeasure(one), options.out / "one", 1)
    show_rates("1 GPU", rates_one)
    cluster = ClusterMeasure("local", many, device=DEVICE, gpus=gpus, share=WHOLE_POINT)
    rates_many, verdicts_many = timed(plan, cluster, options.out / "many", len(gpus))
    show_rates(f"{len(gpus)} GPUs", rates_many)
    first = read_records([options.out / "one"]).records[0]
    report = {
        "date": first.date,
        "environment": asdict(first.environment),
        "gpus": len(gpus),
        "candidates": len(plan),
        "compile_seconds": compiling,
        "one": rates_one,
        "many": rates_many,
        "speed_up": rates_many["per_minute"] / rates_one["per_minute"],
        "winners": agree(verdicts_one, verdicts_many),
    }
    (options.out / "two_gpus.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report)


def show_rates(name: str, rates: dict[str, float]) -> None:
    """At once: a run cut short has told what it measured."""
    print(f"{name:7} {rates['seconds']:8.1f} s  {rates['per_minute']:8.0f} candidates a minute", flush=True)


def show(report: dict[str, Any]) -> None:
    """What both runs say together."""
    print(f"speed-up {report['speed_up']:.2f} (1.8 asked for on two)")
    for row in report["winners"]:
        print(f"  {row['projection']:8} {row['routed_m']:6} rows: {row['agree']:18} {row['one']} | {row['many']}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))

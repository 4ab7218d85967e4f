"""A whole sweep with the fake measuring process, as a process of its own that tests can kill: DIR [--resume]."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
from w4a16_moe.schedule import Schedule

from chord_lab.measurement.live import LiveMeasure, LiveSettings
from chord_lab.measurement.rounds import RoundsPolicy
from chord_lab.measurement.worker import WorkerSettings
from chord_lab.records.attempt import Candidate
from chord_lab.sweeps.plan import Plan
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.run import Budget, run


def schedule(block_m=16, block_n=64, num_warps=4, num_stages=2):
    return Schedule(
        kernel="portable", block_m=block_m, block_n=block_n, block_k=64, num_warps=num_warps, num_stages=num_stages
    )


def candidates():
    """54 that run; the default is among them."""
    knobs = [(m, n, w, s) for m in (16, 32, 64) for n in (64, 128, 256) for w in (4, 8) for s in (2, 3, 4)]
    return [Candidate(schedule=schedule(*k), default=k == (16, 64, 4, 2)) for k in knobs]


def plan_of(candidates, tokens=(20,), projections=("gate_up",)):
    points = scenario_points("kimi-k2/ep8/decode", tokens=list(tokens), projections=projections, profile="portable")
    pairs = [[p, c] for p in range(len(points)) for c in range(len(candidates))]
    return Plan(points, candidates, np.array(pairs, dtype=np.int32))


def settings(sleep_s=0.0, noise=0.0, policy=None, peers="none", load_s=0.0, **worker):
    bench = {"sleep_s": sleep_s, "noise": noise, **worker.pop("bench_settings", {})}
    return LiveSettings(
        worker=WorkerSettings(bench="fake_bench:FakeBench", bench_settings=bench, **worker),
        policy=policy or RoundsPolicy(),
        compile_server="fake_bench:FakeCompiler",
        jobs=1,
        peers=peers,
        load_s=load_s,
    )


def sweep(directory, plan, resume=False, budget=None, watch=None, **over):
    return run(plan, LiveMeasure(settings(**over)), directory, resume=resume, budget=budget or Budget(), watch=watch)


if __name__ == "__main__":
    done = sweep(
        pathlib.Path(sys.argv[1]),
        plan_of(candidates()[::3], tokens=(20, 30)),
        resume="--resume" in sys.argv,
        sleep_s=0.004,
        policy=RoundsPolicy(min_rounds=2),
    )
    print(f"finished {done.progress.finished}")

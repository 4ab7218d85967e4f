"""Our sweep against `triton.autotune` over the same candidates of the portable kernel, on one GPU, cold caches both.

    python benchmarks/sweep_vs_autotune.py --out runs/autotune

Both try the same list at one point (block_m is fixed, because autotune cannot align the routing anew for each
candidate). Reported: wall time of each, the share of ours in which the GPU was busy (NVML), and both winners measured
against each other once more, interleaved, in one run. Writes autotune.json and the records of our sweep into --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from w4a16_moe.devices import Device
from w4a16_moe.legality import why_illegal
from w4a16_moe.profiles import get_profile
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.measurement.cores import usable_cores
from chord_lab.measurement.live import LiveMeasure, LiveSettings, require_gpu
from chord_lab.measurement.nvml import BusyMonitor, Nvml, visible_gpus
from chord_lab.measurement.rounds import RoundsPolicy
from chord_lab.measurement.worker import WorkerSettings
from chord_lab.records.attempt import Candidate, Point, point_from_dict, point_to_dict
from chord_lab.records.parquet import read_records, read_tables
from chord_lab.sweeps.plan import Plan
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.run import run
from chord_lab.sweeps.space import default_schedule, device_named
from chord_lab.sweeps.winners import Winner, winners

GRID: dict[str, tuple[Any, ...]] = {
    "block_n": (64, 128, 256),
    "block_k": (64, 128, 256),
    "num_warps": (2, 4, 8),
    "num_stages": (2, 3, 4, 5),
    "group_m": (1, 4),
    "token_slicing": ("static", "semi_static"),
    "dequant": ("subnormal", "exponent"),
}


def candidates_at(point: Point, device: Device, count: int) -> list[Schedule]:
    """`count` legal schedules of the point's default block_m, the default first, the others spread over the grid."""
    default = default_schedule(point, device)
    legal = []
    for values in itertools.product(*GRID.values()):
        knobs: dict[str, Any] = dict(zip(GRID, values, strict=True))
        schedule = replace(default, **knobs)
        if schedule != default and not why_illegal(schedule, point.problem, get_profile("portable"), device):
            legal.append(schedule)
    step = max(1.0, len(legal) / (count - 1))
    chosen = [legal[int(i * step)] for i in range(min(count - 1, len(legal)))]
    return [default, *chosen]


def sweep(point: Point, schedules: list[Schedule], out: pathlib.Path, gpu: str, env: dict[str, str]) -> dict[str, Any]:
    """Our engine over the list: seconds, busy share, winner."""
    os.environ.update(env)
    chosen = [Candidate(schedule=s, default=i == 0) for i, s in enumerate(schedules)]
    plan = Plan([point], chosen, np.array([[0, i] for i in range(len(chosen))], dtype=np.int32))
    log = out / "children.log"
    settings = LiveSettings(
        worker=WorkerSettings(gpu=gpu, log=log),
        policy=RoundsPolicy(rep_ms=100.0, warmup_ms=10.0),  # as long a repeat as autotune's own
        peers="none",
        baseline=False,
        ceilings=False,
        log=log,
    )
    began = time.perf_counter()
    with BusyMonitor(Nvml.of_visible(gpu)) as monitor:
        run(plan, LiveMeasure(settings), out)
    seconds = time.perf_counter() - began
    winner = only_winner(out)
    assert winner.best is not None
    return {
        "seconds": seconds,
        "busy_share": monitor.share,
        "winner": winner.best.to_dict(),
        "time_us": winner.time_us,
        "candidates": winner.candidates,
        "failed": winner.failures,
    }


def only_winner(directory: pathlib.Path) -> Winner:
    """The verdict of a run at one point."""
    (winner,) = winners(read_tables(directory)[0])
    return winner


def autotune(point: Point, schedules: list[Schedule]) -> dict[str, Any]:
    """`triton.autotune` over the list, in this process: seconds, winner. Called in a child with its own cache."""
    import torch
    import triton
    from w4a16_moe.portable import constexprs, portable_kernel

    from chord_lab.measurement.tensors import Layer, PointTensors

    tensors = PointTensors(point, Layer(point.problem, "cuda"), "cuda")
    packed = tensors.layer.packed("portable")
    routing = tensors.routing(schedules[0].block_m)
    top_k, problem = point.problem.top_k, point.problem
    capability = torch.cuda.get_device_capability()
    values = [constexprs(s, problem, top_k, capability[0] * 10 + capability[1]) for s in schedules]
    varying = [name for name in values[0] if len({repr(v[name]) for v in values}) > 1]
    fixed = {name: value for name, value in values[0].items() if name not in varying}
    configs = [
        triton.Config({name: v[name] for name in varying}, num_warps=s.num_warps, num_stages=s.num_stages)
        for s, v in zip(schedules, values, strict=True)
    ]
    tuned = triton.autotune(configs=configs, key=["routed_m"])(portable_kernel)
    blocks = routing.num_blocks_capacity

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (blocks * (problem.N // meta["BLOCK_N"]),)

    torch.cuda.synchronize()
    began = time.perf_counter()
    tuned[grid](
        tensors.x,
        packed.codes,
        packed.scales.view(torch.int32),
        tensors.out,
        routing.sorted_ids,
        routing.expert_ids,
        routing.num_tokens_padded,
        routing.routed_m,
        **fixed,
    )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    best = configs.index(tuned.best_config)
    return {"seconds": seconds, "winner": schedules[best].to_dict(), "candidates": len(schedules)}


def final(point: Point, pair: list[Schedule], out: pathlib.Path, gpu: str) -> dict[str, Any]:
    """Both winners against each other: eight interleaved rounds."""
    unique = list(dict.fromkeys(pair))
    if len(unique) == 1:
        return {"same_winner": True, "ratio": 1.0, "interval": [1.0, 1.0]}
    chosen = [Candidate(schedule=unique[0]), Candidate(schedule=unique[1], default=True)]
    plan = Plan([point], chosen, np.array([[0, 0], [0, 1]], dtype=np.int32))
    settings = LiveSettings(
        worker=WorkerSettings(gpu=gpu, log=out / "children.log"),
        policy=RoundsPolicy(min_rounds=8, rep_ms=100.0),
        peers="none",
        baseline=False,
        ceilings=False,
    )
    run(plan, LiveMeasure(settings), out / "final")
    winner = only_winner(out / "final")
    own = winner.best == unique[0]
    ratio = 1 - (winner.margin or 0.0)
    return {"same_winner": False, "ratio": ratio if own else 1.0, "interval": [winner.ratio_low, winner.ratio_high]}


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/autotune"))
    parser.add_argument("--candidates", type=int, default=210)
    parser.add_argument("--scenario", default="kimi-k2/ep8/decode")
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--autotune-only", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.autotune_only:
        task = json.loads(options.autotune_only.read_text())
        listed = [Schedule.from_dict(s) for s in task["schedules"]]
        print(json.dumps(autotune(point_from_dict(task["point"]), listed)))
        return
    gpus = visible_gpus()
    require_gpu(gpus)
    if options.out.exists():
        sys.exit(f"{options.out} exists; choose another --out")
    options.out.mkdir(parents=True)
    compare(options, gpus[0])


def compare(options: argparse.Namespace, gpu: str) -> None:
    """Ours, then autotune in a process of its own, then both winners together."""
    (point,) = scenario_points(options.scenario, tokens=[options.tokens], projections=["gate_up"], profile="portable")
    schedules = candidates_at(point, device_named("nvidia_h200"), options.candidates)
    caches = {name: options.out.resolve() / f"cache-{name}" for name in ("ours", "autotune")}
    env = {"TRITON_CACHE_DIR": str(caches["ours"]), "W4A16_MOE_COMPILE_CACHE": str(caches["ours"] / "facts")}
    ours = sweep(point, schedules, options.out / "sweep", gpu, env)
    task = options.out / "task.json"
    task.write_text(json.dumps({"point": point_to_dict(point), "schedules": [s.to_dict() for s in schedules]}))
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--autotune-only", str(task)],
        env={**os.environ, "TRITON_CACHE_DIR": str(caches["autotune"]), "CUDA_VISIBLE_DEVICES": gpu},
        capture_output=True,
        text=True,
        check=False,
    )
    whole = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"autotune failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no message'}")
    theirs = {**json.loads(done.stdout.strip().splitlines()[-1]), "process_seconds": whole}
    pair = [Schedule.from_dict(ours["winner"]), Schedule.from_dict(theirs["winner"])]
    against = final(point, pair, options.out, gpu)
    for folder in caches.values():
        shutil.rmtree(folder, ignore_errors=True)
    first = read_records([options.out / "sweep"]).records[0]
    report = {
        "date": first.date,
        "environment": asdict(first.environment),
        "point": point.label(),
        "cores": usable_cores(),
        "ours": ours,
        "autotune": theirs,
        "wall_ratio": ours["seconds"] / theirs["seconds"],
        "ours_over_autotune_winner": against,
    }
    (options.out / "autotune.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report)


def show(report: dict[str, Any]) -> None:
    """A short table."""
    ours, theirs = report["ours"], report["autotune"]
    busy = "unknown" if ours["busy_share"] is None else f"{ours['busy_share']:.0%}"
    print(f"{report['point']}: {ours['candidates']} candidates, {report['cores']} cores, cold caches")
    print(f"our sweep        {ours['seconds']:8.1f} s   GPU busy {busy}   failed {ours['failed'] or 0}")
    print(f"triton.autotune  {theirs['seconds']:8.1f} s   (its loop alone; process {theirs['process_seconds']:.1f} s)")
    print(f"wall time ours / autotune: {report['wall_ratio']:.3f} (one third asked for)")
    print(f"our winner       {Schedule.from_dict(ours['winner']).label()}")
    print(f"autotune winner  {Schedule.from_dict(theirs['winner']).label()}")
    against = report["ours_over_autotune_winner"]
    print(f"our winner's time / autotune winner's: {against['ratio']:.3f}, interval {against['interval']}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))

"""The live path on a real GPU: events, graphs, ceilings, a true illegal access, peers where installed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from w4a16_moe.problem import MoeProblem

from chord_lab.measurement.live import LiveMeasure, LiveSettings
from chord_lab.measurement.nvml import visible_gpus
from chord_lab.measurement.rounds import RoundsPolicy
from chord_lab.measurement.worker import GPU_TIMER, WorkerSettings
from chord_lab.records import read_records, read_tables
from chord_lab.records.attempt import Candidate, Point
from chord_lab.records.statistics import bandwidth_gbps, median_us
from chord_lab.sweeps.plan import Plan
from chord_lab.sweeps.points import routing_ref, scenario_points
from chord_lab.sweeps.run import run
from chord_lab.sweeps.space import default_schedule
from chord_lab.sweeps.winners import winners

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not visible_gpus(), reason="no CUDA GPU is visible"),
]


def small_point(num_tokens=64):
    problem = MoeProblem(num_experts=16, N=1024, K=2048, top_k=4)
    routing = routing_ref("uniform", num_tokens=num_tokens, num_experts=16, top_k=4, seed=0)
    name = {"scenario": "toy/ep1/decode", "projection": "gate_up", "profile": "portable"}
    return Point(**name, problem=problem, num_tokens=num_tokens, routing=routing)


def plan_of(point, schedules, default):
    chosen = [Candidate(schedule=s, default=s == default) for s in schedules]
    return Plan([point], chosen, np.array([[0, i] for i in range(len(chosen))], dtype=np.int32))


def sweep(directory, plan, launchers="", **over):
    worker = WorkerSettings(gpu=visible_gpus()[0], bench_settings={"timer": GPU_TIMER, "launchers": launchers})
    values = {
        "worker": worker,
        "policy": RoundsPolicy(min_rounds=3, rep_ms=5.0),
        "load_s": 0.2,
        "log": directory / "log",
    }
    directory.mkdir(exist_ok=True)
    return run(plan, LiveMeasure(LiveSettings(**{**values, **over})), directory)


@pytest.mark.alone
def test_a_small_sweep_measures_checks_and_names_what_ran(tmp_path):
    point = small_point()
    default = default_schedule(point, None)
    schedules = [default, replace(default, num_stages=3), replace(default, num_stages=2)]
    sweep(tmp_path, plan_of(point, schedules, default), peers="none")
    records = read_records(tmp_path).records
    ours = [r for r in records if r.kind == "candidate"]
    assert len(ours) == 3 and {r.status for r in ours} == {"ok"}
    for r in ours:
        assert len(r.rounds) >= 3 and 0 < r.rel_error < 3e-3 and 0 < r.rel_error_after < 3e-3
        assert "portable" in r.ran_kernel and r.facts.registers and r.method.timer == "graph_replay"
        assert 1 < median_us(r) < 1e4
    (baseline,) = [r for r in records if r.kind == "baseline"]
    assert baseline.status == "ok" and median_us(baseline) > median_us(ours[0])
    copies = [r for r in records if r.implementation == "copy"]
    assert len(copies) == 2 and all(bandwidth_gbps(r) > 100 for r in copies)
    (winner,) = winners(read_tables(tmp_path)[0])
    assert not [flag for flag in winner.flags if "impossible" in flag]


def test_an_illegal_access_costs_its_candidate_alone(tmp_path):
    point = small_point()
    default = default_schedule(point, None)
    wild = replace(default, num_stages=8)
    schedules = [default, replace(default, num_stages=3), wild, replace(default, num_stages=2)]
    sweep(tmp_path, plan_of(point, schedules, default), "gpu_faults:launchers", peers="none", baseline=False)
    found = [r for r in read_records(tmp_path).records if r.kind == "candidate"]
    status = {r.schedule: r.status for r in found}
    assert status.pop(wild) == "crashed", [r.reason for r in found]
    assert set(status.values()) == {"ok"} and len(status) == 3


@pytest.mark.alone
def test_a_cold_l2_is_slower_than_a_warm_one():
    """The events enclose launches whose weights were evicted: else a small layer would be read from L2."""
    import torch

    from chord_lab.measurement.gpu import GpuTimer
    from chord_lab.measurement.launch import Launch

    timer = GpuTimer()
    a = torch.randn(8 * 2**20, device="cuda")
    out = torch.empty((), device="cuda")
    launch = Launch(lambda: torch.sum(a, dim=0, out=out), "sum", "", 0)
    cold = np.median(timer.repeat(launch, {"timer": "cuda_event"}, 20.0, 2.0)["times_us"])
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(50):
        launch.run()
    end.record()
    torch.cuda.synchronize()
    assert cold > start.elapsed_time(end) * 1e3 / 50


@pytest.mark.skipif(importlib.util.find_spec("humming") is None, reason="humming-kernels is not installed")
def test_the_peer_runs_beside_ours_with_its_own_and_with_forced_tiles(tmp_path):
    (point,) = scenario_points("kimi-k2/ep8/decode", tokens=[20], projections=["down"], profile="portable")
    default = default_schedule(point, None)
    sweep(tmp_path, plan_of(point, [default], default), peers="tiles", baseline=False)
    peers = [r for r in read_records(tmp_path).records if r.kind == "peer"]
    assert {r.implementation for r in peers} == {"humming", "humming_tile"}
    own = next(r for r in peers if r.implementation == "humming")
    assert own.status == "ok" and own.rel_error < 1e-2 and own.config and len(own.rounds) >= 3
    (winner,) = winners(read_tables(tmp_path)[0])
    assert winner.humming_us and winner.humming_best_us <= winner.humming_us

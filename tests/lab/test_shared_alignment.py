"""One alignment for both projections: which schedules it leaves, and what is timed."""

from __future__ import annotations

import cpu_timer
import pytest
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from benchmarks import shared_alignment
from benchmarks.shared_alignment import Arrangement, LayerBench, arrangements, place_of, summary
from chord_lab.errors import UserError
from chord_lab.records.attempt import Point
from chord_lab.sweeps.points import routing_ref


def schedule(block_m, num_stages=2):
    return Schedule(kernel="portable", block_m=block_m, block_n=64, block_k=64, num_warps=4, num_stages=num_stages)


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(shared_alignment, "launch_ours", lambda t, c: cpu_timer.launchers(c)(t, c))
    routing = routing_ref("uniform", num_tokens=9, num_experts=6, top_k=2, seed=1)
    gate_up, down = (
        Point(
            scenario="toy/ep1/decode",
            projection=name,
            problem=MoeProblem(num_experts=6, N=64, K=128, top_k=top_k),
            profile="portable",
            num_tokens=9,
            routing=routing,
        )
        for name, top_k in (("gate_up", 2), ("down", 1))
    )
    return LayerBench(gate_up, down, cpu_timer.CpuTimer(), {})


def test_shared_takes_the_best_pair_of_one_block_m():
    gate_up = {schedule(16): 10.0, schedule(32): 13.0, schedule(32, 3): 12.0, schedule(64): 9.0}
    down = {schedule(16): 8.0, schedule(32): 5.0}
    independent, shared = arrangements(gate_up, down)
    assert independent == Arrangement("independent", (schedule(64), schedule(32)))
    assert shared == Arrangement("shared", (schedule(32, 3), schedule(32)))
    assert (independent.block_ms(), shared.block_ms()) == ([64, 32], [32])
    with pytest.raises(UserError, match="no block_m"):
        arrangements({schedule(16): 1.0}, {schedule(32): 1.0})


def test_rounds_are_interleaved_and_the_shared_sequence_aligns_once(layer, monkeypatch):
    aligned = []
    real = shared_alignment.align_to_blocks
    monkeypatch.setattr(
        shared_alignment, "align_to_blocks", lambda ids, n, block_m: aligned.append(block_m) or real(ids, n, block_m)
    )
    both = arrangements({schedule(16): 1.0, schedule(32): 2.0}, {schedule(16): 2.0, schedule(32): 1.0})
    launches = layer.launches(both[1])
    launches["shared"].run()
    assert len(aligned) == 1
    layer.launches(both[0])["independent"].run()
    assert aligned[1:] == [16, 32]
    rows = list(layer.rows(both, rounds=3, rep_ms=1.0, load_s=0.0))
    assert len(rows) == 12 and len({row["arrangement"] for row in rows}) == 4
    firsts = [rows[4 * number]["arrangement"] for number in range(3)]
    assert len(set(firsts)) == 3  # nobody is always first
    assert "ratio" in summary(rows) and place_of(layer.points[1])[1] == "down"


def test_a_schedule_that_computes_something_else_is_refused(layer):
    with pytest.raises(UserError, match="relative error"):
        layer.launches(Arrangement("shared", (schedule(16, num_stages=7), schedule(16))))


def test_without_a_gpu_there_is_one_line(monkeypatch):
    monkeypatch.setattr(shared_alignment, "visible_gpus", list)
    monkeypatch.setattr("sys.argv", ["shared_alignment"])
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        shared_alignment.main()

"""`indexed_gemm` and `moe_layer` refuse what they cannot compute, in one line, before a launch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import w4a16_moe
from w4a16_moe import MoeProblem, Schedule, align_to_blocks, get_profile, indexed_gemm, moe_layer, pack
from w4a16_moe.families import kernel_module
from w4a16_moe.moe import combine, swiglu
from w4a16_moe.tables import ProblemTable, TuningFile, TuningRow

SCHEDULE = Schedule(kernel="portable", block_m=16, block_n=32, block_k=64, num_warps=1, num_stages=2, swap_ab=True)


def call(**changes):
    codes = torch.zeros((2, 32, 64), dtype=torch.uint8)
    scales = torch.ones((2, 32, 2), dtype=torch.bfloat16)
    packed = pack(codes, scales, MoeProblem(num_experts=2, N=32, K=64), get_profile("portable"))
    arguments = {
        "x": torch.zeros((3, 64), dtype=torch.bfloat16),
        "packed": packed,
        "routing": align_to_blocks(torch.tensor([[0, 1], [1, 0], [0, 1]]), 2, 16),
        "top_k": 2,
        "schedule": SCHEDULE,
        "out": None,
    }
    arguments |= {name: change(arguments[name]) for name, change in changes.items()}
    return indexed_gemm(
        arguments["x"],
        arguments["packed"],
        arguments["routing"],
        top_k=arguments["top_k"],
        schedule=arguments["schedule"],
        out=arguments["out"],
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x": lambda x: x.float()}, r"x must be contiguous bfloat16 \[3, 64\], not float32 \[3, 64\]"),
        ({"x": lambda x: x[:2]}, r"x must be contiguous bfloat16 \[3, 64\], not bfloat16 \[2, 64\]"),
        ({"x": lambda x: torch.zeros((64, 3), dtype=torch.bfloat16).t()}, r"bfloat16 \[3, 64\] \(not contiguous\)"),
        ({"top_k": lambda _: 0}, "top_k=0 must be at least 1"),
        ({"top_k": lambda _: 4}, "routed_m=6 is not a multiple of top_k=4"),
        ({"out": lambda _: torch.zeros((6, 16), dtype=torch.bfloat16)}, r"out must be contiguous bfloat16 \[6, 32\]"),
        ({"schedule": lambda s: replace(s, block_m=32)}, "routing is aligned to block_m 16, the schedule .* to 32"),
        ({"schedule": lambda s: replace(s, block_n=64)}, "cannot run: tile divides N: block_n 64 does not divide N=32"),
        ({"schedule": lambda s: replace(s, kernel="wgmma")}, "cannot run: kernel of profile: profile portable runs"),
        ({"schedule": lambda s: replace(s, split_k=2)}, "cannot run: split divides K"),
        (
            {"packed": lambda p: replace(p, profile=get_profile("h200_grouped_decode"))},
            "profile h200_grouped_decode is grouped_masked; indexed_gemm needs an indexed profile",
        ),
        ({"routing": lambda r: r._replace(expert_ids=r.expert_ids.long())}, "routing.expert_ids must be int32"),
        (
            {"routing": lambda r: r._replace(expert_ids=torch.zeros(99, dtype=torch.int32))},
            "routing.expert_ids names 99 blocks, sorted_ids has rows for",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(**changes)
    assert "\n" not in str(caught.value)


def test_no_rows_are_an_empty_result_and_no_launch():
    """No table row covers 0 routed rows, and none is asked (B106)."""
    out = call(
        x=lambda x: x[:0],
        routing=lambda _: align_to_blocks(torch.empty((0, 2), dtype=torch.int64), 2, 16),
        schedule=lambda _: None,
    )
    assert out.shape == (0, 32)


def test_a_tuned_schedule_that_no_longer_compiles_gives_way_to_the_default(monkeypatch, tmp_path):
    """The winner of an older compiler must not take a service down: the default runs, a warning names both (B32)."""
    problem = MoeProblem(num_experts=2, N=32, K=64)
    winner = replace(SCHEDULE, num_stages=3)
    rows = (TuningRow(min_m=0, max_m=None, schedule=winner, measured_m=(6,)),)
    file = TuningFile(device="cpu", profile=get_profile("portable"), tables=(ProblemTable(problem=problem, rows=rows),))
    file.save(tmp_path / "portable.json")
    monkeypatch.setenv("W4A16_MOE_TUNING", str(tmp_path / "portable.json"))
    monkeypatch.setattr("w4a16_moe.resolve.current_device", lambda: "cpu")
    monkeypatch.setattr("w4a16_moe.gemm._substitutes", {})
    launched = []

    class Family:
        @staticmethod
        def launch(x, packed, routing, schedule, out, top_k):
            launched.append(schedule)
            if schedule == winner:
                raise RuntimeError("PassManager::run failed\nmore lines")

    monkeypatch.setattr("w4a16_moe.gemm.kernel_module", lambda kernel: Family)
    with pytest.warns(
        RuntimeWarning, match=r"s3 swap does not run here \(PassManager::run failed\); using portable 16x"
    ):
        call(schedule=lambda _: None)
    call(schedule=lambda _: None)  # remembered: no second attempt, no second warning
    assert [schedule == winner for schedule in launched] == [True, False, False]
    assert launched[1] == launched[2]
    with pytest.raises(RuntimeError, match="PassManager"):
        call(schedule=lambda _: winner)  # asked for by name: no silent substitute


def test_memory_that_ran_out_once_changes_no_schedule(monkeypatch):
    class Family:
        @staticmethod
        def launch(*arguments):
            raise torch.cuda.OutOfMemoryError("out of memory")

    known = {}
    monkeypatch.setattr("w4a16_moe.gemm._substitutes", known)
    monkeypatch.setattr("w4a16_moe.gemm.kernel_module", lambda kernel: Family)
    monkeypatch.setattr("w4a16_moe.gemm.default_schedule", lambda packed, rows: SCHEDULE)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        call(schedule=lambda _: None)
    assert not known


def test_the_schedule_is_that_of_the_card_that_holds_the_weights(monkeypatch):
    """The current device may be another card."""

    def resolve(problem, routed_m, profile, device=None):
        raise ValueError(f"asked for {device}")

    monkeypatch.setattr("w4a16_moe.gemm.resolve_schedule", resolve)
    monkeypatch.setattr("w4a16_moe.gemm._slug", lambda where: f"card of {where}")
    with pytest.raises(ValueError, match="asked for card of cpu"):
        call(schedule=lambda _: None)


def test_a_family_that_is_not_built_in_is_named(monkeypatch):
    monkeypatch.setitem(w4a16_moe.families.FAMILIES, "portable", w4a16_moe.families.Family(".absent", ".absent_rules"))
    with pytest.raises(ValueError, match="kernel portable is not part of this build"):
        kernel_module("portable")


def test_public_names_exist_and_load_on_first_use():
    for name in w4a16_moe.__all__:
        assert getattr(w4a16_moe, name) is not None
    assert set(w4a16_moe.__all__) <= set(dir(w4a16_moe))
    with pytest.raises(AttributeError, match="has no attribute 'humming'"):
        _ = w4a16_moe.humming


def test_the_package_stands_alone():
    """Importable and usable with neither a GPU nor the workbench on the path."""
    code = (
        "import sys, torch, w4a16_moe\n"
        "from w4a16_moe import *\n"
        "problem = MoeProblem(num_experts=2, N=16, K=64)\n"
        "packed = pack(torch.zeros((2, 16, 64), dtype=torch.uint8), torch.ones((2, 16, 2), dtype=torch.bfloat16),\n"
        "              problem, get_profile('portable'))\n"
        "unpack(packed)\n"
        "print('chord_lab' in sys.modules, any(name.startswith('pandas') for name in sys.modules))\n"
    )
    kernels = Path(w4a16_moe.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(kernels), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr


# ---- the layer's own arithmetic


def test_swiglu_rounds_once():
    hidden = torch.tensor([[1.0, -2.0, 3.0, 0.5]], dtype=torch.bfloat16)
    gate, up = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5])
    assert torch.equal(swiglu(hidden)[0], (gate / (1 + torch.exp(-gate)) * up).to(torch.bfloat16))


def test_combine_leaves_out_foreign_rows_and_marks_bad_ids():
    routed = torch.tensor([[1.0], [float("nan")], [2.0], [4.0], [8.0], [16.0]], dtype=torch.bfloat16)
    topk_ids = torch.tensor([[0, 1], [2, 0], [2, 7]])
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.25], [1.0, 1.0]])
    expert_map = torch.tensor([0, -1, 1], dtype=torch.int32)
    out = combine(routed, topk_ids, weights, 2, expert_map)
    assert out[:2, 0].tolist() == [0.5, 3.0]  # route 1 is foreign: its row was never written
    assert torch.isnan(out[2]).all()  # 7 is no expert


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"topk_ids": torch.zeros((2, 2), dtype=torch.int64)}, r"topk_ids must be \[3, top_k\], not \[2, 2\]"),
        ({"topk_weights": torch.zeros((3, 1))}, r"topk_weights must be float32 \[3, 2\]"),
        ({"down": (2, 64, 32)}, "gate_up has N=32; with down's K=32 it must be 64"),
        ({"down": (3, 64, 32)}, "gate_up has 2 experts, down 3"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(changes, message):
    def packed(E, N, K):
        codes, scales = torch.zeros((E, N, K), dtype=torch.uint8), torch.ones((E, N, K // 32), dtype=torch.bfloat16)
        return pack(codes, scales, MoeProblem(num_experts=E, N=N, K=K), get_profile("portable"))

    arguments = {
        "x": torch.zeros((3, 64), dtype=torch.bfloat16),
        "topk_ids": torch.zeros((3, 2), dtype=torch.int64),
        "topk_weights": torch.zeros((3, 2)),
    } | {name: value for name, value in changes.items() if name != "down"}
    with pytest.raises(ValueError, match=message):
        moe_layer(
            arguments["x"],
            packed(2, 32, 64),
            packed(*changes.get("down", (2, 64, 32))),
            arguments["topk_ids"],
            arguments["topk_weights"],
        )

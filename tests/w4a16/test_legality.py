"""Schedules that cannot run are named with their rule before anything is compiled."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from w4a16_moe import DEVICES, MoeProblem, Schedule, get_profile, why_illegal
from w4a16_moe.legality import rule_names
from w4a16_moe.portable_rules import RULES, smem_estimate

H200 = DEVICES["nvidia_h200"]
PORTABLE = get_profile("portable")
PROBLEM = MoeProblem(num_experts=48, N=4096, K=7168, top_k=8)
GOOD = Schedule(kernel="portable", block_m=16, block_n=128, block_k=64, num_warps=4, num_stages=4, swap_ab=True)


def verdict(problem=PROBLEM, device=H200, profile=PORTABLE, **changes):
    return why_illegal(replace(GOOD, **changes), problem, profile, device)


def test_a_good_schedule_is_legal_on_every_device():
    for device in DEVICES.values():
        assert verdict(device=device) is None


@pytest.mark.parametrize(
    "changes, rule, reason",
    [
        (
            {"block_m": 8, "swap_ab": False},
            "MMA shape",
            "needs 16; swap_ab puts tokens on its N side, where 8 is legal",
        ),
        ({"block_m": 24}, "block_m", "block_m 24: legal are 8, 16, 32, 64, 128, 256"),
        ({"block_k": 16}, "block_k", "block_k 16: legal are 64, 128, 256"),
        ({"block_k": 512}, "block_k", "block_k 512: legal are"),
        ({"block_n": 96}, "block_n", "block_n 96: legal are"),
        ({"num_warps": 3}, "num_warps", "num_warps 3: legal are 1, 2, 4, 8, 16"),
        ({"num_stages": 9}, "num_stages", "num_stages 9"),
        ({"split_k": 3}, "split divides K", "split_k 3 does not divide the 112 steps of block_k 64 in K=7168"),
        ({"num_warps": 16, "block_n": 16, "block_m": 8}, "warps fit tile", "16 warps for a tile of 1 MMA outputs"),
        ({"block_m": 256, "block_n": 256}, "accumulator registers", "512 fp32 accumulators a thread, at most 128"),
        ({"token_slicing": "branched"}, "token slicing", "branched is not in the portable kernel"),
        ({"token_slicing": "semi_static", "block_m": 8}, "token slicing", "needs swap_ab and block_m 16, 32, 64"),
        ({"token_slicing": "dynamic", "swap_ab": False}, "token slicing", "needs swap_ab"),
        ({"stream_k": True}, "grid", "stream_k is not in the portable kernel"),
        ({"tile_order": "dynamic"}, "grid", "tile_order dynamic is not in the portable kernel"),
        ({"ctas_per_sm": 2}, "grid", "ctas_per_sm 2 sets the size of a persistent grid"),
        ({"block_m": 128, "block_n": 256, "block_k": 256, "num_warps": 8, "num_stages": 8}, "shared memory", "232448"),
        (
            {"kernel": "mma_sync"},
            "kernel of profile",
            "profile portable runs portable; mma_sync belongs to h200_decode",
        ),
    ],
    ids=str,
)
def test_each_rule_is_named_with_its_reason(changes, rule, reason):
    found = verdict(**changes)
    assert found is not None
    assert found.rule == rule
    assert reason in found.reason
    assert "\n" not in str(found)


def test_tiles_must_divide_the_problem():
    """An intermediate size of 640 sliced for TP8 leaves 80 columns: no tile of 64, no whole scale group (B29)."""
    narrow = MoeProblem(num_experts=8, N=160, K=640)
    found = verdict(problem=narrow, block_n=64)
    assert found.rule == "tile divides N"
    assert found.reason == "block_n 64 does not divide N=160; dividing: 16, 32"
    with pytest.raises(ValueError, match="K=80 is not a multiple of group_size=32; nearest legal K: 64 and 96"):
        MoeProblem(num_experts=8, N=4096, K=80)
    found = verdict(problem=MoeProblem(num_experts=8, N=128, K=192), block_k=128)
    assert found.rule == "tile divides K"
    assert found.reason == "block_k 128 does not divide K=192; dividing: 64"


def test_k_of_7000_is_refused_with_the_nearest_legal():
    """218.75 scale groups (B61)."""
    with pytest.raises(ValueError, match="K=7000 is not a multiple of group_size=32; nearest legal K: 6976 and 7008"):
        MoeProblem(num_experts=1, N=7000, K=7000)


def test_a_grid_with_bad_values_goes_on_past_them():
    """BLOCK_K 16 and 512, BLOCK_M 128 among good ones: the bad are skipped with their rule, the good remain (B23)."""
    kept, refused = [], {}
    for block_m, block_k in itertools.product((16, 128), (16, 64, 128, 512)):
        found = verdict(block_m=block_m, block_k=block_k, num_warps=8)
        if found is None:
            kept.append((block_m, block_k))
        else:
            refused[block_m, block_k] = found.rule
    assert kept == [(16, 64), (16, 128), (128, 64), (128, 128)]
    assert set(refused.values()) == {"block_k"}


def test_block_m_of_8_is_refused_only_where_the_mma_needs_16():
    """tl.dot's M side needs 16; with operands swapped tokens are N, where 8 is legal (B25)."""
    assert verdict(block_m=8, swap_ab=False).rule == "MMA shape"
    assert verdict(block_m=8, swap_ab=True) is None


def test_profiles_name_kernel_and_device():
    decode = get_profile("h200_decode_ep8")
    found = verdict(profile=decode)
    assert found.rule == "kernel of profile"
    assert found.reason == "profile h200_decode_ep8 runs mma_sync, wgmma; portable belongs to portable"
    found = verdict(profile=decode, device=DEVICES["nvidia_a100_sxm4_80gb"], kernel="mma_sync")
    assert found.rule == "device of profile"
    assert "built for nvidia_h200, not nvidia_a100_sxm4_80gb" in found.reason


def test_group_size_and_card_memory():
    assert verdict(problem=replace(PROBLEM, group_size=128)).rule == "group size"
    large = MoeProblem(num_experts=4096, N=8192, K=8192)
    found = verdict(problem=large)
    assert found.rule == "device memory"
    assert found.reason == "weights take 154.6 GB, nvidia_h200 has 150.8 GB"


def test_shared_memory_depends_on_the_device():
    heavy = {"block_m": 128, "block_n": 128, "block_k": 128, "num_warps": 8, "num_stages": 5}
    assert smem_estimate(replace(GOOD, **heavy), 80) > DEVICES["nvidia_a100_sxm4_80gb"].smem_per_cta
    assert verdict(**heavy) is None
    assert verdict(device=DEVICES["nvidia_a100_sxm4_80gb"], **heavy).rule == "shared memory"


def test_rules_are_listed_in_the_order_they_are_applied():
    names = rule_names("portable")
    assert names[:4] == ["kernel of profile", "device of profile", "group size", "device memory"]
    assert names[4:] == [rule.name for rule in RULES]
    assert len(set(names)) == len(names)

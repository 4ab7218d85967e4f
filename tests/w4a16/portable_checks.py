"""What the portable kernel must get right, on tiny shapes, wherever it runs.

Not collected by name: `test_portable.py` runs it in a child process, through Triton's interpreter without a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from w4a16_moe import DEVICES, MoeProblem, Schedule, align_to_blocks, get_profile, why_illegal
from w4a16_moe.portable import COMPUTE_DTYPE
from w4a16_moe.portable_pieces import offset
from w4a16_moe.reference import gemm_reference, relative_error
from w4a16_moe.routing import align_to_blocks_torch
from w4a16_moe.routing_blocks import Routing, max_num_blocks
from w4a16_moe.routing_gpu import align_to_blocks_gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

BASE = {
    "kernel": "portable",
    "block_m": 16,
    "block_n": 32,
    "block_k": 64,
    "num_warps": 2,
    "num_stages": 2,
    "swap_ab": True,
}
SCHEDULES = [
    Schedule(**{**BASE, **changes})
    for changes in (
        {},
        {"block_m": 8},
        {"block_m": 32, "block_k": 128},
        {"block_m": 64, "num_warps": 4},
        {"block_m": 128, "num_warps": 4},
        {"block_m": 256, "num_warps": 4, "block_n": 64},
        {"swap_ab": False},
        {"swap_ab": False, "block_m": 64, "block_n": 64},
        {"split_k": 2},
        {"split_k": 4, "block_m": 8},
        {"persistent": True},
        {"persistent": True, "ctas_per_sm": 2, "group_m": 2, "split_k": 2},
        {"group_m": 3},
        {"token_slicing": "semi_static"},
        {"token_slicing": "semi_static", "block_m": 32},
        {"token_slicing": "semi_static", "block_m": 64, "split_k": 2},
        {"token_slicing": "dynamic"},
        {"token_slicing": "dynamic", "block_m": 32, "persistent": True},
        {"dequant": "exponent"},
        {"dequant": "exponent", "swap_ab": False, "num_stages": 3},
    )
]
COUNTS = [[0, 0, 5], [1, 1, 1], [0, 1, 0], [13, 0, 20], [40, 0, 0]]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=Schedule.label)
def test_every_schedule_matches_the_reference(schedule, make_layer):
    layer = make_layer(3, 64, 256, device=DEVICE)
    assert why_illegal(schedule, layer.problem, layer.packed.profile, DEVICES["nvidia_h200"]) is None
    topk_ids = torch.tensor(
        [[0, 2], [2, 1], [0, 1], [2, 0], [1, 2], [2, 0], [2, 1], [0, 2], [2, 0], [2, 1]], device=DEVICE
    )
    layer.check(schedule, topk_ids)


@pytest.mark.parametrize("tok_e", COUNTS, ids=str)
@pytest.mark.parametrize("slicing", ["static", "semi_static", "dynamic"])
def test_ragged_and_empty_experts(tok_e, slicing, make_layer, counts_to_ids):
    schedule = Schedule(**{**BASE, "token_slicing": slicing})
    make_layer(3, 32, 64, device=DEVICE).check(schedule, counts_to_ids(tok_e, DEVICE))


@pytest.mark.parametrize("K", [32, 96, 160])
@pytest.mark.parametrize("swap_ab", [True, False])
def test_an_odd_number_of_scale_groups(K, swap_ab, make_layer, counts_to_ids):
    schedule = Schedule(**{**BASE, "swap_ab": swap_ab})
    make_layer(2, 32, K, device=DEVICE).check(schedule, counts_to_ids([3, 9], DEVICE))


def test_foreign_routes_leave_no_row(make_layer):
    expert_map = torch.tensor([-1, 1, -1, 0, 2, -1], dtype=torch.int32, device=DEVICE)
    topk_ids = torch.tensor([[0, 3], [1, 4], [2, 5], [3, 1], [5, 0]], device=DEVICE)
    make_layer(3, 32, 64, device=DEVICE).check(Schedule(**BASE), topk_ids, expert_map)


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.block_m <= 32], ids=Schedule.label)
def test_nan_in_one_token_stays_in_its_rows(schedule, make_layer):
    """Padding reads row 0 of x under a mask, and tokens share tiles: neither may carry a NaN to another row."""
    layer = make_layer(2, 32, 256, device=DEVICE)
    topk_ids = torch.tensor([[0], [1], [0], [1], [0]], device=DEVICE)
    x = layer.activations(5)
    reference = gemm_reference(x, layer.packed, topk_ids, top_k=1)
    x[0] = float("nan")
    out = layer.run(schedule, x, align_to_blocks(topk_ids, 2, schedule.block_m), 1)
    assert relative_error(out[1:], reference[1:]) <= 3e-3
    assert bool(torch.isnan(out[0].float()).all())


@pytest.mark.parametrize("persistent", [False, True])
def test_entries_past_num_tokens_padded_are_not_touched(persistent, make_layer, counts_to_ids):
    """Over-allocated buffers hold leftovers of a larger batch: ids and experts that mean nothing now."""
    schedule = Schedule(**{**BASE, "persistent": persistent})
    layer = make_layer(2, 32, 64, device=DEVICE)
    topk_ids = counts_to_ids([3, 0], DEVICE)
    x = layer.activations(3)
    exact = align_to_blocks(topk_ids, 2, 16)
    used = int(exact.num_tokens_padded)
    sorted_ids = torch.zeros(used + 64, dtype=torch.int32, device=DEVICE)
    sorted_ids[:used] = exact.sorted_ids[:used]
    expert_ids = torch.ones(sorted_ids.numel() // 16, dtype=torch.int32, device=DEVICE)  # wrong expert for row 0
    expert_ids[: used // 16] = exact.expert_ids[: used // 16]
    stale = Routing(sorted_ids, expert_ids, exact.num_tokens_padded, 16, 3, 3)
    out = layer.run(schedule, x, stale, 1)
    assert relative_error(out, gemm_reference(x, layer.packed, topk_ids, top_k=1)) <= 3e-3


@pytest.mark.parametrize("split_k", [1, 2])
def test_a_block_of_expert_minus_one_is_skipped(split_k, make_layer, counts_to_ids):
    """Its rows stay as they are, whatever lies in the scratch of a split."""
    layer = make_layer(2, 32, 128, device=DEVICE)
    topk_ids = counts_to_ids([20, 3], DEVICE)
    x = layer.activations(23)
    routing = align_to_blocks(topk_ids, 2, 16)
    routing.expert_ids[1] = -1
    out = layer.run(Schedule(**{**BASE, "split_k": split_k}), x, routing, 1, fill=7.0)
    blanked = routing.sorted_ids[16:32].long()
    blanked = blanked[blanked < 23]
    rest = torch.ones(23, dtype=torch.bool, device=DEVICE)
    rest[blanked] = False
    reference = gemm_reference(x, layer.packed, topk_ids, top_k=1)
    assert bool((out[blanked] == 7).all())
    assert relative_error(out[rest], reference[rest]) <= 3e-3


@pytest.mark.parametrize("split_k", [1, 4])
def test_repeated_runs_are_bit_equal(split_k, make_layer, counts_to_ids):
    schedule = Schedule(**{**BASE, "split_k": split_k})
    layer = make_layer(2, 32, 256, device=DEVICE)
    topk_ids = counts_to_ids([7, 12], DEVICE)
    x = layer.activations(19)
    routing = align_to_blocks(topk_ids, 2, 16)
    first, second = (layer.run(schedule, x, routing, 1) for _ in range(2))
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))


def test_scales_at_the_ends_of_their_range(make_layer, counts_to_ids):
    """2^-105 and 2^14: the smallest and largest scales that packing lets pass, zero beside them."""
    layer = make_layer(1, 32, 128, device=DEVICE)
    for scale, dequant in (
        (2.0**-105, "subnormal"),
        (2.0**14, "subnormal"),
        (2.0**-105, "exponent"),
        (2.0**14, "exponent"),
    ):
        scales = torch.full_like(layer.scales, scale)
        scales[:, :, ::2] = 0
        from w4a16_moe import pack

        packed = pack(layer.codes, scales, layer.problem, layer.packed.profile)
        changed = type(layer)(layer.problem, layer.codes, scales, packed, layer.generator)
        changed.check(Schedule(**{**BASE, "dequant": dequant}), counts_to_ids([9], DEVICE))


@triton.jit
def _offsets_kernel(rows_ptr, out_ptr, STRIDE: tl.constexpr, LENGTH: tl.constexpr):
    index = tl.arange(0, LENGTH)
    tl.store(out_ptr + index, offset(tl.load(rows_ptr + index), STRIDE))


def test_row_offsets_are_64_bit():
    """56000 tokens x top_k 8 rows of 7168 outputs: 3.2e9 elements, past what an int32 offset can address."""
    rows = torch.tensor([0, 1, 299_593, 56_000 * 8 - 1], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    _offsets_kernel[(1,)](rows, out, STRIDE=7168, LENGTH=4)
    assert out.tolist() == [int(row) * 7168 for row in rows.tolist()]
    assert out[-1] > 2**31


def test_the_interpreter_never_multiplies_bf16():
    """Triton's interpreter multiplies bf16 bit patterns: there the kernel must compute in fp32."""
    expected = tl.float32 if INTERPRETED else tl.bfloat16
    assert expected == COMPUTE_DTYPE


@pytest.mark.parametrize("with_map", [False, True])
@pytest.mark.parametrize(
    "num_experts, num_tokens, top_k, block_m",
    [
        (1, 3, 1, 8),
        (48, 20, 8, 16),
        (60, 9, 4, 64),
        (257, 9, 8, 128),
        (385, 70, 8, 8),
        (1025, 200, 8, 32),
        (48, 0, 8, 16),
    ],
)
def test_gpu_alignment_equals_the_torch_twin(num_experts, num_tokens, top_k, block_m, with_map):
    generator = torch.Generator().manual_seed(num_experts + num_tokens)
    num_global = 2 * num_experts if with_map else num_experts
    topk_ids = torch.randint(0, num_global, (num_tokens, top_k), generator=generator)
    expert_map = None
    if with_map:
        expert_map = torch.full((num_global,), -1, dtype=torch.int32)
        expert_map[torch.randperm(num_global, generator=generator)[:num_experts]] = torch.arange(
            num_experts, dtype=torch.int32
        )
        expert_map = expert_map.to(DEVICE)
    topk_ids = topk_ids.to(DEVICE, torch.int32 if num_tokens % 2 else torch.int64)
    room = max_num_blocks(topk_ids.numel(), num_experts, block_m) + 5
    for extra in (0, 5):
        buffers = [
            [
                torch.full((n,), 77, dtype=torch.int32, device=DEVICE)
                for n in ((room - 5 + extra) * block_m, room - 5 + extra, 1)
            ]
            for _ in range(2)
        ]
        fast = align_to_blocks_gpu(topk_ids, num_experts, block_m, expert_map, tuple(buffers[0]))
        slow = align_to_blocks_torch(topk_ids, num_experts, block_m, expert_map, tuple(buffers[1]))
        for name in ("sorted_ids", "expert_ids", "num_tokens_padded"):
            assert torch.equal(getattr(fast, name), getattr(slow, name)), name
        assert fast[3:6] == slow[3:6]
        fast.check()


@pytest.mark.parametrize("num_tokens", [4, 700])
def test_gpu_alignment_counts_ids_out_of_range(num_tokens):
    """Nothing is read back, so a wrong id cannot raise at once: it gets no row, is counted, and `check` tells."""
    topk_ids = torch.zeros((num_tokens, 2), dtype=torch.int64, device=DEVICE)
    topk_ids[1, 0], topk_ids[2, 1] = 9, -1
    routing = align_to_blocks_gpu(topk_ids, 8, 16)
    with pytest.raises(ValueError, match=f"2 of {2 * num_tokens} routes name an expert that is out of range"):
        routing.check()
    kept = routing.sorted_ids[: int(routing.num_tokens_padded)]
    assert sorted(kept[kept < 2 * num_tokens].tolist()) == [r for r in range(2 * num_tokens) if r not in (2, 5)]


def test_moe_layer_matches_its_reference(make_layer):
    from w4a16_moe.moe import moe_layer, moe_layer_reference

    gate_up = make_layer(4, 64, 64, device=DEVICE, top_k=2).packed
    down = make_layer(4, 64, 32, device=DEVICE, seed=1).packed
    x = (torch.randn(6, 64, generator=torch.Generator().manual_seed(3)) * 0.5).to(torch.bfloat16).to(DEVICE)
    topk_ids = torch.tensor([[0, 5], [1, 2], [4, 3], [5, 1], [2, 0], [4, 5]], device=DEVICE)
    weights = torch.rand((6, 2), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    expert_map = torch.tensor([0, 1, -1, 2, -1, 3], dtype=torch.int32, device=DEVICE)
    small, large = Schedule(**{**BASE, "block_m": 8}), Schedule(**{**BASE, "block_m": 32})
    for first, second in ((small, small), (small, large)):
        out = moe_layer(x, gate_up, down, topk_ids, weights, expert_map, first, second)
        assert relative_error(out, moe_layer_reference(x, gate_up, down, topk_ids, weights, expert_map)) <= 5e-3
    assert bool((out[2:3].float() != 0).any())


def test_default_schedules_run(make_layer, counts_to_ids):
    """What the resolver gives when no table knows the shape must be legal and right, for any number of rows."""
    from w4a16_moe.portable_rules import default_schedule

    for N, K in ((64, 128), (80, 96)):
        layer = make_layer(2, N, K, device=DEVICE)
        for rows in (1, 9, 60) if INTERPRETED else (1, 9, 60, 150, 600):
            schedule = default_schedule(layer.problem, rows, get_profile("portable"), None)
            layer.check(schedule, counts_to_ids([rows // 2, rows - rows // 2], DEVICE))


def test_default_schedules_are_legal_everywhere():
    from w4a16_moe.portable_rules import default_schedule

    for N, K in ((16, 32), (4096, 7168), (7168, 2048), (512, 7168), (7168, 256), (2880, 2880), (1536, 4096), (48, 96)):
        problem = MoeProblem(num_experts=8, N=N, K=K)
        for device in DEVICES.values():
            for rows in (1, 7, 20, 100, 400, 1000, 5000, 100_000):
                schedule = default_schedule(problem, rows, get_profile("portable"), device)
                assert why_illegal(schedule, problem, get_profile("portable"), device) is None, (
                    N,
                    K,
                    rows,
                    device.slug,
                )

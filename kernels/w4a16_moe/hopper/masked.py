"""grouped_masked as indexed rows: a block table made on the device from masked_m, without asking for its values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..routing_blocks import Routing


@triton.jit(do_not_specialize=["num_experts", "max_m"])
def _blocks_kernel(
    masked_m_ptr,  # [num_experts] int32
    sorted_ids_ptr,  # [num_experts * blocks of max_m * BLOCK_M] int32
    expert_ids_ptr,  # [num_experts * blocks of max_m] int32
    num_tokens_padded_ptr,  # [1] int32
    num_experts,
    max_m,
    EXPERTS: tl.constexpr,  # num_experts rounded up to a power of two
    BLOCK_M: tl.constexpr,
    LANES: tl.constexpr,  # BLOCK_M rounded up to a power of two
):
    """Grid: (num_experts,). Each program counts the blocks before its expert anew: E is small, one launch is dear."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    rows = tl.load(masked_m_ptr + experts, mask=experts < num_experts, other=0)
    blocks = (tl.minimum(rows, max_m) + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, blocks, 0))
    if expert == 0:
        tl.store(num_tokens_padded_ptr, tl.sum(blocks) * BLOCK_M)
    mine = tl.minimum(tl.load(masked_m_ptr + expert), max_m)
    lane = tl.arange(0, LANES)
    for b in range((mine + BLOCK_M - 1) // BLOCK_M):
        tl.store(expert_ids_ptr + first + b, expert)
        row = b * BLOCK_M + lane
        entry = tl.where(row < mine, expert * max_m + row, num_experts * max_m)
        tl.store(sorted_ids_ptr + (first + b) * BLOCK_M + lane, entry, mask=lane < BLOCK_M)


def masked_to_blocks(masked_m: torch.Tensor, max_m: int, block_m: int, expected_rows: int) -> Routing:
    """Valid rows of ``[E, max_m, ...]`` as a `Routing` over its flattened rows; one small kernel, no synchronisation.

    ``masked_m`` int32 ``[E]`` on the GPU. ``expected_rows`` is what a schedule is resolved for. Capacity sets the size of
    the buffers only.
    """
    num_experts = masked_m.numel()
    num_blocks = num_experts * -(-max_m // block_m)
    options = {"dtype": torch.int32, "device": masked_m.device}
    sorted_ids = torch.empty(num_blocks * block_m, **options)
    expert_ids = torch.empty(num_blocks, **options)
    num_tokens_padded = torch.empty(1, **options)
    _blocks_kernel[(num_experts,)](
        masked_m, sorted_ids, expert_ids, num_tokens_padded, num_experts, max_m,
        EXPERTS=triton.next_power_of_2(num_experts), BLOCK_M=block_m, LANES=triton.next_power_of_2(block_m), num_warps=1,
    )  # fmt: skip
    return Routing(sorted_ids, expert_ids, num_tokens_padded, block_m, num_experts * max_m, expected_rows)

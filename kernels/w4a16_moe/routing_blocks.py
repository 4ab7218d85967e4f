"""Blocks of routed rows: the index tensors that the `indexed` kernels read, and the arguments they are made from.

    topk_ids            [num_tokens, top_k]   expert of each route; route r = token * top_k + slot
    sorted_ids          int32 [capacity]      routes grouped by local expert, each expert padded to a multiple of
                                              block_m; a padding entry holds routed_m, so one comparison masks it
    expert_ids          int32 [capacity / block_m]   local expert of each block, -1 past the last one
    num_tokens_padded   int32 [1]             entries of sorted_ids in use, on the device

Buffers are sized for the worst case, so that nothing has to be read back before a launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_EXPERTS = 4096  # experts that one alignment may have: one scan of them fits a single program


class Routing(NamedTuple):
    """Routed rows laid out in blocks of ``block_m``; shapes in the module's docstring."""

    sorted_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_padded: torch.Tensor
    block_m: int
    routed_m: int  # routes in topk_ids, local or not: rows of the output, and the id of a padding entry
    expected_m: int  # local routes to expect (all, without an expert_map): what a schedule is resolved for
    num_invalid: torch.Tensor | None = None  # int32 [1] on the GPU: routes whose id was out of range; see `check`

    @property
    def num_blocks_capacity(self) -> int:
        """Blocks that the buffers have room for: an upper bound of the blocks in use."""
        return self.expert_ids.numel()

    def check(self) -> None:
        """Refuse ids that were out of range. On a GPU this waits for the device, so call it outside the hot path.

        The GPU alignment cannot raise without waiting. It lays out no row for such a route, counts it in
        ``num_invalid``, and `moe_layer` turns the token's output into NaN: loud, and safe to capture in a graph.
        """
        if self.num_invalid is not None and (count := int(self.num_invalid)):
            raise ValueError(f"{count} of {self.routed_m} routes name an expert that is out of range")


def max_num_blocks(routed_m: int, num_experts: int, block_m: int) -> int:
    """Most blocks that any routing of ``routed_m`` rows can need: one row opens a block, ``block_m`` more the next."""
    active = min(routed_m, num_experts)
    return active + (routed_m - active) // block_m


def allocate(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Buffers of the worst case: sorted_ids, expert_ids, num_tokens_padded, ready to be passed as ``out``."""
    num_blocks = max_num_blocks(topk_ids.numel(), num_experts, block_m)
    sizes = (num_blocks * block_m, num_blocks, 1)
    sorted_ids, expert_ids, num_tokens_padded = (
        torch.empty(size, dtype=torch.int32, device=topk_ids.device) for size in sizes
    )
    return sorted_ids, expert_ids, num_tokens_padded


def expected_rows(routed_m: int, num_experts: int, expert_map: torch.Tensor | None) -> int:
    """Local routes to expect when routes spread evenly over all experts; no device value is read."""
    if expert_map is None or not expert_map.numel():
        return routed_m
    return min(routed_m, -(-routed_m * num_experts // expert_map.numel()))


def check_arguments(topk_ids: torch.Tensor, num_experts: int, block_m: int, expert_map: torch.Tensor | None) -> None:
    """Refuse what can be seen without reading a device value."""
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids must be int32 or int64, not {str(topk_ids.dtype).removeprefix('torch.')}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts={num_experts}: legal are 1 to {MAX_EXPERTS}")
    if block_m < 1:
        raise ValueError(f"block_m={block_m} must be at least 1")
    if topk_ids.numel() >= 2**31 - block_m * num_experts:
        raise ValueError(f"topk_ids has {topk_ids.numel()} routes; ids are int32, so fewer than 2^31 with padding")
    if expert_map is not None:
        if expert_map.dtype != torch.int32 or expert_map.dim() != 1:
            raise ValueError(
                f"expert_map must be int32 [num_global_experts], not {expert_map.dtype} {list(expert_map.shape)}"
            )
        if expert_map.device != topk_ids.device:
            raise ValueError(f"expert_map is on {expert_map.device}, topk_ids on {topk_ids.device}")


def out_buffers(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The caller's buffers after a check, or new ones."""
    if out is None:
        return allocate(topk_ids, num_experts, block_m)
    sorted_ids, expert_ids, num_tokens_padded = out
    num_blocks = max_num_blocks(topk_ids.numel(), num_experts, block_m)
    sizes = (("sorted_ids", sorted_ids, num_blocks * block_m), ("expert_ids", expert_ids, num_blocks))
    for name, tensor, least in (*sizes, ("num_tokens_padded", num_tokens_padded, 1)):
        if tensor.dtype != torch.int32 or tensor.device != topk_ids.device or not tensor.is_contiguous():
            raise ValueError(f"out: {name} must be a contiguous int32 tensor on {topk_ids.device}")
        if tensor.numel() < least:
            raise ValueError(f"out: {name} has {tensor.numel()} entries; the worst case needs {least}")
    if sorted_ids.numel() < expert_ids.numel() * block_m:
        # kernels size their grid by expert_ids: every block it names must have its rows
        raise ValueError(
            f"out: expert_ids has {expert_ids.numel()} blocks, sorted_ids rows for {sorted_ids.numel() // block_m}"
        )
    return sorted_ids, expert_ids, num_tokens_padded

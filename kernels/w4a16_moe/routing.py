"""From routes to blocks: `align_to_blocks` on any device. `routing_blocks` has what it makes, shapes included.

Within an expert the routes keep their order, so that repeated runs are bit-equal.
"""

from __future__ import annotations

import torch

from .routing_blocks import Routing, check_arguments, expected_rows, out_buffers


def align_to_blocks(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> Routing:
    """Group routes by local expert and pad each expert to whole blocks of ``block_m``.

    ``topk_ids`` int32 or int64 ``[num_tokens, top_k]``. ``num_experts`` counts the experts whose weights are here
    (fused shared experts included). ``expert_map`` int32 ``[num_global_experts]`` gives each global expert's local
    index, or -1: then ids are global, and a route to an expert that lives elsewhere leaves no row, no block, no
    expert. ``out`` = (sorted_ids, expert_ids, num_tokens_padded) reuses buffers, which may be larger than needed.

    Ids outside 0..num_experts-1 (with a map: 0..num_global_experts-1) are refused: on the CPU at once, on a GPU by
    ``Routing.check`` (see there). The GPU version does not wait for the device and can be captured in a CUDA graph.
    """
    if topk_ids.is_cuda:
        from .routing_gpu import align_to_blocks_gpu

        with torch.cuda.device(topk_ids.device):
            return align_to_blocks_gpu(topk_ids, num_experts, block_m, expert_map, out)
    return align_to_blocks_torch(topk_ids, num_experts, block_m, expert_map, out)


def align_to_blocks_torch(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> Routing:
    """`align_to_blocks` in plain torch for any device: the truth for the fast one. Reads values back to check them."""
    check_arguments(topk_ids, num_experts, block_m, expert_map)
    routed_m = topk_ids.numel()
    experts = _local_experts(topk_ids.reshape(-1).long(), num_experts, expert_map)  # [routed_m], -1 = foreign
    sorted_ids, expert_ids, num_tokens_padded = out_buffers(topk_ids, num_experts, block_m, out)

    routes = torch.nonzero(experts >= 0).reshape(-1)
    routes = routes[torch.argsort(experts[routes], stable=True)]
    tok_e = torch.bincount(experts[routes], minlength=num_experts)
    blocks = (tok_e + block_m - 1) // block_m
    block_end = torch.cumsum(blocks, 0)
    row_start = torch.cumsum(tok_e, 0) - tok_e
    owner = experts[routes]
    rank = torch.arange(routes.numel(), device=routes.device) - row_start[owner]

    sorted_ids.fill_(routed_m)
    sorted_ids[(block_end - blocks)[owner] * block_m + rank] = routes.int()
    expert_ids.fill_(-1)
    ids = torch.repeat_interleave(torch.arange(num_experts, device=routes.device), blocks)
    expert_ids[: ids.numel()] = ids.int()
    num_tokens_padded.fill_(int(blocks.sum()) * block_m)
    return Routing(
        sorted_ids, expert_ids, num_tokens_padded, block_m, routed_m, expected_rows(routed_m, num_experts, expert_map)
    )


def _local_experts(ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Local expert of each route, -1 if it lives elsewhere; out-of-range ids and map entries are refused."""
    legal = num_experts if expert_map is None else expert_map.numel()
    wrong = ids[(ids < 0) | (ids >= legal)]
    if wrong.numel():
        what = "num_experts" if expert_map is None else "global experts in expert_map"
        raise ValueError(
            f"topk_ids holds expert {int(wrong[0])} ({wrong.numel()} such routes); "
            f"legal are 0 to {legal - 1} ({what}={legal})"
        )
    if expert_map is None:
        return ids
    bad = expert_map[(expert_map < -1) | (expert_map >= num_experts)]
    if bad.numel():
        raise ValueError(f"expert_map holds local index {int(bad[0])}; legal are -1 and 0 to {num_experts - 1}")
    return expert_map.long()[ids]

"""A whole MoE layer over `indexed_gemm`: gate_up, SwiGLU, down, weighted sum. For tests and for use."""

from __future__ import annotations

import torch

from .gemm import default_schedule, indexed_gemm
from .packed import PackedWeights
from .reference import gemm_reference
from .routing import align_to_blocks
from .routing_blocks import expected_rows
from .schedule import Schedule


def moe_layer(
    x: torch.Tensor,
    gate_up: PackedWeights,
    down: PackedWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    gate_up_schedule: Schedule | None = None,
    down_schedule: Schedule | None = None,
) -> torch.Tensor:
    """``y[t] = sum_k topk_weights[t, k] * down(silu(gate(x[t])) * up(x[t]))`` over the experts of token t.

    ``x`` bf16 ``[num_tokens, hidden]``; ``gate_up`` holds gate in its first N/2 columns, up in the rest; ``topk_ids``
    int32 or int64 and ``topk_weights`` fp32 ``[num_tokens, top_k]``; ``expert_map`` as in `align_to_blocks`. Returns
    bf16 ``[num_tokens, hidden]``: with an expert_map the sum over local experts only, to be reduced by the caller.

    Each projection runs its own schedule; one routing serves both when their block_m agree. Nothing is read back from
    the device. A token with an id out of range comes back as NaN (on the CPU it is refused at once).
    """
    num_tokens, top_k = _check(x, gate_up, down, topk_ids, topk_weights)
    if num_tokens == 0:
        return x.new_empty((0, down.problem.N))
    num_experts = gate_up.problem.num_experts
    rows = expected_rows(topk_ids.numel(), num_experts, expert_map)
    first_block_m = (gate_up_schedule or default_schedule(gate_up, rows)).block_m
    second_block_m = (down_schedule or default_schedule(down, rows)).block_m
    routing = align_to_blocks(topk_ids, num_experts, first_block_m, expert_map)
    hidden = indexed_gemm(x, gate_up, routing, top_k=top_k, schedule=gate_up_schedule)
    if second_block_m != first_block_m:
        routing = align_to_blocks(topk_ids, num_experts, second_block_m, expert_map)
    routed = indexed_gemm(swiglu(hidden), down, routing, top_k=1, schedule=down_schedule)
    return combine(routed, topk_ids, topk_weights, num_experts, expert_map)


def moe_layer_reference(
    x: torch.Tensor,
    gate_up: PackedWeights,
    down: PackedWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """`moe_layer` from `gemm_reference`, rounded to bf16 where tensors of the layer are bf16; returns fp32."""
    experts = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    hidden = gemm_reference(x, gate_up, experts, top_k=topk_ids.shape[1]).to(torch.bfloat16)
    gate, up = hidden.float().chunk(2, dim=-1)
    activated = (gate * torch.sigmoid(gate) * up).to(torch.bfloat16)
    routed = gemm_reference(activated, down, experts, top_k=1).to(torch.bfloat16)
    routed = routed.float().view(*topk_ids.shape, -1).nan_to_num(nan=0.0)  # NaN marks routes without a local expert
    return (routed * topk_weights.float().unsqueeze(-1)).sum(dim=1)


def swiglu(hidden: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of ``[rows, N]``, in fp32, rounded once to bf16 ``[rows, N/2]``."""
    gate, up = hidden.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.float()).mul_(up).to(torch.bfloat16)


def combine(
    routed: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum over a token's local routes in fp32: bf16 ``[num_tokens * top_k, N]`` to bf16 ``[num_tokens, N]``.

    Rows of foreign routes hold whatever was in memory and are left out; an id out of range turns its token into NaN.
    """
    num_tokens, top_k = topk_ids.shape
    valid, local = _local_routes(topk_ids, num_experts, expert_map)
    weights = torch.where(valid, topk_weights.float(), float("nan"))
    by_slot = routed.view(num_tokens, top_k, -1)
    total = torch.zeros((num_tokens, by_slot.shape[-1]), dtype=torch.float32, device=routed.device)
    for slot in range(top_k):  # slot by slot: no fp32 copy of all routed rows
        rows = torch.where(local[:, slot, None], by_slot[:, slot].float(), 0.0)
        total.addcmul_(rows, weights[:, slot, None])
    return total.to(torch.bfloat16)


def _local_routes(
    topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(id in range, expert lives here) of each route; bool ``[num_tokens, top_k]``."""
    legal = num_experts if expert_map is None else expert_map.numel()
    valid = (topk_ids >= 0) & (topk_ids < legal)
    if expert_map is None:
        return valid, valid
    index = torch.where(valid, topk_ids, 0).long()
    return valid, valid & (expert_map[index] >= 0)


def _check(
    x: torch.Tensor,
    gate_up: PackedWeights,
    down: PackedWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> tuple[int, int]:
    first, second = gate_up.problem, down.problem
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids must be [{x.shape[0]}, top_k], not {list(topk_ids.shape)}")
    if topk_weights.shape != topk_ids.shape or topk_weights.dtype != torch.float32:
        raise ValueError(
            f"topk_weights must be float32 {list(topk_ids.shape)}, not {topk_weights.dtype} {list(topk_weights.shape)}"
        )
    if first.num_experts != second.num_experts:
        raise ValueError(f"gate_up has {first.num_experts} experts, down {second.num_experts}")
    if first.N != 2 * second.K:
        raise ValueError(f"gate_up has N={first.N}; with down's K={second.K} it must be {2 * second.K} (gate and up)")
    return topk_ids.shape[0], topk_ids.shape[1]

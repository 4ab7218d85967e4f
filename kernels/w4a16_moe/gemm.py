"""The public GEMM: checks its arguments, picks the schedule, hands over to a kernel family."""

from __future__ import annotations

import torch

from .families import kernel_module
from .packed import PackedWeights
from .routing import Routing
from .schedule import Schedule


def indexed_gemm(
    x: torch.Tensor,
    packed: PackedWeights,
    routing: Routing,
    *,
    top_k: int,
    schedule: Schedule | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[r] = x[r // top_k] @ dequantize(w[expert(r)]).T`` for every route r that ``routing`` lays out.

    ``x`` bf16 ``[num_tokens, K]``, ``out`` bf16 ``[routed_m, N]`` (made when None). ``top_k`` routes read one row of
    x: the router's top_k for gate_up, 1 for down. Rows of ``out`` without a local expert are left as they are.

    ``schedule=None`` takes the table's for this profile, device and row count; its block_m must be the routing's.
    Nothing is read back from the device, so a call can be captured in a CUDA graph. Raises ValueError, in one line.
    """
    _check_tensors(x, packed, routing, top_k, out)
    if out is None:
        out = torch.empty((routing.routed_m, packed.problem.N), dtype=torch.bfloat16, device=x.device)
    if routing.routed_m == 0 or routing.num_blocks_capacity == 0:
        return out
    if schedule is None:
        schedule = default_schedule(packed, routing.expected_m)
    if schedule.block_m != routing.block_m:
        raise ValueError(
            f"routing is aligned to block_m {routing.block_m}, the schedule {schedule.label()} to {schedule.block_m}"
        )
    kernel_module(schedule.kernel).launch(x, packed, routing, schedule, out, top_k)
    return out


def default_schedule(packed: PackedWeights, routed_m: int) -> Schedule:
    """What the tuning tables say for these weights and ``routed_m`` >= 1 rows on the current device."""
    from .resolve import resolve_schedule

    resolved = resolve_schedule(packed.problem, routed_m, packed.profile)
    assert resolved.schedule is not None  # only 0 rows have none
    return resolved.schedule


def _check_tensors(
    x: torch.Tensor, packed: PackedWeights, routing: Routing, top_k: int, out: torch.Tensor | None
) -> None:
    problem = packed.problem
    if top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    if routing.routed_m % top_k:
        raise ValueError(f"routed_m={routing.routed_m} is not a multiple of top_k={top_k}")
    _require("x", x, (routing.routed_m // top_k, problem.K))
    if out is not None:
        _require("out", out, (routing.routed_m, problem.N))
    if packed.profile.interface != "indexed":
        raise ValueError(
            f"profile {packed.profile.name} is {packed.profile.interface}; indexed_gemm needs an indexed profile"
        )
    for name, tensor in (("out", out), ("packed.codes", packed.codes), ("routing.sorted_ids", routing.sorted_ids)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")


def _require(name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    if tensor.dtype != torch.bfloat16 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        dtype = str(tensor.dtype).removeprefix("torch.")
        order = "" if tensor.is_contiguous() else " (not contiguous)"
        raise ValueError(f"{name} must be contiguous bfloat16 {list(shape)}, not {dtype} {list(tensor.shape)}{order}")

"""The public GEMM: checks its arguments, picks the schedule, hands over to a kernel family."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

from .devices import DEVICES, Device, device_slug
from .families import kernel_module
from .legality import why_illegal
from .packed import PackedWeights
from .problem import MoeProblem
from .profiles import Profile
from .resolve import resolve_schedule, untuned
from .routing_blocks import Routing
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
    Should it no longer compile, the untuned default runs instead and a RuntimeWarning says so. Nothing is read back
    from the device, so a call can be captured in a CUDA graph. Raises ValueError, in one line.
    """
    _check_tensors(x, packed, routing, top_k, out)
    if out is None:
        out = torch.empty((routing.routed_m, packed.problem.N), dtype=torch.bfloat16, device=x.device)
    if routing.routed_m == 0 or routing.num_blocks_capacity == 0:
        return out
    if schedule is not None:
        _launch(x, packed, routing, schedule, out, top_k)
    else:
        _launch_resolved(x, packed, routing, default_schedule(packed, routing.expected_m), out, top_k)
    return out


def _launch(
    x: torch.Tensor, packed: PackedWeights, routing: Routing, schedule: Schedule, out: torch.Tensor, top_k: int
) -> None:
    if schedule.block_m != routing.block_m:
        raise ValueError(
            f"routing is aligned to block_m {routing.block_m}, the schedule {schedule.label()} to {schedule.block_m}"
        )
    check_schedule(schedule, packed, x.device)
    with on_device(x.device):
        kernel_module(schedule.kernel).launch(x, packed, routing, schedule, out, top_k)


def check_schedule(schedule: Schedule, packed: PackedWeights, where: torch.device) -> None:
    """Refuse, before the launch, a schedule that cannot run for these weights on this device."""
    reason = _why_illegal(schedule, packed.problem, packed.profile, where)
    if reason:
        raise ValueError(f"schedule {schedule.label()} cannot run: {reason}")


# table's schedule that did not run here -> what runs instead; a table may be older than the compiler
_substitutes: dict[tuple[Schedule, MoeProblem, torch.device], Schedule] = {}


def _launch_resolved(
    x: torch.Tensor, packed: PackedWeights, routing: Routing, schedule: Schedule, out: torch.Tensor, top_k: int
) -> None:
    """Launch a table's schedule; if it does not compile here, warn once and launch the untuned default instead."""
    key = (schedule, packed.problem, x.device)
    schedule = _substitutes.get(key, schedule)
    try:
        _launch(x, packed, routing, schedule, out, top_k)
    except torch.cuda.OutOfMemoryError:
        raise  # it passes; another schedule would stay
    except Exception as error:
        if schedule.block_m != routing.block_m:
            raise  # the caller's routing, not the schedule, is wrong
        usual = untuned(packed.problem, routing.expected_m, packed.profile, _slug(x.device))
        substitute = replace(usual, block_m=routing.block_m)
        if substitute == schedule:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"tuned schedule {schedule.label()} does not run here ({reason}); using {substitute.label()}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        _launch(x, packed, routing, substitute, out, top_k)
        _substitutes[key] = substitute


def default_schedule(packed: PackedWeights, routed_m: int) -> Schedule:
    """What the tuning tables say for these weights and ``routed_m`` >= 1 rows on the device that holds the weights."""
    resolved = resolve_schedule(packed.problem, routed_m, packed.profile, _slug(packed.codes.device))
    assert resolved.schedule is not None  # only 0 rows have none
    return resolved.schedule


def _slug(where: torch.device) -> str | None:
    """The card of a device, which need not be the current one; None off the GPU."""
    return describe_device(where).slug if where.type == "cuda" else None


@lru_cache(maxsize=4096)
def _why_illegal(schedule: Schedule, problem: MoeProblem, profile: Profile, where: torch.device) -> str | None:
    """`legality.why_illegal` on the device at hand, remembered: a launch may not cost a walk through every rule."""
    illegality = why_illegal(schedule, problem, profile, describe_device(where))
    return None if illegality is None else str(illegality)


def on_device(where: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current GPU: make it the tensors' one."""
    return torch.cuda.device(where) if where.type == "cuda" else nullcontext()


@cache
def describe_device(where: torch.device) -> Device:
    """The limits of a torch device: the known card of that name, else what the driver reports; a CPU has no limits."""
    if where.type != "cuda":
        return Device(slug=where.type, capability=90, num_sms=1, smem_per_cta=1 << 30, smem_per_sm=1 << 30)
    properties = torch.cuda.get_device_properties(where)
    slug = device_slug(properties.name)
    return DEVICES.get(slug) or Device(
        slug=slug,
        capability=properties.major * 10 + properties.minor,
        num_sms=properties.multi_processor_count,
        smem_per_cta=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        smem_per_sm=properties.shared_memory_per_multiprocessor,
        threads_per_sm=properties.max_threads_per_multi_processor,
        memory_bytes=properties.total_memory,
    )


def _check_tensors(
    x: torch.Tensor, packed: PackedWeights, routing: Routing, top_k: int, out: torch.Tensor | None
) -> None:
    problem = packed.problem
    if top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    if routing.routed_m % top_k:
        raise ValueError(f"routed_m={routing.routed_m} is not a multiple of top_k={top_k}")
    require_bf16("x", x, (routing.routed_m // top_k, problem.K))
    if out is not None:
        require_bf16("out", out, (routing.routed_m, problem.N))
    if packed.profile.interface != "indexed":
        raise ValueError(
            f"profile {packed.profile.name} is {packed.profile.interface}; indexed_gemm needs an indexed profile"
        )
    for name, tensor in (("out", out), ("packed.codes", packed.codes), ("packed.scales", packed.scales)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")
    for name, tensor in zip(("sorted_ids", "expert_ids", "num_tokens_padded"), routing[:3], strict=True):
        if tensor.dtype != torch.int32 or tensor.device != x.device:
            raise ValueError(f"routing.{name} must be int32 on {x.device}, not {tensor.dtype} on {tensor.device}")
    if routing.sorted_ids.numel() < routing.expert_ids.numel() * routing.block_m:
        room = routing.sorted_ids.numel() // routing.block_m
        raise ValueError(
            f"routing.expert_ids names {routing.expert_ids.numel()} blocks, sorted_ids has rows for {room}"
        )


def require_bf16(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is not contiguous bf16 of this shape; the message names it."""
    if tensor.dtype != torch.bfloat16 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        dtype = str(tensor.dtype).removeprefix("torch.")
        order = "" if tensor.is_contiguous() else " (not contiguous)"
        raise ValueError(f"{name} must be contiguous bfloat16 {list(shape)}, not {dtype} {list(tensor.shape)}{order}")

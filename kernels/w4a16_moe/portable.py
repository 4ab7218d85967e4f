"""The portable kernel family: host side of `portable_kernel`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .offline import CompileSpec
from .packed import PackedWeights
from .portable_kernel import portable_kernel, sum_parts_kernel
from .portable_rules import SLICE
from .problem import MoeProblem
from .routing_blocks import Routing
from .schedule import Schedule

# The interpreter multiplies bf16 bit patterns instead of values, and knows no PTX: it computes in fp32 and plain
# arithmetic.
INTERPRETED = triton.knobs.runtime.interpret
COMPUTE_DTYPE = tl.float32 if INTERPRETED else tl.bfloat16

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

# Fewest columns for which Triton picks a warpgroup's instruction over mma.sync: 16 up to 3.7, the hardware's 8 from
# 3.8 on.
MIN_WARPGROUP_TOKENS = 16 if TRITON < (3, 8) else 8


def launch(
    x: torch.Tensor, packed: PackedWeights, routing: Routing, schedule: Schedule, out: torch.Tensor, top_k: int
) -> None:
    """Run a legal schedule. No check and no host synchronisation here: `gemm.indexed_gemm` checks."""
    problem = packed.problem
    num_tiles = routing.num_blocks_capacity * (problem.N // schedule.block_n) * schedule.split_k
    grid = num_tiles
    if schedule.persistent:
        grid = min(num_tiles, _num_sms(x.device) * schedule.ctas_per_sm)
    split = schedule.split_k > 1
    target = out
    if split:
        target = torch.empty((schedule.split_k, *out.shape), dtype=torch.float32, device=out.device)
    portable_kernel[(grid,)](
        x,
        packed.codes,
        packed.scales.view(torch.int32),
        target,
        routing.sorted_ids,
        routing.expert_ids,
        routing.num_tokens_padded,
        routing.routed_m,
        **constexprs(schedule, problem, top_k, _capability(x.device)),
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
    )
    if split:
        rows = routing.num_blocks_capacity * routing.block_m
        sum_parts_kernel[(rows, -(-problem.N // 1024))](
            target,
            out,
            routing.sorted_ids,
            routing.expert_ids,
            routing.num_tokens_padded,
            routing.routed_m,
            N=problem.N,
            SPLIT_K=schedule.split_k,
            BLOCK_M=routing.block_m,
            BLOCK_N=1024,
            COMPUTE=COMPUTE_DTYPE,
        )


def compile_spec(schedule: Schedule, problem: MoeProblem, top_k: int) -> CompileSpec:
    """What `offline` needs to compile the GEMM kernel of a schedule."""
    values = constexprs(schedule, problem, top_k)
    tensors = {
        "x_ptr": "*bf16",
        "codes_ptr": "*u8",
        "scales_ptr": "*i32",
        "out_ptr": "*fp32" if schedule.split_k > 1 else "*bf16",
        "sorted_ids_ptr": "*i32",
        "expert_ids_ptr": "*i32",
        "num_tokens_padded_ptr": "*i32",
    }
    return CompileSpec(
        fn=portable_kernel,
        signature={**tensors, "routed_m": "i32", **dict.fromkeys(values, "constexpr")},
        constexprs=values,
        options={"num_warps": schedule.num_warps, "num_stages": schedule.num_stages},
        divisible_by_16=tuple(tensors),
        by_capability=lambda capability: _by_capability(schedule, capability),
    )


def constexprs(schedule: Schedule, problem: MoeProblem, top_k: int, capability: int = 90) -> dict[str, Any]:
    """Compile-time arguments: the one place where a schedule's fields become the kernel's."""
    return {
        "N": problem.N,
        "K": problem.K,
        "TOP_K": top_k,
        "BLOCK_M": schedule.block_m,
        "BLOCK_N": schedule.block_n,
        "BLOCK_K": schedule.block_k,
        "GROUP_M": schedule.group_m,
        "SPLIT_K": schedule.split_k,
        "PERSISTENT": schedule.persistent,
        "NUM_STAGES": schedule.num_stages,
        "SWAP_AB": schedule.swap_ab,
        "TOKEN_SLICING": schedule.token_slicing,
        "TOKEN_SLICE": SLICE,
        "DEQUANT": schedule.dequant,
        "COMPUTE": COMPUTE_DTYPE,
        **_by_capability(schedule, capability),
    }


def _by_capability(schedule: Schedule, capability: int) -> dict[str, Any]:
    """What a GPU generation asks of the code; Triton through its interpreter asks for nothing."""
    asynchronous = capability // 10 in (9, 10) and not INTERPRETED  # tensor cores that read shared memory themselves
    fence = "none"
    if asynchronous and TRITON < (3, 7) and not reorders_x(schedule, capability):
        fence = "steps"  # later releases set it
    elif asynchronous and TRITON >= (3, 8) and schedule.token_slicing == "semi_static":
        fence = "slices"  # they set one a step, before the copies of later slices are waited for
    return {
        "REORDER_X": reorders_x(schedule, capability),
        "SETTLE": asynchronous and capability // 10 == 9,  # tcgen05 keeps sums in a memory that waits by itself
        "FENCE": fence,
    }


def reorders_x(schedule: Schedule, capability: int) -> bool:
    """Whether x is brought into the weights' stored order, rather than the weights into true order.

    Triton multiplies small tiles, and all tiles before Hopper, with mma.sync: its operands both come from registers,
    in any order of k, so stored order suits the weights. wgmma and tcgen05 read x from shared memory in true order. A
    wrong guess costs speed, never correctness.
    """
    if not schedule.swap_ab:
        return False
    tokens = schedule.block_m if schedule.token_slicing == "static" else SLICE
    small = tokens < MIN_WARPGROUP_TOKENS or schedule.num_warps % 4 != 0 or schedule.block_n < 64
    return small or capability // 10 not in (9, 10)


_sms: dict[torch.device, int] = {}


def _num_sms(device: torch.device) -> int:
    if device not in _sms:
        on_gpu = device.type == "cuda"
        _sms[device] = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
    return _sms[device]


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor

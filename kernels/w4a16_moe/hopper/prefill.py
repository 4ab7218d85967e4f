"""Host side of the wgmma schedules: indexed rows (gathered) and contiguous rows (tensor map)."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..offline import CompileSpec
from ..packed import PackedWeights
from ..problem import MoeProblem
from ..routing_blocks import Routing
from ..schedule import Schedule
from .barriers import offsets_of
from .limits import register_cap, sm_count
from .tiles import NUM_SLOTS
from .wgmma import wgmma_kernel
from .wgmma_contiguous import wgmma_contiguous_kernel
from .workspace import counters

GATHER_WARPS = 4
SWIZZLE_2D = gl.NVMMASharedLayout(128, 16, rank=2)
SWIZZLE_3D = gl.NVMMASharedLayout(128, 16, rank=3)
FLAT_2D = gl.NVMMASharedLayout(0, 32, rank=2)


def launch(
    x: torch.Tensor, packed: PackedWeights, routing: Routing, schedule: Schedule, out: torch.Tensor, top_k: int
) -> None:
    """Start the indexed kernel; no check, no synchronisation."""
    tiles = routing.num_blocks_capacity * (packed.problem.N // schedule.block_n)
    grid = (min(sm_count(x.device) * schedule.ctas_per_sm, tiles),)
    codes, scales = _weight_descriptors(packed, schedule)
    tables = (routing.sorted_ids, routing.expert_ids, routing.num_tokens_padded)
    arguments = (x, codes, scales, out, *tables, counters(2, x.device), routing.routed_m)
    _start(wgmma_kernel, grid, arguments, _constants(schedule, packed.problem, top_k), _options(schedule))


def launch_contiguous(
    x: torch.Tensor, packed: PackedWeights, m_indices: torch.Tensor, schedule: Schedule, out: torch.Tensor
) -> None:
    """Start the contiguous kernel; no check, no synchronisation."""
    num_rows = x.shape[0]
    tiles = -(-num_rows // schedule.block_m) * (packed.problem.N // schedule.block_n)
    grid = (min(sm_count(x.device) * schedule.ctas_per_sm, tiles),)
    rows = TensorDescriptor.from_tensor(x, [schedule.block_m, 64], SWIZZLE_2D)
    arguments = (rows, *_weight_descriptors(packed, schedule), out, m_indices, counters(2, x.device), num_rows)
    constants = _constants_contiguous(schedule, packed.problem)
    _start(wgmma_contiguous_kernel, grid, arguments, constants, _options(schedule, contiguous=True))


def _start(
    fn: Any, grid: tuple[int], arguments: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]
) -> None:
    """Launch with places in shared memory, of x and the barriers, read off the binary that is launched."""
    key = (fn.__name__, torch.cuda.current_device(), *constants.values(), *options.values())
    counts = barrier_counts(constants)
    offsets = offsets_of(key, lambda: fn.warmup(*arguments, 0, 0, grid=grid, **constants, **options), counts)
    fn[grid](*arguments, *offsets, **constants, **options)


def barrier_counts(constants: dict[str, Any]) -> list[int]:
    """Arrivals that each barrier of a kernel waits for, in the order in which it initialises them."""
    gathering = 32 * constants.get("GATHER_WARPS", 0)
    multiplying = 32 * constants["NUM_WARPS"]
    ring = [1 + gathering] * constants["STAGES"] + [multiplying] * constants["STAGES"]
    return ring + [32] * NUM_SLOTS.value + [multiplying + gathering] * NUM_SLOTS.value


def compile_spec(schedule: Schedule, problem: MoeProblem, top_k: int) -> CompileSpec:
    """For `offline.compile_facts`: the indexed kernel."""
    return _spec(wgmma_kernel, schedule, _constants(schedule, problem, top_k), _options(schedule))


def compile_spec_contiguous(schedule: Schedule, problem: MoeProblem) -> CompileSpec:
    """For `offline.compile_facts`: the contiguous kernel."""
    constants = _constants_contiguous(schedule, problem)
    return _spec(wgmma_contiguous_kernel, schedule, constants, _options(schedule, contiguous=True))


def _spec(fn: Any, schedule: Schedule, constants: dict[str, Any], options: dict[str, Any]) -> CompileSpec:
    blocks = schedule.block_n // 64
    pointers = {
        "x_ptr": "*bf16",
        "y_ptr": "*bf16",
        "sorted_ids_ptr": "*i32",
        "expert_ids_ptr": "*i32",
        "num_tokens_padded_ptr": "*i32",
        "m_indices_ptr": "*i32",
        "counter_ptr": "*i32",
    }
    types = {
        **pointers,
        "x_desc": f"tensordesc<bf16[{schedule.block_m}, 64],{SWIZZLE_2D!r}>",
        "codes_desc": f"tensordesc<i16[{blocks}, 16, 64],{SWIZZLE_3D!r}>",
        "scales_desc": f"tensordesc<i32[{blocks}, 64],{FLAT_2D!r}>",
        **dict.fromkeys(("routed_m", "num_rows", "x_offset", "barriers_offset"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return CompileSpec(
        fn=fn,
        signature={name: types[name] for name in fn.arg_names},
        constexprs=constants,
        options=options,
        divisible_by_16=tuple(name for name in fn.arg_names if name in pointers),
    )


def _weight_descriptors(packed: PackedWeights, schedule: Schedule) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Tensor maps of all experts' codes and scales: plain host data, made anew at each call."""
    K = packed.problem.K
    blocks = schedule.block_n // 64
    codes = packed.codes.view(-1, K // 64 * 16, 64)
    scales = packed.scales.view(-1, K)
    return (
        TensorDescriptor.from_tensor(codes, [blocks, 16, 64], SWIZZLE_3D),
        TensorDescriptor.from_tensor(scales, [blocks, 64], FLAT_2D),
    )


def _constants(schedule: Schedule, problem: MoeProblem, top_k: int) -> dict[str, Any]:
    return {
        **_constants_contiguous(schedule, problem),
        "TOP_K": top_k,
        "SLICING": schedule.token_slicing,
        "GATHER_WARPS": GATHER_WARPS,
        # 16 row pointers a thread at block_m 256
        "GATHER_REGISTERS": 72 if schedule.block_m > 128 else 40,
        # stages that are under way while the next one is started: a stage is announced LAG stages late, so a short ring
        # cannot afford two
        "LAG": 1 if schedule.num_stages <= 4 else 2,
    }


def _constants_contiguous(schedule: Schedule, problem: MoeProblem) -> dict[str, Any]:
    return {
        "N": problem.N,
        "K": problem.K,
        "BLOCK_M": schedule.block_m,
        "BLOCK_N": schedule.block_n,
        "STAGES": schedule.num_stages,
        "GROUP_M": schedule.group_m,
        "ORDER": schedule.tile_order,
        "NUM_WARPS": schedule.num_warps,
        "DEQUANT": schedule.dequant,
    }


def _options(schedule: Schedule, contiguous: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": schedule.num_warps}
    if (cap := register_cap(schedule, copy_warps=1 if contiguous else GATHER_WARPS + 1)) is not None:
        options["maxnreg"] = cap
    return options

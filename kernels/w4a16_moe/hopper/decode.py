"""Host side of the two mma.sync schedules: `mma_sync` (one CTA per tile) and `stream_k`."""

from __future__ import annotations

from typing import Any

import torch

from ..offline import CompileSpec
from ..packed import PackedWeights
from ..problem import MoeProblem
from ..routing_blocks import Routing
from ..schedule import Schedule
from .limits import register_cap, sm_count
from .mma_sync import mma_sync_kernel
from .stream_k import stream_k_kernel
from .workspace import counters

POINTERS = {
    "x_ptr": "*bf16",
    "codes_ptr": "*i16",
    "scales_ptr": "*i32",
    "y_ptr": "*bf16",
    "partial_ptr": "*fp32",
    "flag_ptr": "*i32",
    "sorted_ids_ptr": "*i32",
    "expert_ids_ptr": "*i32",
    "num_tokens_padded_ptr": "*i32",
}


def launch(
    x: torch.Tensor, packed: PackedWeights, routing: Routing, schedule: Schedule, out: torch.Tensor, top_k: int
) -> None:
    """Start the kernel; no check, no synchronisation."""
    constants = _constants(schedule, packed.problem, top_k, wide=x.numel() >= 2**31)
    options = _options(schedule)
    tables = (routing.sorted_ids, routing.expert_ids, routing.num_tokens_padded, routing.routed_m)
    if schedule.stream_k:
        num_ctas = sm_count(x.device) * schedule.ctas_per_sm
        tile = schedule.block_m * schedule.block_n
        partial = torch.empty(num_ctas * tile, dtype=torch.float32, device=x.device)
        flags = counters(num_ctas + 1, x.device)
        stream_k_kernel[(num_ctas,)](
            x, packed.codes, packed.scales, out, partial, flags, *tables, **constants, **options
        )
    else:
        grid = (routing.num_blocks_capacity * (packed.problem.N // schedule.block_n),)
        mma_sync_kernel[grid](x, packed.codes, packed.scales, out, *tables, **constants, **options)


def compile_spec(schedule: Schedule, problem: MoeProblem, top_k: int) -> CompileSpec:
    """For `offline.compile_facts`."""
    fn = stream_k_kernel if schedule.stream_k else mma_sync_kernel
    constants = _constants(schedule, problem, top_k)
    types = {**POINTERS, "routed_m": "i32", **dict.fromkeys(constants, "constexpr")}
    return CompileSpec(
        fn=fn,
        signature={name: types[name] for name in fn.arg_names},
        constexprs=constants,
        options=_options(schedule),
        divisible_by_16=tuple(name for name in fn.arg_names if name in POINTERS),
    )


def _constants(schedule: Schedule, problem: MoeProblem, top_k: int, wide: bool = False) -> dict[str, Any]:
    return {
        "N": problem.N,
        "K": problem.K,
        "TOP_K": top_k,
        "BLOCK_M": schedule.block_m,
        "BLOCK_N": schedule.block_n,
        "BLOCK_K": schedule.block_k,
        "STAGES": schedule.num_stages,
        "SLICING": schedule.token_slicing,
        "WIDE": wide,
        "NUM_WARPS": schedule.num_warps,
        "DEQUANT": schedule.dequant,
    }


def _options(schedule: Schedule) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": schedule.num_warps}
    if (cap := register_cap(schedule)) is not None:
        options["maxnreg"] = cap
    if schedule.stream_k:
        options["launch_cooperative_grid"] = True  # all CTAs resident, or the launch is refused: no deadlock
    return options

"""The grouped interfaces: rows laid out by expert, contiguous in 128-row groups or at a capacity of their own.

Both compute what the indexed interface does, so the same reference checks them: a launch works on buffers of its own,
which are poisoned before and gathered back into the point's output after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from chord_lab.measurement.launch import Launch, launched_kernels
from chord_lab.records.attempt import Candidate

if TYPE_CHECKING:
    from chord_lab.measurement.tensors import PointTensors


class GroupedRows:
    """Activations and output by expert, and where each routed row lies."""

    def __init__(self, tensors: PointTensors, starts: torch.Tensor, num_rows: int):
        problem = tensors.point.problem
        order = torch.argsort(tensors.experts, stable=True)  # routed rows by expert
        counts = torch.bincount(tensors.experts, minlength=problem.num_experts)
        first = torch.cumsum(counts, 0) - counts
        owner = tensors.experts[order]
        rank = torch.arange(len(order), device=order.device) - first[owner]
        self.places = starts[owner] + rank  # row of each routed row, in the order of `order`
        self.order = order
        self.x = torch.zeros((num_rows, problem.K), dtype=torch.bfloat16, device=tensors.device)
        self.x[self.places] = tensors.x[order // problem.top_k]
        self.out = torch.empty((num_rows, problem.N), dtype=torch.bfloat16, device=tensors.device)
        self._target = tensors.out

    def poison(self) -> None:
        """NaN where a row could stay unwritten, and in the gathered output too."""
        self.out.fill_(float("nan"))
        self._target.fill_(float("nan"))

    def collect(self) -> None:
        """Gather the result into the point's output."""
        self._target[self.order] = self.out[self.places]


def contiguous_rows(tensors: PointTensors, alignment: int) -> tuple[GroupedRows, torch.Tensor]:
    """Rows sorted by expert, every expert padded to `alignment` rows, and their m_indices."""
    from w4a16_moe.grouped import build_m_indices

    counts = torch.bincount(tensors.experts, minlength=tensors.point.problem.num_experts)
    padded = (counts + alignment - 1) // alignment * alignment
    rows = GroupedRows(tensors, torch.cumsum(padded, 0) - padded, int(padded.sum()))
    return rows, build_m_indices(counts.cpu(), alignment, tensors.device)


def masked_rows(tensors: PointTensors, capacity: int) -> tuple[GroupedRows, torch.Tensor]:
    """`capacity` rows an expert, and masked_m; a load above the capacity is refused."""
    num_experts = tensors.point.problem.num_experts
    counts = torch.bincount(tensors.experts, minlength=num_experts)
    if int(counts.max()) > capacity:
        raise ValueError(f"an expert has {int(counts.max())} rows, the capacity is {capacity}")
    starts = torch.arange(num_experts, device=tensors.device) * capacity
    return GroupedRows(tensors, starts, num_experts * capacity), counts.to(torch.int32)


def launch_grouped(tensors: PointTensors, candidate: Candidate) -> Launch:
    """Our kernels on a grouped point, through the public functions: what they derive from masked_m is timed too."""
    from w4a16_moe.grouped import GROUP_ROWS
    from w4a16_moe.grouped_gemm import grouped_contiguous_gemm, grouped_masked_gemm

    schedule, point = candidate.schedule, tensors.point
    assert schedule is not None
    packed = tensors.layer.packed(point.profile)
    run: Callable[[], Any]
    if point.interface == "grouped_contiguous":
        rows, index = contiguous_rows(tensors, GROUP_ROWS)
        run = partial(grouped_contiguous_gemm, rows.x, packed, index, schedule=schedule, out=rows.out)
        padded = len(rows.x)
    else:
        capacity = _capacity(tensors)
        rows, index = masked_rows(tensors, capacity)
        shape = (point.problem.num_experts, capacity, -1)
        expected_m = max(1, round(point.routed_m / point.problem.num_experts))
        x, out = rows.x.view(shape), rows.out.view(shape)
        run = partial(grouped_masked_gemm, x, packed, index, expected_m=expected_m, schedule=schedule, out=out)
        padded = point.routing.num_tokens_padded(schedule.block_m)
    with launched_kernels() as names:
        run()
    return Launch(
        run=run,
        ran_kernel="+".join(names) or schedule.kernel,
        ran_gemm_type=point.interface,
        num_tokens_padded=padded,
        poison=rows.poison,
        collect=rows.collect,
    )


def humming_grouped(tensors: PointTensors, layer: Any, config: str, kernel_name: str) -> Launch:
    """The peer on the same rows: offsets of unpadded groups, or counts at a capacity."""
    point = tensors.point
    block_m = json.loads(config)["block_shape"][0]
    compute = json.dumps({"use_f16_accum": False, "gemm_type": point.interface})
    arguments: dict[str, Any] = {"compute_config": compute, "tuning_config": config}
    if point.interface == "grouped_contiguous":
        rows, _ = contiguous_rows(tensors, 1)
        counts = torch.bincount(tensors.experts, minlength=point.problem.num_experts)
        arguments["expert_layout"] = torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])
    else:
        rows, arguments["expert_layout"] = masked_rows(tensors, _capacity(tensors))
        arguments["valid_shape_m"] = point.routed_m
    return Launch(
        run=lambda: layer(inputs=rows.x, outputs=rows.out, **arguments),
        ran_kernel=kernel_name,
        ran_gemm_type=point.interface,
        num_tokens_padded=point.routing.num_tokens_padded(block_m),
        poison=rows.poison,
        collect=rows.collect,
    )


def _capacity(tensors: PointTensors) -> int:
    point = tensors.point
    return point.capacity or max(point.routing.tok_e)

"""The grouped interfaces: rows sorted by expert with padding between (contiguous), or one slab per expert (masked)."""

from __future__ import annotations

import torch

from .gemm import check_schedule, default_schedule, on_device, require_bf16
from .grouped import GROUP_ROWS
from .packed import PackedWeights
from .schedule import Schedule


def grouped_contiguous_gemm(
    x: torch.Tensor,
    packed: PackedWeights,
    m_indices: torch.Tensor,
    *,
    schedule: Schedule | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[row] = x[row] @ dequantize(w[m_indices[row]]).T``; rows with -1 are padding and are not written.

    ``x`` bf16 ``[num_rows, K]``, ``m_indices`` int32 ``[num_rows]``, ``out`` bf16 ``[num_rows, N]`` (made when None,
    its padding rows left as they are). Each group of 128 rows has one expert, its real rows first;
    `grouped.check_m_indices` proves it where the layout is built. No value is read back. Raises ValueError, in one
    line.
    """
    from .hopper.prefill import launch_contiguous

    _need_interface(packed, "grouped_contiguous")
    num_rows = x.shape[0]
    require_bf16("x", x, (num_rows, packed.problem.K))
    if num_rows % GROUP_ROWS:
        raise ValueError(f"x has {num_rows} rows; grouped_contiguous needs a multiple of {GROUP_ROWS}")
    _require_counts("m_indices", m_indices, num_rows, x)
    out = _output(out, (num_rows, packed.problem.N), x)
    if num_rows == 0:
        return out
    schedule = schedule or default_schedule(packed, num_rows)
    check_schedule(schedule, packed, x.device)
    with on_device(x.device):
        launch_contiguous(x, packed, m_indices, schedule, out)
    return out


def grouped_masked_gemm(
    x: torch.Tensor,
    packed: PackedWeights,
    masked_m: torch.Tensor,
    *,
    expected_m: int,
    schedule: Schedule | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[e, i] = x[e, i] @ dequantize(w[e]).T`` for i < masked_m[e]; the other rows are neither read nor written.

    ``x`` bf16 ``[E, max_m, K]``, ``masked_m`` int32 ``[E]`` with values up to max_m, ``out`` bf16 ``[E, max_m, N]``
    (made when None). ``expected_m`` is the mean of masked_m that the caller expects: a hint for the schedule, as
    max_m is capacity and never picks a tile. No value is read back. Raises ValueError, in one line.
    """
    from .families import kernel_module
    from .hopper.masked import masked_to_blocks

    _need_interface(packed, "grouped_masked")
    problem = packed.problem
    if x.dim() != 3 or x.shape[0] != problem.num_experts:
        raise ValueError(f"x must be [{problem.num_experts}, max_m, {problem.K}], not {list(x.shape)}")
    if expected_m < 1:
        raise ValueError(f"expected_m={expected_m} must be at least 1")
    max_m = x.shape[1]
    require_bf16("x", x, (problem.num_experts, max_m, problem.K))
    _require_counts("masked_m", masked_m, problem.num_experts, x)
    out = _output(out, (problem.num_experts, max_m, problem.N), x)
    if max_m == 0:
        return out
    expected_rows = expected_m * problem.num_experts
    schedule = schedule or default_schedule(packed, expected_rows)
    check_schedule(schedule, packed, x.device)
    with on_device(x.device):
        routing = masked_to_blocks(masked_m, max_m, schedule.block_m, expected_rows)
        rows = (x.view(-1, problem.K), packed, routing, schedule, out.view(-1, problem.N), 1)
        kernel_module(schedule.kernel).launch(*rows)
    return out


def _need_interface(packed: PackedWeights, interface: str) -> None:
    if packed.profile.interface != interface:
        raise ValueError(f"profile {packed.profile.name} is {packed.profile.interface}; this call needs {interface}")


def _require_counts(name: str, tensor: torch.Tensor, length: int, x: torch.Tensor) -> None:
    if tensor.dtype != torch.int32 or tuple(tensor.shape) != (length,) or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous int32 [{length}], not {tensor.dtype} {list(tensor.shape)}")
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")


def _output(out: torch.Tensor | None, shape: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    require_bf16("out", out, shape)
    return out

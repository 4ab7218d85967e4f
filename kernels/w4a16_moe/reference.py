"""The truth in plain torch: short enough to trust by reading.

Precision: weights are dequantised to bf16 ((code - 8) * scale, one rounding, as every kernel here does), multiplied
with bf16 activations in fp32 with TF32 off, and returned in fp32. A kernel that sums in fp32 and rounds its output
once to bf16 is within about 1.7e-3 of it in relative error; `TOLERANCE` leaves room for another order of summation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .layout import unpack_expert
from .packed import PackedWeights

TOLERANCE = 3e-3  # relative error of a bf16 output; 2^-9 / sqrt(3) = 1.1e-3 is the rounding of the output alone


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes uint8 ``[..., N, K]`` and scales bf16 ``[..., N, K/group]`` to weights bf16 ``[..., N, K]``."""
    group = codes.shape[-1] // scales.shape[-1]
    values = codes.float().sub_(8).unflatten(-1, (-1, group)) * scales.float().unsqueeze(-1)
    return values.flatten(-2).to(torch.bfloat16)


def gemm_reference(
    x: torch.Tensor,
    weights: PackedWeights | tuple[torch.Tensor, torch.Tensor],
    experts: torch.Tensor,
    *,
    top_k: int,
) -> torch.Tensor:
    """``y[r] = x[r // top_k] @ dequantize(w[experts[r]]).T`` in fp32, for every route r.

    ``x`` bf16 ``[routed_m // top_k, K]``; ``weights`` packed, or (codes ``[E, N, K]``, scales ``[E, N, K/32]``);
    ``experts`` ``[routed_m]`` or ``[num_tokens, top_k]``: local expert of each route, -1 for none.
    Returns fp32 ``[routed_m, N]``; rows of routes without a local expert are NaN, as nothing may be assumed of them.
    """
    experts = experts.reshape(-1)
    num_experts, N = _num_experts_and_columns(weights)
    y = torch.full((experts.numel(), N), float("nan"), device=x.device)
    with _true_fp32():
        for expert in range(num_experts):
            rows = torch.nonzero(experts == expert).reshape(-1)
            if rows.numel():
                w = dequantize(*_one_expert(weights, expert)).to(x.device).float()
                y[rows] = x[rows // top_k].float() @ w.t()
    return y


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """``||out - ref|| / ||ref||`` over the rows that the reference defines; NaN in ``out`` there gives NaN."""
    rows = ~torch.isnan(ref).any(dim=-1)
    difference = (out[rows].double() - ref[rows].double()).norm()
    scale = ref[rows].double().norm()
    return float(difference / scale) if scale > 0 else float(difference)


def _num_experts_and_columns(weights: PackedWeights | tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    if isinstance(weights, PackedWeights):
        return weights.problem.num_experts, weights.problem.N
    return weights[0].shape[0], weights[0].shape[1]


def _one_expert(
    weights: PackedWeights | tuple[torch.Tensor, torch.Tensor], expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(weights, PackedWeights):
        return unpack_expert(weights, expert)
    return weights[0][expert], weights[1][expert]


@contextmanager
def _true_fp32() -> Iterator[None]:
    """TF32 off: with it an fp32 product is only good to 1e-3, and the reference would be blamed on the kernel."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

"""Layout `fragment64`: one copy of the weights that both Hopper kernels read at full speed.

A block of 64 output columns (n) x 64 reduction elements (k) is 2048 contiguous bytes. Both tensor-core instructions,
``mma.sync.m16n8k16`` and ``wgmma.m64nNk16`` with A in registers, give a thread the same elements of a 16 x 16 piece of
weights, so a block is stored as 16 bytes for each of the 128 threads of a warpgroup, in thread order:

    byte  16 * thread + 2 * i,  thread = 32 * warp + 4 * g + t   (warp 0..3, g 0..7, t 0..3),  i = 0..7
    holds one 16-bit word: row n = 16 * warp + g + 8 * bit1(i),  kk = 2 * t + bit0(i) + 8 * bit2(i)
    word bits 0-3 = code of k = kk, 4-7 = kk + 32, 8-11 = kk + 16, 12-15 = kk + 48

so one 16-byte load is a thread's share of four k16 steps, conflict-free and coalesced, and no shuffle follows.
Bits 0-3 and 8-11 belong to the first scale group (k 0..31), bits 4-7 and 12-15 to the second.

Scales: one 32-bit word per n and 64 k: low half group 0, high half group 1, each a bf16 already multiplied by 2**113
(group 0) or 2**109 (group 1). A code left in bits 0-3 (4-7) of an otherwise empty bf16 is the subnormal
code * 2**-133 (2**-129), so ``fma(word, scale', -8 * scale * 2**-20)`` is (code - 8) * scale * 2**-20 with the one
rounding that plain dequantisation to bf16 has; the epilogue multiplies by 2**20. It holds for the scales that packing
admits: below 2**-105 a value would be subnormal, above 2**14 a stored scale could overflow. Order: row pairs
(g, g + 8) adjacent, so a thread's two scales are one 8-byte load.
"""

from __future__ import annotations

import torch

from ..problem import MoeProblem
from . import TensorSpecs

BLOCK = 64  # rows and reduction elements of one stored block
SCALE_EXPONENT = (113, 109)  # powers of two on the stored scales of the first and second group
OUTPUT_EXPONENT = 20  # the epilogue multiplies by 2**20


def why_not(problem: MoeProblem) -> str | None:
    """Why this problem cannot be stored in blocks of 64 x 64, or None."""
    if problem.group_size != 32:
        return f"layout fragment64 needs group_size 32, not {problem.group_size}"
    for name, value in (("N", problem.N), ("K", problem.K)):
        if value % BLOCK:
            below = value - value % BLOCK
            nearest = f"nearest {below or 64} and {below + 64}"
            return f"layout fragment64 needs {name} to be a multiple of 64; {name}={value}, {nearest}"
    return None


def tensor_specs(problem: MoeProblem) -> TensorSpecs:
    """Shapes and dtypes of the packed codes and scales of all experts."""
    blocks = (problem.num_experts, problem.N // BLOCK, problem.K // BLOCK)
    return TensorSpecs((*blocks, 1024), torch.int16, (*blocks, BLOCK), torch.int32)


def pack_expert(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[N, K]``, scales bf16 ``[N, K/32]`` to int16 ``[N/64, K/64, 1024]``, int32 ``[N/64, K/64, 64]``."""
    return _pack_codes(codes), _pack_scales(scales)


def unpack_expert(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact inverse of `pack_expert`."""
    return _unpack_codes(codes), _unpack_scales(scales)


# Axes of a block while permuting: n = 16*warp + 8*h + g, kk = 8*c + 2*t + b; stored as (warp, g, t, c, h, b).
def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    N, K = codes.shape
    j = codes.view(N, K // BLOCK, 4, 16).to(torch.int32)  # [n, k64, 16-step, kk]
    words = j[:, :, 0] | (j[:, :, 2] << 4) | (j[:, :, 1] << 8) | (j[:, :, 3] << 12)
    words = words.view(N // BLOCK, 4, 2, 8, K // BLOCK, 2, 4, 2)  # [n64, warp, h, g, k64, c, t, b]
    words = words.permute(0, 4, 1, 3, 6, 5, 2, 7).reshape(N // BLOCK, K // BLOCK, 1024)
    return words.to(torch.int16)  # int32 -> int16 keeps the low 16 bits


def _unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    n64, k64, _ = packed.shape
    words = packed.to(torch.int32).view(n64, k64, 4, 8, 4, 2, 2, 2).permute(0, 2, 6, 3, 1, 5, 4, 7)
    words = words.reshape(n64 * BLOCK, k64, 16)
    steps = [(words >> shift) & 15 for shift in (0, 8, 4, 12)]  # k = kk, kk+16, kk+32, kk+48
    return torch.stack(steps, dim=2).reshape(n64 * BLOCK, k64 * BLOCK).to(torch.uint8)


def _scale_factors(device: torch.device) -> torch.Tensor:
    return torch.tensor([2.0**e for e in SCALE_EXPONENT], device=device)


def _pack_scales(scales: torch.Tensor) -> torch.Tensor:
    N, groups = scales.shape
    scaled = (scales.float().view(N, groups // 2, 2) * _scale_factors(scales.device)).to(torch.bfloat16)
    scaled = scaled.view(N // BLOCK, 4, 2, 8, groups // 2, 2)  # [n64, warp, h, g, k64, group]
    scaled = scaled.permute(0, 4, 1, 3, 2, 5).reshape(N // BLOCK, groups // 2, BLOCK, 2).contiguous()
    return scaled.view(torch.int32).view(N // BLOCK, groups // 2, BLOCK)


def _unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    n64, k64, _ = packed.shape
    scaled = packed.contiguous().view(torch.bfloat16).view(n64, k64, 4, 8, 2, 2).permute(0, 2, 4, 3, 1, 5)
    scaled = scaled.reshape(n64 * BLOCK, k64, 2).float() / _scale_factors(packed.device)
    return scaled.to(torch.bfloat16).reshape(n64 * BLOCK, k64 * 2)

"""Layout `rows`: blocks of 64 k, one row of 32 bytes per output column, for the portable kernel.

    codes   uint8 [E, ceil(K/64), N, 32]
    scales  bf16  [E, ceil(K/64), N, 2]     the two scale groups of a block, read as one 32-bit word

A tile of output columns is one contiguous piece per block of K. In byte ``p = 8*t + 4*h + 2*q + b`` (t 0..3; h, q, b
0..1) the low nibble is k = 16*h + 8*q + 2*t + b of the block, the high nibble k + 32. So the low nibbles are one
scale group and the high nibbles the next, and eight neighbouring bytes are what one thread holds of a row in a 16-bit
tensor-core instruction: quarter t, pairs b, halves q, two k16 steps h. A thread reads them at once and shuffles
nothing.

When K is an odd number of groups, the last block's high nibbles are code 8 under scale 0.
"""

from __future__ import annotations

import torch

from ..problem import MoeProblem
from . import TensorSpecs

BLOCK = 64  # k per block: two scale groups of 32
GROUP = 32
ZERO_CODE = 8


def num_blocks(K: int) -> int:
    """Blocks of 64 along K, the last one half empty when K is an odd number of groups."""
    return -(-K // BLOCK)


def tensor_specs(problem: MoeProblem) -> TensorSpecs:
    """Shapes and dtypes of a packed layer."""
    blocks = (problem.num_experts, num_blocks(problem.K), problem.N)
    return TensorSpecs((*blocks, GROUP), torch.uint8, (*blocks, 2), torch.bfloat16)


def why_not(problem: MoeProblem) -> str | None:
    """Any N, any K of whole groups."""
    return None


def pack_expert(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[N, K]`` and scales bf16 ``[N, K/32]`` to uint8 ``[K/64, N, 32]`` and bf16 ``[K/64, N, 2]``."""
    N, K = codes.shape
    if K % BLOCK:
        codes = torch.cat((codes, codes.new_full((N, GROUP), ZERO_CODE)), dim=1)
        scales = torch.cat((scales, scales.new_zeros((N, 1))), dim=1)
    low, high = codes.view(N, -1, 2, GROUP).unbind(2)  # [N, K/64, 32] each
    stored = (low | (high << 4)).view(N, -1, 2, 2, 4, 2)  # k in a group: [h, q, t, b]
    stored = stored.permute(1, 0, 4, 2, 3, 5)  # [K/64, N, t, h, q, b]
    return stored.reshape(-1, N, GROUP), scales.view(N, -1, 2).transpose(0, 1).contiguous()


def unpack_expert(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_expert`: codes ``[N, K']``, scales ``[N, K'/32]``, K' rounded up to a multiple of 64."""
    blocks, N, _ = codes.shape
    stored = codes.view(blocks, N, 4, 2, 2, 2).permute(1, 0, 3, 4, 2, 5)  # [N, K/64, h, q, t, b]
    both = stored.reshape(N, blocks, 1, GROUP)
    both = torch.cat((both & 15, both >> 4), dim=2)
    return both.reshape(N, -1), scales.transpose(0, 1).reshape(N, -1)

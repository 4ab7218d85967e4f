"""Layout `rows`: plain rows of nibbles for the portable kernel.

    codes   uint8 [E, N, ceil(K/64) * 32]   byte j of a 64-wide block of K holds k = j (low) and k = 32 + j (high)
    scales  bf16  [E, K/32, N]              one row per scale group

A byte's two nibbles lie 32 apart along K, so that the low nibbles of a block are one scale group and the high nibbles
the next: a kernel splits bytes into two tiles with a mask and a shift, and nothing is interleaved. Scales run along
N, so that a tile of output columns reads them as one contiguous piece.

When K is an odd number of groups, the last block's high nibbles are code 8, which is zero.
"""

from __future__ import annotations

import torch

from ..problem import MoeProblem
from . import TensorSpecs

BLOCK = 64  # k per block: two scale groups of 32
GROUP = 32
ZERO_CODE = 8


def tensor_specs(problem: MoeProblem) -> TensorSpecs:
    """Shapes and dtypes of a packed layer."""
    E, N = problem.num_experts, problem.N
    return TensorSpecs((E, N, row_bytes(problem.K)), torch.uint8, (E, problem.num_groups, N), torch.bfloat16)


def row_bytes(K: int) -> int:
    """Bytes of one row of codes."""
    return -(-K // BLOCK) * GROUP


def why_not(problem: MoeProblem) -> str | None:
    """Any N, any K of whole groups."""
    return None


def pack_expert(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[N, K]`` and scales bf16 ``[N, K/32]`` of one expert to ``[N, bytes]`` and ``[K/32, N]``."""
    N, K = codes.shape
    groups = codes.reshape(N, K // GROUP, GROUP)
    packed = torch.full((N, row_bytes(K) // GROUP, GROUP), ZERO_CODE << 4, dtype=torch.uint8, device=codes.device)
    high = groups[:, 1::2]  # [N, K // 64, 32]
    packed[:, : high.shape[1]] = high << 4
    packed |= groups[:, 0::2]
    return packed.reshape(N, -1), scales.t().contiguous()


def unpack_expert(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact inverse of `pack_expert`."""
    num_groups, N = scales.shape
    blocks = codes.reshape(N, -1, 1, GROUP)
    both = torch.cat((blocks & 15, blocks >> 4), dim=2)  # [N, blocks, 2, 32]
    return both.reshape(N, -1)[:, : num_groups * GROUP].contiguous(), scales.t().contiguous()

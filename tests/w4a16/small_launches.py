"""Kernels of the package once each on small shapes, compared with the reference: what `compute-sanitizer` watches.

    compute-sanitizer --tool racecheck python tests/w4a16/small_launches.py portable|indexed|grouped

Packing and reference are on the CPU: a checking tool looks into every kernel that a process loads, and torch's matrix
products alone would take it minutes. Not collected by name; `test_sanitizer_gpu.py` runs it in a child process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import portable_checks as portable
import test_hopper_gpu as hopper
import torch
from conftest import ids_of_counts, nan_scratch
from w4a16_moe import (
    MoeProblem,
    PackedWeights,
    Schedule,
    align_to_blocks,
    build_m_indices,
    get_profile,
    grouped_contiguous_gemm,
    grouped_masked_gemm,
    indexed_gemm,
    pack,
)
from w4a16_moe.reference import TOLERANCE, gemm_reference, relative_error

PROBLEM = MoeProblem(num_experts=3, N=512, K=512)
TOK_E = [19, 0, 70]
GROUPS = [130, 0, 65]  # rows of each expert, laid out in groups of 128
MAX_M, MASKED_M = 32, [17, 0, 32]
MMA = replace(hopper.DECODE, block_m=24, ctas_per_sm=2)
PORTABLE = [replace(s, block_n=max(64, s.block_n)) for s in portable.SCHEDULES]
INDEXED = [
    hopper.DECODE,
    *(replace(MMA, token_slicing=slicing) for slicing in ("static", "semi_static", "dynamic", "branched")),
    replace(MMA, dequant="exponent"),
    hopper.STREAM_K,
    replace(hopper.STREAM_K, block_m=24, token_slicing="dynamic", ctas_per_sm=2),
    hopper.PREFILL,
    replace(hopper.PREFILL, token_slicing="static", num_stages=4, tile_order="static"),
    replace(hopper.PREFILL, block_m=64, dequant="exponent"),
    replace(hopper.PREFILL, block_m=32, ctas_per_sm=2, token_slicing="static"),
    replace(hopper.PREFILL, block_m=192, block_n=128, num_stages=5),
    hopper.WIDE,
]
MASKED = [hopper.STREAM_K, hopper.PREFILL]


@dataclass(frozen=True)
class Weights:
    """Random weights on the CPU, with every code, and how to have them packed on the GPU."""

    codes: torch.Tensor
    scales: torch.Tensor

    def packed(self, profile: str) -> PackedWeights:
        """For a profile, on the GPU."""
        packed = pack(self.codes, self.scales, PROBLEM, get_profile(profile))
        return replace(packed, codes=packed.codes.cuda(), scales=packed.scales.cuda())

    def compare(self, out: torch.Tensor, x: torch.Tensor, experts: torch.Tensor) -> None:
        """``x`` and ``experts`` on the CPU, a row each; every row of ``out`` must be right."""
        error = relative_error(out.cpu(), gemm_reference(x, (self.codes, self.scales), experts, top_k=1))
        assert error <= TOLERANCE, f"relative error {error:.2e}"


@cache
def weights() -> Weights:
    """The one layer."""
    generator = torch.Generator().manual_seed(0)
    shape = (PROBLEM.num_experts, PROBLEM.N, PROBLEM.K)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
    scales = torch.rand((*shape[:2], PROBLEM.num_groups), generator=generator) * 0.02 + 0.002
    return Weights(codes, scales.to(torch.bfloat16))


def activations(num_rows: int) -> torch.Tensor:
    """bf16 ``[num_rows, K]`` on the CPU."""
    return torch.randn((num_rows, PROBLEM.K), generator=torch.Generator().manual_seed(1)).bfloat16()


def poisoned(*shape: int) -> torch.Tensor:
    """bf16 on the GPU, full of NaN."""
    return torch.full(shape, float("nan"), dtype=torch.bfloat16).cuda()


def indexed(profile: str, schedules: list[Schedule]) -> Iterator[None]:
    """`indexed_gemm` under each schedule; and the GPU alignment, with and without foreign experts."""
    ids, x = ids_of_counts(TOK_E), activations(sum(TOK_E))
    expert_map = torch.tensor([-1, 0, 1], dtype=torch.int32)
    for block_m in (8, 64):
        align_to_blocks(ids.cuda(), 2, block_m, expert_map.cuda()).check()
        yield
    packed = weights().packed(profile)
    for schedule in schedules:
        routing = align_to_blocks(ids.cuda(), PROBLEM.num_experts, schedule.block_m)
        out = poisoned(ids.numel(), PROBLEM.N)
        with nan_scratch():
            indexed_gemm(x.cuda(), packed, routing, top_k=1, schedule=schedule, out=out)
        weights().compare(out, x, ids)
        yield


def contiguous() -> Iterator[None]:
    """`grouped_contiguous_gemm`: whole and partial groups, an empty expert, padding rows full of NaN."""
    packed = weights().packed("h200_grouped_prefill")
    m_indices = build_m_indices(GROUPS)
    real = m_indices >= 0
    x = activations(m_indices.numel())
    x[~real] = float("nan")
    for schedule in hopper.CONTIGUOUS:
        out = poisoned(m_indices.numel(), PROBLEM.N)
        grouped_contiguous_gemm(x.cuda(), packed, m_indices.cuda(), schedule=schedule, out=out)
        weights().compare(out.cpu()[real], x[real], m_indices[real])
        yield


def masked() -> Iterator[None]:
    """`grouped_masked_gemm`: rows past masked_m are full of NaN."""
    packed = weights().packed("h200_grouped_decode")
    counts = torch.tensor(MASKED_M, dtype=torch.int32)
    valid = torch.arange(MAX_M)[None, :] < counts[:, None]
    x = activations(PROBLEM.num_experts * MAX_M).view(PROBLEM.num_experts, MAX_M, PROBLEM.K)
    x[~valid] = float("nan")
    experts = torch.arange(PROBLEM.num_experts)[:, None].expand(-1, MAX_M)
    for schedule in MASKED:
        out = poisoned(PROBLEM.num_experts, MAX_M, PROBLEM.N)
        grouped_masked_gemm(x.cuda(), packed, counts.cuda(), expected_m=12, schedule=schedule, out=out)
        weights().compare(out.cpu()[valid], x[valid], experts[valid])
        yield


PARTS = {
    "portable": lambda: (indexed("portable", PORTABLE),),
    "indexed": lambda: (indexed("h200_decode_ep8", INDEXED),),
    "grouped": lambda: (contiguous(), masked()),
}


def main() -> None:
    """Run one part; any wrong result raises."""
    count = sum(1 for launches in PARTS[sys.argv[1]]() for _ in launches)
    torch.cuda.synchronize()
    print(f"{count} launches compared with the reference")


if __name__ == "__main__":
    main()

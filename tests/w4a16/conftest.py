"""Small layers with known weights, and one way to run a schedule that a wrong kernel cannot pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from w4a16_moe import MoeProblem, PackedWeights, Routing, Schedule, align_to_blocks, get_profile, indexed_gemm, pack
from w4a16_moe.reference import TOLERANCE, gemm_reference, relative_error

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


@contextmanager
def nan_scratch() -> Iterator[None]:
    """Every torch.empty inside is filled with NaN: what a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass
class Layer:
    """Random weights of one projection with every code 0..15, packed for a profile."""

    problem: MoeProblem
    codes: torch.Tensor
    scales: torch.Tensor
    packed: PackedWeights
    generator: torch.Generator = field(repr=False)

    def activations(self, num_rows: int) -> torch.Tensor:
        shape = (num_rows, self.problem.K)
        return torch.randn(shape, generator=self.generator, device=self.codes.device).to(torch.bfloat16)

    def run(
        self, schedule: Schedule, x: torch.Tensor, routing: Routing, top_k: int, fill: float = math.nan
    ) -> torch.Tensor:
        """The output of one call into a buffer full of `fill`, its scratch full of NaN."""
        out = torch.full((routing.routed_m, self.problem.N), fill, dtype=torch.bfloat16, device=x.device)
        with nan_scratch():
            return indexed_gemm(x, self.packed, routing, top_k=top_k, schedule=schedule, out=out)

    def check(
        self,
        schedule: Schedule,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        tolerance: float = TOLERANCE,
    ) -> torch.Tensor:
        """Route, run, compare every local row with the reference, and require that foreign rows stay untouched."""
        top_k = topk_ids.shape[1]
        x = self.activations(topk_ids.shape[0])
        routing = align_to_blocks(topk_ids, self.problem.num_experts, schedule.block_m, expert_map)
        out = self.run(schedule, x, routing, top_k)
        experts = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        reference = gemm_reference(x, (self.codes, self.scales), experts, top_k=top_k)
        error = relative_error(out, reference)
        assert error <= tolerance, f"{schedule.label()}: relative error {error:.2e}"
        foreign = experts.reshape(-1) < 0
        assert bool(torch.isnan(out[foreign].float()).all()), "a row without a local expert was written"
        return out


def ids_of_counts(tok_e: Sequence[int], device: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    """topk_ids ``[rows, 1]`` that give expert e exactly ``tok_e[e]`` rows, in random order."""
    flat = torch.repeat_interleave(torch.arange(len(tok_e)), torch.tensor(tok_e))
    order = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(seed))
    return flat[order].unsqueeze(1).to(device)


@pytest.fixture
def make_layer() -> Callable[..., Layer]:
    def make(
        num_experts: int, N: int, K: int, profile: str = "portable", device: str = "cpu", seed: int = 0, top_k: int = 1
    ) -> Layer:
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (num_experts, N, K)
        codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator, device=device)
        scales = torch.rand((num_experts, N, K // 32), generator=generator, device=device) * 0.02 + 0.002
        scales = scales.to(torch.bfloat16)
        problem = MoeProblem(num_experts=num_experts, N=N, K=K, top_k=top_k)
        return Layer(problem, codes, scales, pack(codes, scales, problem, get_profile(profile)), generator)

    return make


@pytest.fixture
def counts_to_ids() -> Callable[..., torch.Tensor]:
    return ids_of_counts

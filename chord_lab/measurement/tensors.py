"""Tensors of a point: weights, activations, routing, output and reference, on one device."""

from __future__ import annotations

import math
from typing import Any

import torch
from w4a16_moe.layout import pack_experts
from w4a16_moe.packed import PackedWeights
from w4a16_moe.problem import MoeProblem
from w4a16_moe.profiles import get_profile
from w4a16_moe.reference import dequantize
from w4a16_moe.routing import align_to_blocks
from w4a16_moe.routing_blocks import Routing

from chord_lab.records.attempt import Point
from chord_lab.routing.draws import draw_topk_ids

ROWS_AT_ONCE = 16384  # output rows compared at a time


class Layer:
    """The weights of one problem: made expert by expert, packed once for each layout that asks."""

    def __init__(self, problem: MoeProblem, device: str):
        self.problem = problem
        self.device = device
        self._packed: dict[str, PackedWeights] = {}
        self.peers: dict[str, Any] = {}  # a peer's own copy, by peer

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes uint8 [N, K], all of 0..15 present, and scales bf16 [N, K/group], the same each time."""
        generator = torch.Generator(device=self.device).manual_seed(977 + index)
        shape = (self.problem.N, self.problem.K)
        codes = torch.randint(0, 16, shape, dtype=torch.uint8, device=self.device, generator=generator)
        groups = (self.problem.N, self.problem.num_groups)
        scales = torch.rand(groups, device=self.device, generator=generator) * 0.02 + 0.005
        return codes, scales.to(torch.bfloat16)

    def packed(self, profile_name: str) -> PackedWeights:
        """The layer in the layout of a profile; profiles of one layout share the tensors."""
        profile = get_profile(profile_name)
        if profile.layout not in self._packed:
            self._packed[profile.layout] = pack_experts(self.expert, self.problem, profile, device=self.device)
        return self._packed[profile.layout].for_profile(profile_name)


class PointTensors:
    """Activations, routing, output and reference of one point."""

    def __init__(self, point: Point, layer: Layer, device: str):
        self.point = point
        self.layer = layer
        self.device = device
        ref = point.routing
        ids = draw_topk_ids(
            ref.draw, num_tokens=ref.num_tokens, num_experts=ref.num_experts, top_k=ref.top_k, seed=ref.seed
        )
        self.topk_ids = torch.from_numpy(ids).to(device)  # [num_tokens, top_k] int32
        self.experts = self.topk_ids.reshape(-1).long()
        counts = tuple(torch.bincount(self.experts, minlength=ref.num_experts).tolist())
        if counts != ref.tok_e:
            raise ValueError(f"the routing drawn here differs from the plan's ({ref.draw}, seed {ref.seed})")
        problem = point.problem
        generator = torch.Generator(device=device).manual_seed(ref.seed * 1000003 + point.routed_m)
        x_shape = (point.routed_m // problem.top_k, problem.K)
        self.x = torch.randn(x_shape, generator=generator, device=device).to(torch.bfloat16)
        self.out = torch.empty((point.routed_m, problem.N), dtype=torch.bfloat16, device=device)
        self.reference = self._reference()
        self.reference_norm = math.sqrt(_sum_of_squares(self.reference))
        self._routings: dict[int, Routing] = {}

    def routing(self, block_m: int) -> Routing:
        """The routes laid out in blocks of block_m; as large as the worst case needs, as in serving."""
        if block_m not in self._routings:
            routing = align_to_blocks(self.topk_ids, self.point.problem.num_experts, block_m)
            routing.check()
            self._routings[block_m] = routing
        return self._routings[block_m]

    def poison(self) -> None:
        """Fill the output with NaN: a row that is not written shows."""
        self.out.fill_(float("nan"))

    def error(self) -> float:
        """||out - reference|| / ||reference||; NaN if a row was not written."""
        total = 0.0
        for start in range(0, self.out.shape[0], ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            total += _sum_of_squares(self.out[rows].float() - self.reference[rows])
        return math.sqrt(total) / self.reference_norm if self.reference_norm else math.sqrt(total)

    def _reference(self) -> torch.Tensor:
        """fp32 [routed_m, N] from the codes themselves, not from a packed layout; TF32 off."""
        problem, out = self.point.problem, torch.empty(self.out.shape, dtype=torch.float32, device=self.device)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            for expert in range(problem.num_experts):
                rows = torch.nonzero(self.experts == expert).reshape(-1)
                if rows.numel():
                    w = dequantize(*self.layer.expert(expert)).float()
                    out[rows] = self.x[rows // problem.top_k].float() @ w.t()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return out


def _sum_of_squares(values: torch.Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))

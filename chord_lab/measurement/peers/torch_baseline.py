"""The plain way: dequantise to bf16, then a bf16 matrix product per expert. Every table shows it beside the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chord_lab.measurement.launch import Launch
from chord_lab.records.attempt import Candidate

if TYPE_CHECKING:
    from chord_lab.measurement.tensors import PointTensors


def launch_baseline(tensors: PointTensors, candidate: Candidate) -> Launch:
    """Timed: unpacking, scaling and the products of all active experts; rows are gathered and scattered by index."""
    problem, layer = tensors.point.problem, tensors.layer
    work = []
    for expert, count in enumerate(tensors.point.routing.tok_e):
        if count:
            rows = torch.nonzero(tensors.experts == expert).reshape(-1)
            codes, scales = layer.expert(expert)
            work.append((codes[:, 0::2] | codes[:, 1::2] << 4, scales, rows, rows // problem.top_k))
    table = (torch.arange(16, device=tensors.device, dtype=torch.float32) - 8).to(torch.bfloat16)

    def run() -> None:
        for packed, scales, rows, sources in work:
            codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(problem.N, problem.num_groups, -1)
            weights = (table[codes.int()] * scales.unsqueeze(-1)).view(problem.N, problem.K)
            tensors.out.index_copy_(0, rows, tensors.x.index_select(0, sources) @ weights.t())

    return Launch(
        run=run, ran_kernel="torch dequantise + matmul", ran_gemm_type="indexed", num_tokens_padded=len(tensors.experts)
    )

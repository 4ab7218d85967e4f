"""How much device memory a point needs, known before anything is allocated."""

from __future__ import annotations

from chord_lab.records.attempt import Point

FLUSH_BYTES = 256 * 2**20  # what is overwritten to clear L2; larger than any L2 so far, and what do_bench uses
OVERHEAD_BYTES = 2 * 2**30  # context, compiled kernels, allocator slack


def memory_need(point: Point) -> int:
    """Predicted peak in bytes: weights (ours and a peer's copy), one expert in the clear, x, out, fp32 reference."""
    problem = point.problem
    weights = 2 * problem.num_experts * problem.weight_bytes
    one_expert = problem.N * problem.K * 16  # codes, fp32 values and copies while packing or dequantising
    rows = point.routed_m
    x = -(-rows // problem.top_k) * problem.K * 6  # bf16, drawn in fp32
    out = rows * problem.N * (2 + 4)  # bf16 output, fp32 reference
    compare = min(rows, 16384) * problem.N * 12
    layout = problem.num_experts * (point.capacity or 0) * (problem.K + problem.N) * 2
    return weights + one_expert + x + out + compare + layout + FLUSH_BYTES + OVERHEAD_BYTES

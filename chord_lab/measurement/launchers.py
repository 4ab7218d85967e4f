"""Who prepares a candidate: our own kernels, peers, baselines."""

from __future__ import annotations

from collections.abc import Callable

from w4a16_moe.families import kernel_module
from w4a16_moe.gemm import indexed_gemm

from chord_lab.measurement.grouped import launch_grouped
from chord_lab.measurement.launch import Launch, launched_kernels
from chord_lab.measurement.tensors import PointTensors
from chord_lab.records.attempt import Candidate

Launcher = Callable[[PointTensors, Candidate], Launch]


def launcher_of(candidate: Candidate) -> Launcher:
    """Who prepares a candidate of this implementation."""
    if candidate.implementation == "w4a16_moe":
        return launch_ours
    if candidate.implementation in ("humming", "humming_tile"):
        from chord_lab.measurement.peers.humming import launch_humming

        return launch_humming
    if candidate.implementation == "torch_dequant_bf16":
        from chord_lab.measurement.peers.torch_baseline import launch_baseline

        return launch_baseline
    raise ValueError(f"nothing here runs implementation {candidate.implementation!r}")


def launch_ours(tensors: PointTensors, candidate: Candidate) -> Launch:
    """Our own kernels. Checked once through the public function, then launched without its checks."""
    schedule, point = candidate.schedule, tensors.point
    assert schedule is not None
    if point.interface != "indexed":
        return launch_grouped(tensors, candidate)
    packed = tensors.layer.packed(point.profile)
    routing = tensors.routing(schedule.block_m)
    top_k = point.problem.top_k
    with launched_kernels() as names:
        indexed_gemm(tensors.x, packed, routing, top_k=top_k, schedule=schedule, out=tensors.out)
    launch = kernel_module(schedule.kernel).launch
    arguments = (tensors.x, packed, routing, schedule, tensors.out, top_k)
    return Launch(
        run=lambda: launch(*arguments),
        ran_kernel="+".join(names) or schedule.kernel,
        ran_gemm_type="indexed",
        num_tokens_padded=point.routing.num_tokens_padded(schedule.block_m),
    )

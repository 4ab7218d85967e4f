"""From a candidate to something that can be launched again and again: ours, peers, baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chord_lab.records.attempt import Candidate

if TYPE_CHECKING:
    from chord_lab.measurement.bench import PointTensors


@dataclass(frozen=True)
class Launch:
    """A prepared GEMM: `run()` enqueues it on the current stream and returns at once."""

    run: Callable[[], Any]
    ran_kernel: str  # what runs, by its own name
    ran_gemm_type: str  # indexed | grouped_contiguous | grouped_masked
    num_tokens_padded: int  # rows that it works on, padding included
    poison: Callable[[], None] | None = None  # for a launch with an output of its own
    collect: Callable[[], None] | None = None  # and how to gather that into the point's output


Launcher = Callable[["PointTensors", Candidate], Launch]


class GemmTypeMismatch(RuntimeError):
    """Another interface ran than was asked for."""

    status = "launch_error"
    rule = "gemm type"


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
    from w4a16_moe.families import kernel_module
    from w4a16_moe.gemm import indexed_gemm

    schedule, point = candidate.schedule, tensors.point
    assert schedule is not None
    if point.interface != "indexed":
        return _launch_grouped(tensors, candidate)
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


def _launch_grouped(tensors: PointTensors, candidate: Candidate) -> Launch:
    from chord_lab.measurement.grouped import launch_grouped

    return launch_grouped(tensors, candidate)


class launched_kernels:
    """Names of the Triton kernels that were launched inside the block: what ran, not what was asked."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def _seen(self, metadata: Any) -> None:
        try:
            name = metadata.get().get("name")
        except Exception:  # another Triton's metadata: an exception in a hook would fail the launch
            name = None
        if name and name not in self.names:
            self.names.append(name)

    def __enter__(self) -> list[str]:
        try:
            from triton import knobs

            self._hooks = knobs.runtime.launch_enter_hook
            self._hooks.add(self._seen)
        except (ImportError, AttributeError):  # no such hook in this Triton: the caller falls back to the family's name
            self._hooks = None
        return self.names

    def __exit__(self, *_: object) -> None:
        if self._hooks is not None:
            self._hooks.remove(self._seen)

"""The measuring process's work: tensors of a point, correctness before and after, repeats. Served by `serve`.

Everything here runs on any torch device; what only a GPU can do (events, clearing L2, graphs, clocks) is the `timer`'s.
"""

from __future__ import annotations

import importlib
import math
import time
from collections import OrderedDict
from typing import Any, Protocol

from w4a16_moe.problem import MoeProblem
from w4a16_moe.reference import TOLERANCE

from chord_lab.measurement.launch import GemmTypeMismatch, Launch
from chord_lab.measurement.launchers import launcher_of
from chord_lab.measurement.memory import memory_need
from chord_lab.measurement.serve import Fatal
from chord_lab.measurement.tensors import Layer, PointTensors
from chord_lab.records.attempt import candidate_from_dict, point_from_dict

PEER_TOLERANCE = 1e-2  # a peer may sum partial results in bf16; what it reached is recorded
KEPT_LAYERS = 4  # packed layers of earlier problems that stay on the device


class WrongResult(RuntimeError):
    """The output is not the reference's."""

    status = "wrong_result"
    rule = "relative error"


class DoesNotFit(RuntimeError):
    """The point needs more device memory than there is."""

    status = "does_not_fit"
    rule = "device memory"


class Timer(Protocol):
    """What times a launch."""

    device: str

    def environment(self) -> dict[str, Any]:
        """Fields of `records.Environment`, and `capability`."""

    def free_bytes(self) -> int:
        """Device memory that can still be allocated; 0 where there is no limit to know."""

    def forget_all(self) -> None:
        """Free what was kept for launches of the point before."""

    def repeat(self, launch: Launch, method: dict[str, Any], rep_ms: float, warmup_ms: float) -> dict[str, Any]:
        """Raw times of one repeat: times_us, sm_mhz, power_w."""

    def wait(self) -> None:
        """Wait for the device; raise if a launch failed."""

    def is_poisoned(self) -> bool:
        """Whether no further launch can succeed in this process."""

    def ceiling(self, name: str, rep_ms: float, warmup_ms: float) -> dict[str, Any]:
        """times_us, work_bytes, work_flops of a copy or a dense matrix product."""


class Bench:
    """Commands of the measuring process. Each takes and returns plain JSON values."""

    def __init__(self, timer: str, launchers: str = "", **timer_settings: Any):
        self.timer: Timer = _load(timer)(**timer_settings)
        self._launcher_of = _load(launchers) if launchers else launcher_of
        self._layers: OrderedDict[MoeProblem, Layer] = OrderedDict()
        self._tensors: PointTensors | None = None
        self._launches: dict[str, tuple[Launch, float]] = {}  # and its tolerance

    def hello(self) -> dict[str, Any]:
        """Where this process measures."""
        return self.timer.environment()

    def open(self, point: dict[str, Any], method: dict[str, Any]) -> dict[str, Any]:
        """Build the tensors of a point; refuses what does not fit before allocating it."""
        opened = point_from_dict(point)
        self._tensors, self._launches = None, {}
        self._method = method
        self.timer.forget_all()
        need, free = memory_need(opened), self.timer.free_bytes()
        if free and need > free:
            raise DoesNotFit(f"the point needs about {need / 1e9:.1f} GB, the device has {free / 1e9:.1f} GB")
        self._tensors = PointTensors(opened, self._layer(opened.problem), self.timer.device)
        self._guard(self.timer.wait)
        return {"memory_bytes": need}

    def check(self, key: str, candidate: dict[str, Any]) -> dict[str, Any]:
        """Prepare a candidate, run it on a poisoned output twice, compare; raises `WrongResult`."""
        made = candidate_from_dict(candidate)
        limit = TOLERANCE if made.kind == "candidate" else PEER_TOLERANCE
        launch = self._guard(lambda: self._launcher_of(made)(self._open_tensors(), made))
        if launch.ran_gemm_type != self._open_tensors().point.interface:
            asked = self._open_tensors().point.interface
            raise GemmTypeMismatch(f"asked for {asked}, {launch.ran_gemm_type} ran")
        error = max(self._run_and_compare(launch, limit) for _ in range(2))
        self._launches[key] = (launch, limit)
        return {
            "rel_error": error,
            "ran_kernel": launch.ran_kernel,
            "ran_gemm_type": launch.ran_gemm_type,
            "num_tokens_padded": launch.num_tokens_padded,
        }

    def repeat(self, key: str, rep_ms: float, warmup_ms: float) -> dict[str, Any]:
        """One repeat: raw times in microseconds."""
        launch, _ = self._launches[key]
        return self._guard(lambda: self.timer.repeat(launch, self._method, rep_ms, warmup_ms))

    def recheck(self, key: str) -> dict[str, Any]:
        """The error after timing, on a freshly poisoned output."""
        return {"rel_error": self._run_and_compare(*self._launches[key])}

    def launch_of(self, key: str) -> Launch:
        """A checked candidate's launch: for a profiler in this process."""
        return self._launches[key][0]

    def drop(self, key: str) -> None:
        """Forget a candidate that will not be timed again."""
        self._launches.pop(key, None)

    def load(self, key: str, seconds: float) -> None:
        """Discarded load, to get past the power controller's first dip."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.repeat(key, 50.0, 0.0)

    def ceiling(self, name: str, rep_ms: float, warmup_ms: float) -> dict[str, Any]:
        """A ceiling of this device, measured now."""
        return self._guard(lambda: self.timer.ceiling(name, rep_ms, warmup_ms))

    def _open_tensors(self) -> PointTensors:
        if self._tensors is None:
            raise RuntimeError("no point is open")
        return self._tensors

    def _layer(self, problem: MoeProblem) -> Layer:
        if problem not in self._layers:
            while len(self._layers) >= KEPT_LAYERS:
                self._layers.popitem(last=False)
            self._layers[problem] = Layer(problem, self.timer.device)
        self._layers.move_to_end(problem)
        return self._layers[problem]

    def _run_and_compare(self, launch: Launch, limit: float) -> float:
        tensors = self._open_tensors()
        (launch.poison or tensors.poison)()
        self._guard(launch.run)
        self._guard(self.timer.wait)
        if launch.collect is not None:
            launch.collect()
        error = tensors.error()
        if not error <= limit:
            what = "rows were not written (NaN)" if math.isnan(error) else f"relative error {error:.2e}"
            raise WrongResult(f"{what}; at most {limit:g}")
        return error

    def _guard(self, work: Any) -> Any:
        try:
            return work()
        except Exception as error:
            if self.timer.is_poisoned():
                raise Fatal("the device context is lost") from error
            raise


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

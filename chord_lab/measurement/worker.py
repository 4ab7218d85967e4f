"""The parent's handle on the measuring process of one GPU: a crash costs the candidate at hand, then it restarts."""

from __future__ import annotations

import math
import pathlib
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from chord_lab.errors import UserError
from chord_lab.measurement.child import Child, ChildFailure
from chord_lab.records.attempt import Candidate, Point, candidate_to_dict, point_to_dict
from chord_lab.records.record import Method

BENCH = "chord_lab.measurement.bench:Bench"
GPU_TIMER = "chord_lab.measurement.gpu:GpuTimer"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a measuring process is started and what it may use."""

    bench: str = BENCH  # module:callable whose methods are the commands
    bench_settings: dict[str, Any] = field(default_factory=lambda: {"timer": GPU_TIMER})
    gpu: str | None = None  # value for CUDA_VISIBLE_DEVICES; None leaves it as it is
    start_limit_s: float = 180.0
    open_limit_s: float = 120.0
    candidate_limit_s: float = 30.0  # preparing and checking one candidate, compilation included if not done ahead
    repeat_limit_s: float = 20.0
    memory_limit: int | None = 64 * 2**30  # resident bytes of the process
    log: pathlib.Path | None = None


class Worker:
    """Starts, restarts and asks the measuring process."""

    def __init__(self, settings: WorkerSettings):
        self.settings = settings
        self.restarts = 0
        self._last_work = -math.inf
        self._child: Child | None = None
        self._point: tuple[Point, Method] | None = None
        self._is_open = False
        self._was_open = False  # for the point at hand, in this or an earlier process

    def hello(self) -> dict[str, Any]:
        """Start the process and ask where it measures; a failure here is the user's to mend."""
        try:
            return self._call("hello", self.settings.start_limit_s)
        except ChildFailure as failure:
            log = f" (log: {self.settings.log})" if self.settings.log else ""
            raise UserError(f"cannot measure here: {failure.reason}{log}") from None

    def open(self, point: Point, method: Method) -> None:
        """Make the process build the tensors of a point, now and after every restart until the next `open`."""
        self._point = (point, method)
        self._is_open = self._was_open = False
        self._ensure_open()

    def check(self, key: str, candidate: Candidate) -> dict[str, Any]:
        """Prepare and check a candidate before timing."""
        self._ensure_open()
        limit = self.settings.candidate_limit_s
        return self._call("check", limit, key=key, candidate=candidate_to_dict(candidate))

    def rest_s(self) -> float:
        """Seconds since the device last had timed work; infinite before the first."""
        return time.monotonic() - self._last_work

    def repeat(self, key: str, rep_ms: float, warmup_ms: float) -> dict[str, Any]:
        """One repeat of a checked candidate."""
        result = self._call("repeat", self.settings.repeat_limit_s, key=key, rep_ms=rep_ms, warmup_ms=warmup_ms)
        self._last_work = time.monotonic()
        return result

    def recheck(self, key: str) -> dict[str, Any]:
        """Check a candidate after timing."""
        return self._call("recheck", self.settings.repeat_limit_s, key=key)

    def drop(self, key: str) -> None:
        """Forget a candidate."""
        if self._child is not None:
            self._call("drop", self.settings.repeat_limit_s, key=key)

    def load(self, key: str, seconds: float) -> None:
        """Discarded load."""
        self._call("load", seconds + self.settings.repeat_limit_s, key=key, seconds=seconds)
        self._last_work = time.monotonic()

    def ceiling(self, name: str, rep_ms: float, warmup_ms: float) -> dict[str, Any]:
        """One repeat of a ceiling."""
        limit = self.settings.candidate_limit_s
        return self._call("ceiling", limit, name=name, rep_ms=rep_ms, warmup_ms=warmup_ms)

    @property
    def lost(self) -> bool:
        """True when the process is gone, and with it everything that was checked."""
        return self._child is None

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _ensure_open(self) -> None:
        if self._is_open and self._child is not None:
            return
        assert self._point is not None
        point, method = self._point
        again = self._was_open
        try:
            self._open_once(point, method)
        except ChildFailure as failure:
            if not again:
                raise
            raise UserError(  # not the candidate's doing: without this the whole plan would fail one by one
                f"{point.label()}: the measuring process does not come back ({failure.reason}); "
                "what was measured is kept: run again with --resume"
            ) from None
        self._is_open = self._was_open = True

    def _open_once(self, point: Point, method: Method) -> None:
        self._call(
            "open",
            self.settings.start_limit_s + self.settings.open_limit_s,
            point=point_to_dict(point),
            method=asdict(method),
        )

    def _call(self, command: str, timeout_s: float, **arguments: Any) -> Any:
        if self._child is None:
            env = {} if self.settings.gpu is None else {"CUDA_VISIBLE_DEVICES": self.settings.gpu}
            self._child = Child(
                self.settings.bench,
                self.settings.bench_settings,
                env=env,
                log=self.settings.log,
                memory_limit=self.settings.memory_limit,
            )
        try:
            return self._child.call(command, timeout_s, **arguments)
        except ChildFailure as failure:
            if failure.lost:
                self._child.kill()
                self._child.close()
                self._child = None
                self._is_open = False
                self.restarts += 1
            raise

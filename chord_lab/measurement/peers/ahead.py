"""What peers run at each point: asked of a process of its own, which also compiles it ahead of measuring."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from chord_lab.measurement.child import Child, ChildFailure
from chord_lab.records.attempt import Candidate, Point, Sink, point_to_dict

PEERS = ("none", "own", "tiles")  # none; the peer's own heuristics; those, and exact tiles forced around them
HUMMING_AHEAD = "chord_lab.measurement.peers.humming:HummingAhead"
ASK_LIMIT_S = 180.0  # heuristics take seconds a layer, each compilation up to eight


class PeersAhead:
    """Peer configurations by point; an absent peer is one note, and no peer."""

    def __init__(
        self, which: str, sink: Sink, *, server: str = HUMMING_AHEAD, gpu: str | None, log: pathlib.Path | None
    ):
        self._which = which
        self._sink = sink
        self._server = server
        self._env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self._log = log
        self._pool = ThreadPoolExecutor(1)
        self._child: Child | None = None
        self._futures: dict[Point, Future[list[dict[str, str]]]] = {}
        self._absent = which == "none"

    def submit(self, points: Iterable[Point]) -> None:
        """Begin to ask, in this order."""
        if not self._absent:
            self._futures = {point: self._pool.submit(self._ask, point) for point in points}

    def candidates(self, point: Point) -> list[Candidate]:
        """The peer's candidates at a point; waits for them."""
        if point not in self._futures:
            return []
        return [
            Candidate(kind="peer", implementation=found["implementation"], config=found["config"])
            for found in self._futures[point].result()
        ]

    def close(self) -> None:
        """Drop what was not asked yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._child is not None:
            self._child.kill()
        self._pool.shutdown(wait=True)

    def _ask(self, point: Point) -> list[dict[str, str]]:
        if self._absent:
            return []
        if self._child is None:
            self._child = Child(self._server, env=self._env, log=self._log)
        try:
            return self._child.call("configs", ASK_LIMIT_S, point=point_to_dict(point), forced=self._which == "tiles")
        except ChildFailure as failure:
            if failure.error_type in ("ModuleNotFoundError", "ImportError"):
                self._absent = True
                self._sink.note("humming is not installed (extra `peers`): no peer beside our own kernels")
            else:
                self._sink.note(f"{point.label()}: no humming: {failure.reason}")
            if failure.lost:
                self._child.close()
                self._child = None
            return []

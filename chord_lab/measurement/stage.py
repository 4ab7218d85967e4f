"""The course of one point: who joins when, who stays, when it is settled."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from chord_lab.measurement.child import ChildFailure
from chord_lab.measurement.compile_ahead import CompileAhead, Job
from chord_lab.measurement.contest import Contest
from chord_lab.records.attempt import Candidate, Point

BASELINE_ROUNDS = 1  # it is an order of magnitude to compare with, may take 100 ms a launch, and never competes
STALL_S = 0.25  # how long the GPU may wait for a compilation before it uses the time for another round


def job_of(point: Point, candidate: Candidate) -> Job:
    """What must be compiled for a candidate."""
    assert candidate.schedule is not None
    return candidate.schedule, point.problem, point.interface


class Stage:
    """Runs a `Contest` from the first compiled candidate to the last record."""

    def __init__(self, contest: Contest, ahead: CompileAhead, smem_limit: int):
        self.contest = contest
        self.policy = contest.policy
        self.ahead = ahead
        self.smem_limit = smem_limit  # bytes that a CTA may use; 0: not known

    def run(self, candidates: list[Candidate], guests: Callable[[], list[Candidate]]) -> None:
        """`guests` is asked once our own candidates are in, since a peer's heuristics may take seconds."""
        self._admit(candidates)
        for guest in guests():
            self.contest.join(guest)
        turn = self._play()
        self._confirm_guests(turn)
        self.contest.finish([key for key, entry in self.contest.entries.items() if entry.samples])

    def _admit(self, candidates: list[Candidate]) -> None:
        """Let candidates in as they are compiled, the default first; use the time in between for more rounds."""
        waiting = sorted(candidates, key=lambda c: not c.default)
        ready: list[Candidate] = []
        since, turn = time.monotonic(), 0
        while (waiting or ready) and not self.contest.sink.out_of_budget():
            arrived = [c for c in waiting if self._compiled(c).done()]
            if waiting and waiting[0].default and waiting[0] not in arrived:
                arrived = []  # the others are timed beside it
            waiting = [c for c in waiting if c not in arrived]
            ready += arrived
            stalled = time.monotonic() - since > STALL_S
            if ready and (len(ready) >= self.policy.heat or not waiting or stalled):
                self._first_heat(ready[: self.policy.heat])
                ready = ready[self.policy.heat :]
                since = time.monotonic()
            elif stalled and not ready and self.contest.reference:
                turn += 1
                self._extra_heat(turn)
                self.ahead.wait_any(0.02)
            else:
                self.ahead.wait_any(0.05)

    def _compiled(self, candidate: Candidate) -> Future[dict[str, Any]]:
        return self.ahead.result(job_of(self.contest.point, candidate))

    def _first_heat(self, group: list[Candidate]) -> None:
        fresh = []
        for candidate in group:
            future = self._compiled(candidate)
            failure = self._refusal(future)
            if failure is not None:
                self.contest.fail(candidate, failure)
                continue
            if not self.contest.join(candidate, future.result()).samples:
                fresh.append(candidate.key_at(self.contest.point))
        if fresh:
            self.contest.round(fresh, self.contest.next_round)

    def _refusal(self, future: Future[dict[str, Any]]) -> ChildFailure | None:
        """Why a compiled candidate cannot be launched: known before the launch."""
        error = future.exception()
        if isinstance(error, ChildFailure):
            return error
        if error is not None:
            return ChildFailure("compile_error", str(error), rule="compiler")
        need = future.result().get("smem_bytes") or 0
        if self.smem_limit and need > self.smem_limit:
            reason = f"needs {need} bytes of shared memory, a CTA may use {self.smem_limit}"
            return ChildFailure("invalid", reason, rule="shared memory")
        return None

    def _extra_heat(self, turn: int) -> None:
        """While compilers are behind: time who leads so far once more, instead of an idle GPU."""
        medians = self.contest.medians()
        counts = [len(medians.get(key, {})) for key in self.contest.contenders()]
        if not counts or min(counts) < 1:
            return
        leaders = self.policy.survivors(self.contest.contenders(), medians, self.contest.reference, min(counts))
        behind = [key for key in leaders if len(medians.get(key, {})) < self.policy.max_rounds]
        if behind:
            self.contest.round(behind[: self.policy.heat], turn)

    def _play(self) -> int:
        """Rounds until the point is settled; who cannot win any more leaves with a record."""
        contest, policy, turn = self.contest, self.policy, 1
        while contest.reference and not contest.sink.out_of_budget():
            alive, medians = contest.contenders(), contest.medians()
            done = min((len(medians.get(key, {})) for key in alive), default=policy.max_rounds)
            stay = policy.survivors(alive, medians, contest.reference, done)
            contest.finish([key for key in alive if key not in stay])
            stay = [key for key in stay if key in contest.entries]
            if not stay or policy.settled(stay, medians, contest.reference, done):
                break
            contest.round([*stay, *self._guests_now(medians)], turn)
            turn += 1
        return turn

    def _guests_now(self, medians: dict[str, dict[int, float]]) -> list[str]:
        """Peers run along; of forced tiles only the best two after their first time; baselines once."""
        names = {key: self.contest.entries[key].candidate.implementation for key in self.contest.guests()}
        tiles = [key for key, name in names.items() if name == "humming_tile"]
        if tiles and all(medians.get(key) for key in tiles):
            tiles = sorted(tiles, key=lambda key: min(medians[key].values()))[:2]
        others = [
            key
            for key, name in names.items()
            if name != "humming_tile"
            and (self.contest.entries[key].candidate.kind == "peer" or len(medians.get(key, {})) < BASELINE_ROUNDS)
        ]
        return [*others, *tiles]

    def _confirm_guests(self, turn: int) -> None:
        """A point that settled at once still shows its peers in enough rounds, beside the reference."""
        for extra in range(self.policy.confirm_rounds):
            medians = self.contest.medians()
            lacking = [k for k in self._guests_now(medians) if len(medians.get(k, {})) < self.policy.confirm_rounds]
            if not lacking or not self.contest.reference or self.contest.sink.out_of_budget():
                return
            self.contest.round(lacking, turn + extra)

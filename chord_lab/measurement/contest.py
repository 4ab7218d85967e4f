"""One point measured: candidates join as they are compiled, are checked, timed in interleaved rounds, and leave."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chord_lab.measurement.child import ChildFailure
from chord_lab.measurement.rounds import RoundsPolicy, heats
from chord_lab.measurement.worker import Worker
from chord_lab.records.attempt import Candidate, Point, Sink, facts_from_dict, record_of
from chord_lab.records.journal import now
from chord_lab.records.record import Environment, Method

LOAD_S = 1.5  # discarded load: gets past the power controller's first dip
LONG_REST_S = 10.0  # idle time after which the card counts as cold again
REST_S = 1.0  # idle time after which its clock counts as unsettled
RELOAD_S = 0.3


@dataclass
class Entry:
    """A candidate in the contest."""

    candidate: Candidate
    key: str
    facts: dict[str, Any] = field(default_factory=dict)
    checked: dict[str, Any] | None = None  # answer of the check; None: not checked by the living process
    samples: list[dict[str, Any]] = field(default_factory=list)  # round, environment, times_us, sm_mhz, power_w


class Contest:
    """The candidates of one point, from joining to their records."""

    def __init__(
        self,
        point: Point,
        worker: Worker,
        sink: Sink,
        *,
        policy: RoundsPolicy,
        environment: Environment,
        method: Method,
    ):
        self.point = point
        self.worker = worker
        self.sink = sink
        self.policy = policy
        self.environment = environment
        self._stamp = method.stamp(environment)
        self.method = method
        self.entries: dict[str, Entry] = {}  # alive
        self.reference = ""  # key that the others are paired with
        self.next_round = sink.next_round(point)

    def join(self, candidate: Candidate, facts: dict[str, Any] | None = None) -> Entry:
        """Add a compiled candidate; repeats that an interrupted run left in this environment are taken up."""
        entry = Entry(candidate, candidate.key_at(self.point), facts or {})
        entry.samples = [s for s in self.sink.samples_of(entry.key) if s.get("environment") == self._stamp]
        self.next_round = max([self.next_round, *(s["round"] + 1 for s in entry.samples)])
        self.entries[entry.key] = entry
        if candidate.default or not self.reference:
            self.reference = entry.key
        return entry

    def fail(self, candidate: Candidate, failure: ChildFailure, facts: dict[str, Any] | None = None) -> None:
        """The record of a candidate that gave no time."""
        key = candidate.key_at(self.point)
        entry = self.entries.pop(key, None) or Entry(candidate, key, facts or {})
        if self.reference == key:
            self.reference = next((k for k, e in self.entries.items() if e.candidate.kind == "candidate"), "")
        self._record(entry, status=failure.status, rule=failure.rule, reason=failure.reason)

    def heat(self, keys: Sequence[str]) -> None:
        """Check who is not checked yet, then time each of `keys` once, the reference among them, in one round."""
        ready = self._ready(keys)
        if not ready:
            return
        self._warm(ready[0])
        number = self.next_round
        self.next_round += 1
        for key in ready:
            if self.sink.out_of_budget():
                return
            self._time(key, number)

    def round(self, keys: Sequence[str], turn: int) -> None:
        """Every one of `keys` once, in heats around the reference."""
        for group in heats(list(keys), self.reference, self.policy.heat, turn):
            if self.sink.out_of_budget():
                return
            self.heat([key for key in group if key in self.entries])

    def medians(self) -> dict[str, dict[int, float]]:
        """Candidate -> round -> median microseconds."""
        return {
            key: {s["round"]: statistics.median(s["times_us"]) for s in entry.samples if s["times_us"]}
            for key, entry in self.entries.items()
        }

    def contenders(self) -> list[str]:
        """Who competes; peers and baselines run along but do not."""
        return [key for key, entry in self.entries.items() if entry.candidate.kind == "candidate"]

    def guests(self) -> list[str]:
        """Peers and baselines."""
        return [key for key, entry in self.entries.items() if entry.candidate.kind != "candidate"]

    def finish(self, keys: Sequence[str]) -> None:
        """Check once more and write the records; the reference last, so that a resumed point still has it."""
        for key in sorted(keys, key=lambda k: k == self.reference):
            entry = self.entries.get(key)
            if entry is None:
                continue
            try:
                after = self._recheck(entry)
            except ChildFailure as failure:
                self._lose(failure)
                self.fail(entry.candidate, failure)
                continue
            if self.entries.pop(key, None) is not None:  # else it failed on the way, and has its record
                self._record(entry, status="ok", rel_error_after=after)

    def _recheck(self, entry: Entry) -> float | None:
        if entry.checked is None and not self._check(entry.key):
            return None
        if entry.key not in self.entries:
            return None
        after = self.worker.recheck(entry.key)["rel_error"]
        self.worker.drop(entry.key)
        return after

    def _ready(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that pass the check, all in one process: who was checked in a dead one is checked again."""
        while True:
            ready = [key for key in keys if self._check(key)]
            if all(self.entries[key].checked is not None for key in ready):
                return ready

    def _check(self, key: str) -> bool:
        """Whether the candidate is ready to be timed."""
        entry = self.entries.get(key)
        if entry is None:
            return False
        if entry.checked is not None:
            return True
        self.sink.working_on(self.point, entry.candidate)
        return self._attempt(entry, lambda: self._keep_check(entry))

    def _keep_check(self, entry: Entry) -> None:
        entry.checked = self.worker.check(entry.key, entry.candidate)

    def _time(self, key: str, number: int) -> None:
        entry = self.entries.get(key)
        if entry is None or (entry.checked is None and not self._check(key)):
            return
        self.sink.working_on(self.point, entry.candidate)

        def repeat() -> None:
            sample = self.worker.repeat(key, self.policy.rep_ms, self.policy.warmup_ms)
            sample = {"round": number, "environment": self._stamp, **sample}
            entry.samples.append(sample)
            self.sink.sample(key, sample)

        self._attempt(entry, repeat)

    def _attempt(self, entry: Entry, work: Callable[[], None]) -> bool:
        try:
            work()
        except ChildFailure as failure:
            self._lose(failure)
            self.fail(entry.candidate, failure)
            return False
        return True

    def _lose(self, failure: ChildFailure) -> None:
        """What a dead process had checked must be checked again."""
        if failure.lost:
            for other in self.entries.values():
                other.checked = None

    def _warm(self, key: str) -> None:
        """Discarded load at the start, and some after a rest."""
        rest = self.worker.rest_s()
        seconds = self.method.load_s if rest > LONG_REST_S else min(self.method.load_s, RELOAD_S)
        if seconds and rest > REST_S:
            self._attempt(self.entries[key], lambda: self.worker.load(key, seconds))

    def _record(self, entry: Entry, *, status: str, **more: Any) -> None:
        checked = entry.checked or {}
        samples = sorted(entry.samples, key=lambda s: s["round"])
        self.sink.append(
            record_of(
                self.point,
                entry.candidate,
                run_id=self.sink.run_id,
                date=now(),
                status=status,
                environment=self.environment,
                method=self.method,
                times_us=tuple(tuple(s["times_us"]) for s in samples),
                rounds=tuple(s["round"] for s in samples),
                sm_mhz=tuple(s.get("sm_mhz", 0.0) for s in samples),
                power_w=tuple(s.get("power_w", 0.0) for s in samples),
                rel_error=checked.get("rel_error"),
                ran_kernel=checked.get("ran_kernel", ""),
                ran_gemm_type=checked.get("ran_gemm_type", ""),
                num_tokens_padded=checked.get("num_tokens_padded", 0),
                facts=facts_from_dict(entry.facts),
                **more,
            )
        )

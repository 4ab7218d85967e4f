"""A sweep spread over dask workers, one GPU each: tasks measure, this process alone writes.

A task is a point's share of candidates with the default among them, so that every share is timed beside the same
reference; a last task per point lets the best of all shares meet. The share of a worker that dies is taken over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from chord_lab.errors import UserError
from chord_lab.measurement.dask_workers import connect, wait_for_workers
from chord_lab.measurement.live import LiveSettings, missing
from chord_lab.measurement.rounds import rank
from chord_lab.measurement.share import measure_share, merge_by_key, samples_of_record, settings_to_dict
from chord_lab.records.attempt import Candidate, Point, Sink, candidate_to_dict, point_to_dict
from chord_lab.records.record import Environment, Record
from chord_lab.records.rows import from_row
from chord_lab.records.statistics import round_medians_us

SHARE = 24  # candidates of a task, besides the default
ROUNDS_OF_A_SHARE = 1000  # round numbers set aside for each share of a point: no two shares pair by accident
FINALISTS = 6
ATTEMPTS = 3  # workers that may die under a share before it is given up


@dataclass
class Share:
    """What one task measures."""

    point: Point
    candidates: list[Candidate]  # the default first
    first_round: int
    guests: bool  # whether peers and the baseline run in it
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    attempts: int = 0
    final: bool = False
    held: list[Record] = field(default_factory=list)  # of a final: what the other shares measured of those who meet


class ClusterMeasure:
    """The `Measure` protocol over dask workers. `where`: ADDRESS of a scheduler, ``local`` or ``cuda``."""

    source = "live"

    def __init__(
        self, where: str, settings: LiveSettings, *, device: str, gpus: list[str] | None = None, share: int = SHARE
    ):
        self.where = where
        self.settings = settings
        self.device = device  # slug that the plan was judged for; workers of another device are refused
        self.gpus = gpus
        self.share = share

    def measure(self, plan: Any, sink: Sink) -> None:
        """Spread the plan, write what comes back."""
        with connect(self.where, self.gpus) as client:
            wait_for_workers(client)
            _Spread(self, client, sink).run(plan)


class _Spread:
    """One plan on its way through the workers."""

    def __init__(self, measure: ClusterMeasure, client: Any, sink: Sink):
        self.measure = measure
        self.client = client
        self.sink = sink
        self.settings = settings_to_dict(measure.settings)
        self.shares: dict[str, Share] = {}  # by the key of their future
        self.waiting: dict[Point, int] = {}  # shares of a point that are not back
        self.back: dict[Point, list[Record]] = {}  # of points in several shares: held until the final
        self.environment: Environment | None = None

    def run(self, plan: Any) -> None:
        from distributed import as_completed

        done = self.sink.done_on(self.measure.device)  # workers report their environment only with results
        futures = as_completed([self._submit(share) for share in self._cut(plan, done)])
        for future in futures:
            share = self.shares.pop(future.key)
            answer = self._answer(future, share)
            if answer is None:
                futures.add(self._submit(share))
                continue
            for follow in self._take(share, answer):
                futures.add(self._submit(follow))
        self.sink.out_of_budget()  # so that a run that its workers cut short says so

    def _cut(self, plan: Any, done: Collection[str]) -> Iterator[Share]:
        for point, candidates in plan.by_point():
            left = missing(point, candidates, done)
            if not left:
                continue
            default = [c for c in left if c.default]
            others = [c for c in left if not c.default]
            first = self.sink.next_round(point)
            groups = [others[i : i + self.measure.share] for i in range(0, len(others), self.measure.share)] or [[]]
            self.waiting[point] = len(groups)
            for number, group in enumerate(groups):
                chosen = [*default, *group]
                samples = {key: self.sink.samples_of(key) for key in (c.key_at(point) for c in group)}
                yield Share(point, chosen, first + number * ROUNDS_OF_A_SHARE, number == 0, samples)

    def _submit(self, share: Share) -> Any:
        task = {
            "run_id": self.sink.run_id,
            "settings": self.settings,
            "point": point_to_dict(share.point),
            "candidates": [candidate_to_dict(c) for c in share.candidates],
            "first_round": share.first_round,
            "guests": share.guests,
            "samples": share.samples,
            "stop_at": self.sink.stop_at(),
        }
        future = self.client.submit(measure_share, task, resources={"GPU": 1}, pure=False, retries=0)
        self.shares[future.key] = share
        return future

    def _answer(self, future: Any, share: Share) -> dict[str, Any] | None:
        """The share's rows; None when its worker died and another must take it over."""
        error = future.exception()
        if error is None:
            return future.result()
        share.attempts += 1
        lost = type(error).__name__ in ("KilledWorker", "CancelledError", "CommClosedError")
        if lost and share.attempts < ATTEMPTS:
            self.sink.note(f"a worker died under {share.point.label()}; another takes its share over")
            return None
        if isinstance(error, UserError):
            raise error
        raise UserError(
            f"{share.point.label()}: {share.attempts} workers failed ({type(error).__name__}: {str(error)[:200]}); "
            "what was measured is kept: run again with --resume"
        )

    def _take(self, share: Share, answer: dict[str, Any]) -> Iterator[Share]:
        """Write what is final, keep the repeats of what is not, and start a point's final when its shares are in."""
        for note in answer["notes"]:
            self.sink.note(note)
        records = [from_row(row) for row in answer["rows"]]
        for record in records:
            self._same_environment(record.environment)
        several = self.waiting.get(share.point, 1) > 1 or share.point in self.back
        if share.final or not several:
            answered = {record.key() for record in records}
            for record in (*records, *(r for r in share.held if r.key() not in answered)):  # no time for the final
                self.sink.append(record)
            self.waiting.pop(share.point, None)
            return
        held = self.back.setdefault(share.point, [])
        for record in records:
            if record.status == "ok" and record.kind == "candidate":
                held.append(record)
                for sample in samples_of_record(record):
                    self.sink.sample(record.key(), sample)
            else:
                self.sink.append(record)
        self.waiting[share.point] -= 1
        if self.waiting[share.point] == 0:
            yield from self._final(share.point, self.back.pop(share.point))

    def _final(self, point: Point, held: list[Record]) -> Iterator[Share]:
        """The best of all shares and the default meet; everyone else is written."""
        merged = merge_by_key(held)
        reference = next((k for k, r in merged.items() if r.default), "")
        medians = {k: dict(zip(r.rounds, round_medians_us(r), strict=True)) for k, r in merged.items()}
        ranked = [key for key, _ in rank(merged, medians, reference) if key != reference]
        meeting = [key for key in (reference, *ranked[:FINALISTS]) if key in merged]
        for key, record in merged.items():
            if key not in meeting:
                self.sink.append(record)
        if not meeting:
            return
        self.waiting[point] = 1
        chosen = [Candidate(schedule=merged[k].schedule, default=merged[k].default) for k in meeting]
        samples = {k: samples_of_record(merged[k]) for k in meeting}
        first = 1 + max(r for k in meeting for r in merged[k].rounds)
        held = [merged[k] for k in meeting]
        yield Share(point, chosen, first, guests=False, samples=samples, final=True, held=held)

    def _same_environment(self, environment: Environment) -> None:
        if self.environment is None:
            self.environment = environment
            self.sink.started(environment)
        elif environment.likeness() != self.environment.likeness():
            raise UserError(
                f"workers differ ({_unlike(self.environment, environment)}): unlike times are never put together; "
                "what was measured is kept: run again with --resume on workers that are alike"
            )


def _unlike(one: Environment, other: Environment) -> str:
    """``driver 580.1 and 590.2``: the first thing that differs."""
    pairs = [(f.name, getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
    return next(f"{name} {a} and {b}" for name, a, b in pairs if a != b and name not in ("python", "peers"))

"""A run: one directory, one writer, a journal that survives anything, and a measure that fills it."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chord_lab.errors import UserError
from chord_lab.records.attempt import Candidate, Measure, Point
from chord_lab.records.decode import CANDIDATE_COLUMNS, POINT_COLUMNS, group, tok_e_ids
from chord_lab.records.journal import Journal, lock, new_run_id, now
from chord_lab.records.parquet import JOURNAL_GLOB, read_records, read_tables, write_parquet
from chord_lab.records.record import Environment, Record
from chord_lab.records.statistics import median_us
from chord_lab.sweeps.plan import Plan

MANIFEST = "run.json"
TABLE = "records.parquet"


@dataclass
class Progress:
    """What a watcher is shown."""

    total: int
    finished: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    now_at: str = ""
    best: dict[str, tuple[float, str]] = field(default_factory=dict)  # point -> fastest time so far and its schedule
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def rate(self) -> float:
        """Finished candidates a second."""
        return self.finished / max(1e-9, time.monotonic() - self.started)


Watch = Callable[[Progress], None]


@dataclass
class Budget:
    """What a run may use; None: no limit."""

    seconds: float | None = None
    candidates: int | None = None


def _place(what: Point | Record) -> Any:
    return (what.scenario, what.projection, what.profile, what.routing)


class Run:
    """The sink of a `Measure`: keeps records in `directory` as they come."""

    def __init__(
        self, directory: pathlib.Path, *, budget: Budget | None = None, watch: Callable[[Progress], None] | None = None
    ):
        self.directory = pathlib.Path(directory)
        self._file_id = self.run_id = new_run_id()
        self.budget = budget or Budget()
        self.progress = Progress(0)
        self.environment: Environment | None = None
        self.known: list[Record] = []  # of earlier runs in this directory
        self.cut_short = False
        self._watch = watch
        self._journal: Journal | None = None
        self._samples: dict[str, list[dict[str, Any]]] = {}
        self._next_round: dict[Any, int] = {}
        self.known_keys: set[str] = set()  # of those records
        self._stop_at = None if self.budget.seconds is None else time.monotonic() + self.budget.seconds

    # ---- what a Measure calls

    def started(self, environment: Environment) -> None:
        """Where the run measures."""
        self.environment = environment

    def done(self, environment: Environment) -> Collection[str]:
        """Keys that already have a record of a like environment."""
        like = environment.likeness()
        return {record.key() for record in self.known if record.environment.likeness() == like}

    def done_on(self, device: str) -> Collection[str]:
        """The same for the newest environment of a device."""
        same = [record for record in self.known if record.environment.device == device]
        return self.done(max(same, key=lambda r: r.date).environment) if same else ()

    def stop_at(self) -> float | None:
        """Unix time at which the seconds allowed are used up."""
        return None if self._stop_at is None else time.time() + self._stop_at - time.monotonic()

    def append(self, record: Record) -> None:
        """Write a record; on disk when this returns."""
        if self._journal is None:
            self._journal = Journal(self.directory, self._file_id)
        self._journal.append(record)
        self._note_rounds(record)
        if record.key() not in self.known_keys:  # a default that ran again beside others is not one more
            self._count(record)

    def append_table(self, table: Any) -> None:
        """Write a whole table of records, atomically; what a resumed run does not answer again stays."""
        import pyarrow.compute as pc

        write_parquet(self._with_earlier(table), self.directory / TABLE, level=3)
        self.progress.finished += pc.sum(pc.equal(table["kind"].cast("string"), "candidate")).as_py() or 0
        self._show()

    def _with_earlier(self, table: Any) -> Any:
        """The table, and the rows of the file before it whose attempts it does not hold."""
        path = self.directory / TABLE
        if not self.known or not path.is_file():
            return table
        import pyarrow as pa

        both = pa.concat_tables([table, read_tables(path)[0]]).unify_dictionaries().combine_chunks()
        attempts, _ = group(both.select([*POINT_COLUMNS, *CANDIDATE_COLUMNS]), tok_e_ids(both))
        again = np.isin(attempts[len(table) :], attempts[: len(table)])
        return both.filter(np.concatenate([np.ones(len(table), dtype=bool), ~again]))

    def sample(self, key: str, sample: dict[str, Any]) -> None:
        """Keep one repeat of an unfinished candidate."""
        if self._journal is None:
            self._journal = Journal(self.directory, self._file_id)
        self._journal.append_sample(key, sample)

    def samples_of(self, key: str) -> list[dict[str, Any]]:
        """Repeats left by an interrupted run."""
        return self._samples.get(key, [])

    def next_round(self, point: Point) -> int:
        """One past the last round that this run used at a point."""
        return self._next_round.get(_place(point), 0)

    def note(self, text: str) -> None:
        """One line for the watcher."""
        self.progress.notes.append(text)
        self._show()

    def working_on(self, point: Point, candidate: Candidate) -> None:
        """For the watcher."""
        self.progress.now_at = f"{point.projection} {point.routed_m} rows {point.routing.draw}: {candidate.label()}"
        self._show()

    def out_of_budget(self) -> bool:
        """Whether the seconds allowed are used up."""
        late = self._stop_at is not None and time.monotonic() >= self._stop_at
        self.cut_short = self.cut_short or late
        return late

    # ---- reading what is there

    def load(self) -> list[str]:
        """Take up earlier runs' records and unfinished repeats; returns one line for each thing that was skipped."""
        result = read_records(self.directory)
        self.known = result.records
        if self.known:  # a resumed sweep is the same run: its rounds go on counting
            self.run_id = min(record.run_id for record in self.known)
        self.known_keys = finished = {record.key() for record in result.records}
        for record in self.known:
            self._note_rounds(record)
        for key, sample in result.samples:
            if key not in finished:
                self._samples.setdefault(key, []).append(sample)
        return result.notices

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _note_rounds(self, record: Record) -> None:
        place = _place(record)
        self._next_round[place] = max([self._next_round.get(place, 0), *(r + 1 for r in record.rounds)])

    def _count(self, record: Record) -> None:
        if record.kind == "ceiling":
            return
        if record.kind == "candidate":
            self.progress.finished += 1
        if record.status != "ok":
            self.progress.failed[record.status] += 1
        time_us = median_us(record)
        if record.status == "ok" and record.kind == "candidate" and time_us and record.schedule:
            place = f"{record.projection} {record.routed_m} rows"
            best = self.progress.best.get(place)
            if best is None or time_us < best[0]:
                self.progress.best[place] = (time_us, record.schedule.label())
        self._show()

    def _show(self) -> None:
        if self._watch is not None:
            self._watch(self.progress)


def run(
    plan: Plan,
    measure: Measure,
    directory: pathlib.Path,
    *,
    resume: bool = False,
    budget: Budget | None = None,
    about: dict[str, Any] | None = None,
    watch: Watch | None = None,
) -> Run:
    """Measure a plan into `directory`. With `resume`, only what has no record there yet.

    Raises:
        UserError: the directory is in use, or holds a run and `resume` is not set.
    """
    directory = pathlib.Path(directory)
    with ExitStack() as stack:
        stack.enter_context(lock(directory))
        journals = list(directory.glob(JOURNAL_GLOB))
        if journals and not resume and measure.source == "live":
            raise UserError(
                f"{directory} already holds a run: --resume continues it, or choose another --out directory"
            )
        this = Run(directory, budget=budget, watch=watch)
        stack.callback(this.close)
        notices = this.load() if resume else []
        if this.budget.candidates is not None:
            plan = plan.without(this.known_keys)  # without a budget, replay and prediction answer all anew
            limited = plan.limited(this.budget.candidates)
            this.cut_short = len(limited) < len(plan)
            plan = limited
        this.progress.total = len(plan)
        this.progress.notes += notices
        unfinished = {**(about or {}), "complete": False, "partial": True}  # what a kill leaves
        write_manifest(directory, plan, this, measure.source, unfinished)
        try:
            measure.measure(plan, this)
        except BaseException:
            this.cut_short = True
            raise
        finally:
            facts = {**(about or {}), "complete": not this.cut_short, "partial": this.cut_short}
            write_manifest(directory, plan, this, measure.source, facts)
    return this


def write_manifest(directory: pathlib.Path, plan: Plan, this: Run, source: str, about: dict[str, Any]) -> None:
    """``run.json``: what was planned, refused, asked; replaced atomically."""
    environment = this.environment
    manifest = {
        **about,
        "run_id": this.run_id,
        "date": now(),
        "source": source,
        "device": environment.device_name if environment else None,
        "plan": plan.summary(),
        "budget_seconds": this.budget.seconds,
        "budget_candidates": this.budget.candidates,
        "finished": this.progress.finished,
        "failed": dict(this.progress.failed),
        "notes": this.progress.notes,
    }
    path = directory / MANIFEST
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    """The manifest of a run's directory; empty where there is none or it cannot be read."""
    try:
        value = json.loads((pathlib.Path(directory) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

"""What runs on a dask worker: one share of a point's candidates, measured in a child of the worker."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import Any

from chord_lab.measurement.live import LiveSession, LiveSettings
from chord_lab.measurement.rounds import RoundsPolicy
from chord_lab.measurement.worker import WorkerSettings
from chord_lab.records.attempt import Candidate, Point, candidate_from_dict, point_from_dict
from chord_lab.records.record import Environment, Method, Record
from chord_lab.records.rows import to_row


class RemoteSink:
    """Collects a task's records; it is the client that writes them."""

    def __init__(self, run_id: str, first_round: int, samples: dict[str, list[dict[str, Any]]], stop_at: float | None):
        self.run_id = run_id
        self.records: list[Record] = []
        self.notes: list[str] = []
        self._first_round, self._samples, self._stop_at = first_round, samples, stop_at

    def started(self, environment: Environment) -> None:
        """Nothing to do: the record says where."""

    def done(self, environment: Environment) -> Collection[str]:
        """The client left out what is done."""
        return ()

    def append(self, record: Record) -> None:
        """Keep a record for the answer."""
        self.records.append(record)

    def append_table(self, table: Any) -> None:
        """Tasks measure; they have no tables."""
        raise NotImplementedError

    def sample(self, key: str, sample: dict[str, Any]) -> None:
        """Repeats travel with their record."""

    def samples_of(self, key: str) -> list[dict[str, Any]]:
        """Repeats from other shares or an interrupted run."""
        return self._samples.get(key, [])

    def next_round(self, point: Point) -> int:
        """The first of the rounds set aside for this share."""
        return self._first_round

    def note(self, text: str) -> None:
        """Pass a remark on."""
        self.notes.append(text)

    def working_on(self, point: Point, candidate: Candidate) -> None:
        """The client shows finished candidates only."""

    def done_on(self, device: str) -> Collection[str]:
        """The client left out what is done."""
        return ()

    def stop_at(self) -> float | None:
        """The client's deadline."""
        return self._stop_at

    def out_of_budget(self) -> bool:
        """The client's deadline."""
        return self._stop_at is not None and time.time() >= self._stop_at


class _OnePoint:
    """A plan of a single point."""

    def __init__(self, point: Point, candidates: list[Candidate]):
        self._items = [(point, candidates)]

    def by_point(self) -> Iterator[tuple[Point, list[Candidate]]]:
        """The one point."""
        return iter(self._items)


_sessions: dict[str, LiveSession] = {}  # of this worker process: children live on from task to task


def measure_share(task: dict[str, Any]) -> dict[str, Any]:
    """Runs on a dask worker: measure one share, give back rows and remarks, all plain JSON values."""
    name = repr(sorted(task["settings"].items()))
    if name not in _sessions:
        for session in _sessions.values():
            session.__exit__()
        _sessions.clear()
        _sessions[name] = LiveSession(settings_from_dict(task["settings"]))
    sink = RemoteSink(task["run_id"], task["first_round"], task["samples"], task["stop_at"])
    point = point_from_dict(task["point"])
    session = _sessions[name]
    wanted = [candidate_from_dict(c) for c in task["candidates"]]
    shown = session.settings if task["guests"] else replace(session.settings, peers="none", baseline=False)
    session.settings, kept = replace(shown, ceilings=task["guests"] and session.settings.ceilings), session.settings
    if task["guests"]:
        session.welcome_guests(point)
    try:
        session.measure(_OnePoint(point, wanted), sink)
    finally:
        session.settings = kept
    return {"rows": [to_row(r) for r in sink.records], "notes": sink.notes}


def settings_to_dict(settings: LiveSettings) -> dict[str, Any]:
    """Plain JSON values: nothing but data crosses to a worker."""
    values = asdict(settings)
    values["worker"]["log"] = values["log"] = None  # the client's folder need not exist there
    values["worker"]["gpu"] = None  # the worker was started with its own
    return values


def settings_from_dict(values: dict[str, Any]) -> LiveSettings:
    """The inverse of `settings_to_dict`."""
    policy = RoundsPolicy(**{**values["policy"], "keep": tuple(values["policy"]["keep"])})
    return LiveSettings(**{**values, "worker": WorkerSettings(**values["worker"]), "policy": policy})


def samples_of_record(record: Record) -> list[dict[str, Any]]:
    """A record's repeats in the form of a journal's samples."""
    clocks, power = record.sm_mhz or (0.0,) * len(record.rounds), record.power_w or (0.0,) * len(record.rounds)
    stamp = (record.method or Method()).stamp(record.environment)
    return [
        {"round": r, "environment": stamp, "times_us": list(t), "sm_mhz": c, "power_w": w}
        for r, t, c, w in zip(record.rounds, record.times_us, clocks, power, strict=True)
    ]


def merge_by_key(records: list[Record]) -> dict[str, Record]:
    """One record per attempt: repeats of several shares, in order of their rounds."""
    found: dict[str, Record] = {}
    for record in records:
        key = record.key()
        if key not in found:
            found[key] = record
            continue
        samples = sorted(samples_of_record(found[key]) + samples_of_record(record), key=lambda s: s["round"])
        found[key] = replace(
            record,
            times_us=tuple(tuple(s["times_us"]) for s in samples),
            rounds=tuple(s["round"] for s in samples),
            sm_mhz=tuple(s["sm_mhz"] for s in samples),
            power_w=tuple(s["power_w"] for s in samples),
        )
    return found

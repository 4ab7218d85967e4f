"""What is to be tried: a point of a sweep, and the candidates that compete there. An attempt becomes a `Record`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Protocol

from w4a16_moe.problem import MoeProblem
from w4a16_moe.profiles import Interface, get_profile
from w4a16_moe.schedule import Schedule

from chord_lab.records.record import CompileFacts, Environment, Kind, Record, RoutingRef, candidate_key, plain
from chord_lab.records.statistics import as_read


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where candidates compete: one projection's problem, in one profile, under one routing."""

    scenario: str
    projection: str  # gate_up | down
    problem: MoeProblem
    profile: str
    num_tokens: int  # counted as the scenario counts
    routing: RoutingRef
    capacity: int | None = None  # grouped_masked: rows laid out per expert

    @property
    def routed_m(self) -> int:
        """Routed rows on this GPU."""
        return self.routing.routed_m

    @property
    def interface(self) -> Interface:
        """How rows reach the kernel: the profile says."""
        return get_profile(self.profile).interface

    @property
    def num_bytes(self) -> int:
        """Bytes that must move, active experts' weights only."""
        return as_read(self.problem, self.profile).num_bytes(self.routed_m, self.routing.active_experts)

    @property
    def flops(self) -> int:
        """Operations of the real routed rows."""
        return self.problem.flops(self.routed_m)

    def label(self) -> str:
        """For progress and messages: ``kimi-k2/ep8/decode gate_up 320 rows uniform``."""
        return f"{self.scenario} {self.projection} {self.routed_m} rows {self.routing.draw}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One attempt at a point."""

    schedule: Schedule | None = None  # None for peers and baselines
    kind: Kind = "candidate"
    implementation: str = "w4a16_moe"
    config: str = ""  # a peer's configuration
    default: bool = False  # the schedule that the package would use untuned

    def label(self) -> str:
        """Short name for progress and messages."""
        if self.schedule is not None:
            return self.schedule.label()
        return f"{self.implementation} {self.config}".strip()[:100]

    def key_at(self, point: Point) -> str:
        """Equal to the `Record.key` of the record that this attempt becomes."""
        return candidate_key(
            implementation=self.implementation,
            scenario=point.scenario,
            projection=point.projection,
            profile=point.profile,
            problem=point.problem,
            schedule=self.schedule,
            config=self.config,
            routing=point.routing,
        )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A candidate that was not tried: the rule that refuses it, and why."""

    point: int  # index into the plan's points
    candidate: Candidate
    rule: str
    reason: str


class Sink(Protocol):
    """Where a `Measure` puts what it finds. Only the process that owns the run writes."""

    run_id: str

    def started(self, environment: Environment) -> None:
        """Where the run measures is known now."""

    def done(self, environment: Environment) -> Collection[str]:
        """Keys of attempts that already have a record of a like environment."""

    def done_on(self, device: str) -> Collection[str]:
        """The same for the newest environment of a device, where the environment itself is not known yet."""

    def stop_at(self) -> float | None:
        """Unix time at which the budget ends, for other processes; None without a limit."""

    def append(self, record: Record) -> None:
        """Keep a finished record."""

    def append_table(self, table: Any) -> None:
        """Keep an Arrow table of finished records: replay and prediction yield them by the million."""

    def sample(self, key: str, sample: dict[str, Any]) -> None:
        """Keep one repeat of a candidate that is not finished yet, so that a kill loses none."""

    def samples_of(self, key: str) -> list[dict[str, Any]]:
        """Repeats that an interrupted run left of this attempt."""

    def next_round(self, point: Point) -> int:
        """The first interleaved round at a point that no record of this run has used."""

    def note(self, text: str) -> None:
        """One line for the person who watches."""

    def working_on(self, point: Point, candidate: Candidate) -> None:
        """For progress."""

    def out_of_budget(self) -> bool:
        """True once the seconds or the candidates allowed are used up."""


class Measure(Protocol):
    """Live, replay and predict: each turns a plan into records in a sink."""

    source: str  # live | recorded | predicted

    def measure(self, plan: Any, sink: Sink) -> None:
        """Try every candidate of the plan; a failure is a record, never an exception."""


def record_of(point: Point, candidate: Candidate, **result: Any) -> Record:
    """The record of an attempt; `result` holds environment, run_id, date, status, times, ..."""
    return Record(
        kind=candidate.kind,
        implementation=candidate.implementation,
        default=candidate.default,
        scenario=point.scenario,
        projection=point.projection,
        profile=point.profile,
        problem=point.problem,
        schedule=candidate.schedule,
        config=candidate.config,
        num_tokens=point.num_tokens,
        routed_m=point.routed_m,
        routing=point.routing,
        **result,
    )


def point_to_dict(point: Point) -> dict[str, Any]:
    """Plain JSON, for another process."""
    return plain(point)


def point_from_dict(values: dict[str, Any]) -> Point:
    """The inverse of `point_to_dict`."""
    routing = RoutingRef(**{**values["routing"], "tok_e": tuple(values["routing"]["tok_e"])})
    return Point(**{**values, "problem": MoeProblem(**values["problem"]), "routing": routing})


def candidate_to_dict(candidate: Candidate) -> dict[str, Any]:
    """Plain JSON, for another process."""
    return plain(candidate)


def candidate_from_dict(values: dict[str, Any]) -> Candidate:
    """The inverse of `candidate_to_dict`."""
    schedule = Schedule.from_dict(values["schedule"]) if values.get("schedule") else None
    return Candidate(**{**values, "schedule": schedule})


def facts_from_dict(values: dict[str, Any] | None) -> CompileFacts:
    """Compile facts from another process's answer; unknown names are dropped."""
    known = {f.name for f in fields(CompileFacts)}
    return CompileFacts(**{k: v for k, v in (values or {}).items() if k in known})

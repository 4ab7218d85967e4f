"""A record as one flat row: the same names in a journal line, a Parquet column and a DataFrame."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.records.column_types import check_types
from chord_lab.records.record import FORMAT, CompileFacts, Environment, Method, Record, RoutingRef, plain

PROBLEM_COLUMNS = tuple(f.name for f in fields(MoeProblem))
SCHEDULE_COLUMNS = tuple(f.name for f in fields(Schedule))
ENVIRONMENT_COLUMNS = tuple(f.name for f in fields(Environment))
METHOD_COLUMNS = tuple(f.name for f in fields(Method))
FACTS_COLUMNS = tuple(f.name for f in fields(CompileFacts))
# routing fields whose bare name means something else in the row
ROUTING_COLUMNS = {
    "draw": "draw",
    "generator": "generator",
    "seed": "seed",
    "num_tokens": "routing_num_tokens",
    "num_experts": "routing_num_experts",
    "top_k": "routing_top_k",
    "tok_e": "tok_e",
}
_NESTED = ("problem", "schedule", "environment", "method", "facts", "routing")
OWN_COLUMNS = tuple(f.name for f in fields(Record) if f.name not in _NESTED)
_LISTS = ("rounds", "sm_mhz", "power_w")
# Schedule fields that newer versions added have defaults: older files lack the column.
_SCHEDULE_REQUIRED = tuple(f.name for f in fields(Schedule) if f.default is MISSING)


def to_row(record: Record) -> dict[str, Any]:
    """The record in JSON types, flat; a part that is None has no columns."""
    row: dict[str, Any] = {"format": FORMAT}
    row.update((name, plain(getattr(record, name))) for name in OWN_COLUMNS)
    for part in (record.problem, record.schedule, record.environment, record.method, record.facts):
        if part is not None:
            row.update(plain(part))
    if record.routing is not None:
        row.update((column, plain(getattr(record.routing, name))) for name, column in ROUTING_COLUMNS.items())
    return row


def from_row(row: dict[str, Any]) -> Record:
    """The inverse of `to_row`; a ValueError in one line names what is missing or newer than this version."""
    if not isinstance(row, dict) or "run_id" not in row or "status" not in row:
        raise ValueError("not a record of this project (no run_id and status)")
    check_types(row)
    if row.get("format", FORMAT) > FORMAT:
        raise ValueError(f"record format {row['format']}; this version reads up to {FORMAT}")
    try:
        own = {name: row[name] for name in OWN_COLUMNS if row.get(name) is not None}
        own["times_us"] = tuple(tuple(float(t) for t in times) for times in own.get("times_us", ()))
        for name in _LISTS:
            own[name] = tuple(own.get(name, ()))
        return Record(
            **own,
            problem=MoeProblem(**_take(row, PROBLEM_COLUMNS)) if row.get("N") is not None else None,
            schedule=schedule_of(row),
            environment=Environment(**_take(row, ENVIRONMENT_COLUMNS)),
            method=Method(**_take(row, METHOD_COLUMNS)),
            facts=CompileFacts(**_take(row, FACTS_COLUMNS)),
            routing=routing_of(row),
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"incomplete record: {error}") from None


def schedule_of(row: dict[str, Any]) -> Schedule | None:
    """The row's schedule, None where it has none."""
    if any(row.get(name) is None for name in _SCHEDULE_REQUIRED):
        return None
    return Schedule(**_take(row, SCHEDULE_COLUMNS))


def routing_of(row: dict[str, Any]) -> RoutingRef | None:
    """The row's routing, None where it has none."""
    if row.get("tok_e") is None or row.get("draw") is None:
        return None
    values = {name: row[column] for name, column in ROUTING_COLUMNS.items()}
    return RoutingRef(**{**values, "tok_e": tuple(int(count) for count in values["tok_e"])})


def _take(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row[name] for name in names if row.get(name) is not None}

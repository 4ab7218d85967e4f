"""What a table is built from: one point per number of routed rows, its winner, and what every candidate took there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule
from w4a16_moe.tables import TuningRow

WIDE = 2.0  # a row whose nearest measured points are further apart than this factor says so


@dataclass(frozen=True, kw_only=True)
class TablePoint:
    """The outcome at one routed_m of one problem."""

    problem: MoeProblem
    projection: str
    num_tokens: int  # tokens of the draw on this GPU
    routed_m: int
    verdict: str  # win | tie | none
    schedule: Schedule | None  # the winner on a win, the default on a tie, None where nothing succeeded
    time_us: float | None
    default: Schedule | None
    default_us: float | None
    within: frozenset[Schedule] = frozenset()  # candidates that the noise cannot tell from the fastest one


class Missing(NamedTuple):
    """A declared point without a usable result."""

    projection: str
    routed_m: int
    reason: str  # not measured | no candidate succeeded


def missing_points(points: Sequence[TablePoint], declared: Mapping[str, Sequence[int]]) -> list[Missing]:
    """Declared (projection -> routed_m) points that have no result, and points where everything failed."""
    found = {(p.projection, p.routed_m): p for p in points}
    missing = [
        Missing(projection, m, "not measured")
        for projection, wanted in declared.items()
        for m in wanted
        if (projection, m) not in found
    ]
    missing += [Missing(p.projection, p.routed_m, "no candidate succeeded") for p in points if p.schedule is None]
    return sorted(missing)


@dataclass(frozen=True)
class _Run:
    """Neighbouring points that one schedule serves."""

    points: tuple[TablePoint, ...]
    schedule: Schedule
    verdict: str


def table_rows(points: Sequence[TablePoint], *, merge: bool = False) -> tuple[TuningRow, ...]:
    """Rows that cover every routed_m: the first from 0, each up to its largest measured point, the last one open.

    Neighbours with one schedule share a row. With `merge`, so do neighbours where some schedule stays within each
    point's margin. Points where nothing succeeded get their default in a row that no measurement supports.
    """
    ordered = sorted(points, key=lambda p: p.routed_m)
    runs = _merged(ordered) if merge else _equal(ordered)
    edges = [run.points[-1].routed_m for run in runs[:-1]]
    rows = []
    for run, low, high in zip(runs, [0, *edges], [*edges, None], strict=True):
        measured = tuple(p.routed_m for p in run.points if p.schedule is not None)
        rows.append(
            TuningRow(
                min_m=low,
                max_m=high,
                schedule=run.schedule,
                measured_m=measured,
                verdict=run.verdict,
                note=_note(run, low, ordered),
            )
        )
    return tuple(rows)


def _choice(point: TablePoint) -> tuple[Schedule, str]:
    if point.schedule is None:
        if point.default is None:
            raise ValueError(f"{point.projection} at {point.routed_m} rows has neither a winner nor a default")
        return point.default, "default"
    return point.schedule, "win" if point.verdict == "win" else "tie"


def _equal(points: Sequence[TablePoint]) -> list[_Run]:
    """Runs of points whose own choice is the same schedule. Supported and unsupported points do not share a row."""
    runs: list[_Run] = []
    for point in points:
        schedule, verdict = _choice(point)
        last = runs[-1] if runs else None
        if last and last.schedule == schedule and (last.verdict == "default") == (verdict == "default"):
            both = "win" if "win" in (last.verdict, verdict) else verdict
            runs[-1] = _Run((*last.points, point), schedule, both)
        else:
            runs.append(_Run((point,), schedule, verdict))
    return runs


def _merged(points: Sequence[TablePoint]) -> list[_Run]:
    """The fewest runs such that one schedule is within the margin at each of its points (greedy is optimal here)."""
    runs: list[_Run] = []
    open_points: list[TablePoint] = []
    shared: set[Schedule] = set()

    def close() -> None:
        if open_points:
            runs.append(_best_shared(open_points, shared))
            open_points.clear()

    for point in points:
        if point.schedule is None:
            close()
            runs.append(_Run((point,), *_choice(point)))
            continue
        good = _within_margin(point)
        both = shared & good if open_points else good
        if not both:
            close()
            both = good
        open_points.append(point)
        shared = both
    close()
    return runs


def _within_margin(point: TablePoint) -> set[Schedule]:
    assert point.schedule is not None
    return {point.schedule, *point.within}


def _best_shared(points: Sequence[TablePoint], shared: set[Schedule]) -> _Run:
    """Of the schedules within the margin everywhere, the one that most points chose for themselves."""
    own = Counter(p.schedule for p in points)
    best = min(shared, key=lambda schedule: (-own[schedule], schedule.label()))
    wins = any(p.verdict == "win" and best != p.default for p in points)
    return _Run(tuple(points), best, "win" if wins else "tie")


_DEFAULT_KEPT = "default kept: no candidate beats it by more than the noise"
_SHARED_TIE = "no schedule is proved to beat the default here"


def _note(run: _Run, low: int, points: Sequence[TablePoint]) -> str:
    """What a reader should know of the row, in one line."""
    notes = []
    if all(p.schedule is None for p in run.points):
        places = ", ".join(str(p.routed_m) for p in run.points)
        notes.append(f"no measured point supports this row: no candidate succeeded at routed_m {places}")
    first = run.points[0].routed_m
    if low and first / low > WIDE:
        notes.append(f"nothing measured between routed_m {low} and {first}")
    if run.points[-1] is points[-1]:
        notes.append(f"nothing measured above routed_m {run.points[-1].routed_m}")
    gains = [p.default_us / p.time_us for p in run.points if p.verdict == "win" and p.default_us and p.time_us]
    if run.verdict == "win" and gains:
        notes.append("default time / time " + " to ".join(f"{g:.3f}" for g in sorted({min(gains), max(gains)})))
    if run.verdict == "tie":
        kept = all(p.schedule is None or run.schedule == p.default for p in run.points)
        notes.append(_DEFAULT_KEPT if kept else _SHARED_TIE)
    return "; ".join(notes)

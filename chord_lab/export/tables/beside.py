"""New rows beside old ones: an export speaks for the range that was tried, not for what lies below and above it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from w4a16_moe.tables import TuningRow


class Joined(NamedTuple):
    """Rows of one problem, and which of them are old."""

    rows: tuple[TuningRow, ...]
    kept: tuple[TuningRow, ...]


def beside(old: Sequence[TuningRow], new: Sequence[TuningRow], tried: Sequence[int]) -> Joined:
    """Rows of `new`, and those of `old` that rest on measurements below the least or above the largest of `tried`.

    A row serves up to its measured point, so an old row below ends at its own largest measured point, and an old row
    above begins right behind the largest tried.
    """
    measured = sorted({m for row in old for m in row.measured_m})
    below = max((m for m in measured if m < min(tried)), default=0)
    above = next((m for m in measured if m > max(tried)), None)
    low, high = _clip(old, 0, below), []
    if above is not None:
        first, *rest = [row for row in old if row.max_m is None or row.max_m >= above]
        high = _clip([replace(first, min_m=max(tried)), *rest], max(tried), None)
    middle = _clip(new, below, max(tried) if high else None)
    return Joined((*low, *middle, *high), (*low, *high))


def _clip(rows: Sequence[TuningRow], low: int, high: int | None) -> list[TuningRow]:
    """What of the rows lies in low < routed_m <= high."""
    found = []
    for row in rows:
        min_m = max(row.min_m, low)
        max_m = row.max_m if high is None else high if row.max_m is None else min(row.max_m, high)
        if max_m is None or min_m < max_m:
            inside = tuple(m for m in row.measured_m if min_m < m and (max_m is None or m <= max_m))
            found.append(replace(row, min_m=min_m, max_m=max_m, measured_m=inside))
    return found

"""Keep a new table from changing what no measurement asks to change: ties, and rows that nothing supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from w4a16_moe.tables import TuningFile

from chord_lab.export.tables.points import TablePoint


class Withheld(NamedTuple):
    """Points as they should be exported, and those whose schedule was left as the package has it."""

    points: tuple[TablePoint, ...]
    ties: list[TablePoint]  # the default was not beaten by more than the noise
    unsupported: list[TablePoint]  # no candidate succeeded


def withhold(
    points: Sequence[TablePoint], existing: TuningFile | None, *, ties: bool = False, unsupported: bool = False
) -> Withheld:
    """Leave ties and unsupported points as `existing` serves them, unless told otherwise.

    ties, unsupported: True lets those points overwrite what is there (with the default schedule).
    """
    kept, left_ties, left_unsupported = [], [], []
    for point in points:
        table = existing.table_for(point.problem) if existing else None
        if table is None or point.verdict == "win":
            kept.append(point)
            continue
        old = table.row_for(point.routed_m).schedule
        if point.schedule is None and not unsupported:
            left_unsupported.append(point)
            kept.append(replace(point, default=old))
        elif point.verdict == "tie" and not ties and old != point.schedule:
            left_ties.append(point)
            kept.append(replace(point, schedule=old, within=frozenset()))
        else:
            kept.append(point)
    return Withheld(tuple(kept), left_ties, left_unsupported)

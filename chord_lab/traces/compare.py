"""Two traces side by side: by kernel, by counter, by stall."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from chord_lab.errors import UserError
from chord_lab.traces.counters import COUNTERS, STALLS, counter_frame

if TYPE_CHECKING:
    import pandas as pd

    from chord_lab.traces.table import Trace


class KernelTotal(NamedTuple):
    """All launches of one kernel in one trace."""

    name: str
    launches: int
    total_us: float
    median_us: float
    share: float  # of the trace's kernel time


class KernelChange(NamedTuple):
    """One kernel in two traces; a side in which it does not occur is None."""

    name: str
    before: KernelTotal | None
    after: KernelTotal | None
    delta_us: float  # total after - total before


class CounterChange(NamedTuple):
    """One counter of two kernels."""

    name: str
    label: str
    before: float
    after: float


def kernel_totals(trace: Trace) -> list[KernelTotal]:
    """Kernels by total time, largest first. A summary's mean counts as often as it was launched."""
    frame = trace.kernels[["name", "time_us", "launches"]].dropna(subset=["time_us"])
    if not len(frame):
        return []
    weighted = frame.assign(total=frame["time_us"] * frame["launches"])
    grouped = weighted.groupby("name", observed=True, sort=False)
    table = grouped.agg(launches=("launches", "sum"), total=("total", "sum"), median=("time_us", "median"))
    whole = float(table["total"].sum()) or float("nan")
    table = table.sort_values("total", ascending=False, kind="stable")
    columns = (table[c].tolist() for c in ("launches", "total", "median"))
    return [
        KernelTotal(str(name), int(launches), total, median, total / whole)
        for name, launches, total, median in zip(table.index, *columns, strict=True)
    ]


def kernel_changes(before: Trace, after: Trace) -> list[KernelChange]:
    """Kernels of either trace, the largest change of total time first."""
    old, new = ({t.name: t for t in kernel_totals(trace)} for trace in (before, after))
    changes = [
        KernelChange(name, old.get(name), new.get(name), _total(new.get(name)) - _total(old.get(name)))
        for name in dict.fromkeys([*old, *new])
    ]
    return sorted(changes, key=lambda change: -abs(change.delta_us))


def _total(kernel: KernelTotal | None) -> float:
    return kernel.total_us if kernel else 0.0


def counter_changes(before: Trace, after: Trace, kernels: tuple[int, int] = (0, 0)) -> list[CounterChange]:
    """Counters that both kernels have, stalls last. ``kernels`` are rows of the two kernel tables."""
    for trace, row in ((before, kernels[0]), (after, kernels[1])):
        if not 0 <= row < len(trace.kernels):
            raise UserError(f"{trace.path}: no kernel {row}; it has {len(trace.kernels)}")
    old = _figures(before, kernels[0])
    new = _figures(after, kernels[1])
    labels = {"time_us": "time, us"}
    labels |= {c.name: c.label + (", % busy" if c.name.startswith("pipe_") else "") for c in COUNTERS}
    labels |= {f"stall_{name}": f"stall {name.replace('_', ' ')}: {reason}" for name, reason in STALLS.items()}
    return [
        CounterChange(name, labels[name], float(old[name]), float(new[name]))
        for name in labels
        if not (math.isnan(old[name]) or math.isnan(new[name]))
    ]


def _figures(trace: Trace, row: int) -> pd.Series:
    figures = counter_frame(trace).iloc[row].copy()
    figures["time_us"] = trace.kernels["time_us"].iloc[row]
    return figures

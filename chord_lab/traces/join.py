"""Counters, time, schedule and load of one point in one row: a profile carries the identity of its records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chord_lab.records import Record, flops, from_row, median_us, num_bytes, to_row
from chord_lab.traces.counters import counter_frame
from chord_lab.traces.identity import kernel_identity

if TYPE_CHECKING:
    import pandas as pd

    from chord_lab.traces.table import Trace


def identity_of(record: Record) -> dict[str, Any]:
    """What a profile keeps of its record: all but the raw times, whose median it keeps."""
    row = {name: value for name, value in to_row(record).items() if name not in ("times_us", "rounds", "power_w")}
    return row | {"key": record.key(), "record_time_us": median_us(record)}


def with_identity(trace: Trace, records: Iterable[Record | Mapping[str, Any]], order: Sequence[str] = ()) -> Trace:
    """The trace with each kernel's record, found by the key in its NVTX path; kernels of no record keep None.

    ``order``: keys in the order in which they were launched. Where a capture has no NVTX paths and just one kernel for
    each key, the order tells, and a note says so.
    """
    rows = [identity_of(r) if isinstance(r, Record) else dict(r) for r in records]
    found = kernel_identity(trace.kernels["nvtx"], rows) or (None,) * len(trace.kernels)
    if not any(found) and len(order) == len(trace.kernels):
        by_key = {row["key"]: row for row in rows}
        found = tuple(by_key.get(key) for key in order)
        note = "no NVTX ranges in the capture: kernels are joined to their records by the order of launches"
        trace = replace(trace, notes=(*trace.notes, note))
    lost = sum(identity is None for identity in found)
    notes = (*trace.notes, f"{lost} of {len(found)} kernels belong to no record") if lost else trace.notes
    return replace(trace, identity=found, notes=notes)


def points_frame(traces: Iterable[Trace]) -> pd.DataFrame:
    """A row a profiled attempt: identity, schedule, load, the record's time, the profiler's time, counters.

    An attempt that several traces hold is shown as it was captured last.
    A point whose launch ran several kernels (a stream-K sum, say) has their total time and the counters of the longest.
    Columns: key, scenario, projection, routed_m, tok_e (list), draw, schedule (Schedule), label, record_time_us,
    profiled_us, num_kernels, the kernel's own columns, `COUNTERS`, ``stall_*``, num_bytes and flops of the problem.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for trace in traces:
        if not trace.identity:
            continue
        counters = counter_frame(trace)
        keys = [str(i["key"]) if i else "" for i in trace.identity]
        for key in dict.fromkeys(k for k in keys if k):
            group = trace.kernels[[k == key for k in keys]]
            longest: Any = group["time_us"].fillna(-1).idxmax()
            identity = trace.identity[longest]
            assert identity is not None
            row = _identity_columns(key, identity) | {
                "file": trace.path.name,
                "profiled_us": float(group["time_us"].sum(min_count=len(group))),
                "num_kernels": len(group),
            }
            row |= {
                name: trace.kernels[name].iloc[longest] for name in ("name", "grid", "block", "registers", "smem_bytes")
            }
            rows.append(row | counters.loc[longest].to_dict())
    latest: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = latest.get(row["key"])
        if known is None or str(row["date"]) > str(known["date"]):
            latest[row["key"]] = row
    return pd.DataFrame(list(latest.values()))


def _identity_columns(key: str, identity: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "scenario",
        "projection",
        "profile",
        "num_tokens",
        "routed_m",
        "draw",
        "tok_e",
        "implementation",
        "rel_error",
    )
    row: dict[str, Any] = {"key": key} | {name: identity.get(name) for name in (*kept, "device_name", "date")}
    record = from_row({name: value for name, value in identity.items() if name not in ("key", "record_time_us")})
    time_us = identity.get("record_time_us")
    return row | {
        "schedule": record.schedule,
        "label": record.schedule.label() if record.schedule else record.config,
        "record_time_us": math.nan if time_us is None else float(time_us),
        "num_bytes": num_bytes(record),
        "flops": flops(record),
    }

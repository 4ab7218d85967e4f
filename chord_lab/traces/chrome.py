"""Chrome-trace JSON for ui.perfetto.dev, which draws it in the browser without sending it anywhere."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chord_lab.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from chord_lab.traces.table import Trace

FIRST_PID = 1  # viewers take process 0 for the idle one
EXTRA_LANES = 1 << 20  # lanes for what overlaps are numbered from here: no stream or thread has such a number
ARGUMENTS = {"device_index": "device", "stream": "stream", "correlation": "correlation", "grid": "grid"}
ARGUMENTS |= {"block": "block", "registers": "registers per thread", "smem_bytes": "shared memory", "nvtx": "nvtx"}


def write_chrome_trace(trace: Trace, path: Path) -> int:
    """Write kernels by device and stream and ranges by thread; the number of events. Whole or not at all.

    Kernels without a start (counters of Nsight Compute) are laid one after another: order is real, gaps are not.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with open(temporary, "w", encoding="utf-8") as out:
            out.write('{"displayTimeUnit":"ns","otherData":')
            json.dump({"source": trace.path.name, "kind": trace.kind, "notes": list(trace.notes)}, out)
            out.write(',"deviceProperties":')
            devices = trace.kernels["device_index"].dropna().unique()
            json.dump([{"id": int(i), "name": trace.device} for i in devices if trace.device], out)
            out.write(',"traceEvents":[\n')
            for event in chrome_events(trace):
                out.write(("" if not count else ",\n") + json.dumps(event, allow_nan=False))
                count += 1
            out.write("\n]}\n")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return count


def chrome_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """The events one by one: names of the lanes, kernels, ranges. Times are microseconds.

    Kernels have the argument names of a PyTorch profile, so that what reads those reads this. Perfetto draws events of
    one lane only while they nest: what overlaps otherwise gets a lane of its own beside it.
    """
    kernels, ranges = trace.kernels, trace.nvtx
    devices = sorted({int(d) for d in kernels["device_index"].dropna().unique()}) or [0]
    for index in devices:
        name = f"GPU {index}" + (f" ({trace.device})" if trace.device else "")
        yield _metadata("process_name", index + FIRST_PID, 0, name)
    host = max(devices) + FIRST_PID + 1
    if len(ranges):
        yield _metadata("process_name", host, 0, "ranges")
    lanes = _Lanes()
    yield from _kernel_events(kernels, lanes)
    closed = ranges[ranges["end_us"].notna()]
    threads = {thread: i for i, thread in enumerate(dict.fromkeys(closed["thread"].astype(str)), start=1)}
    for name, start, end, thread, path in zip(
        closed["name"].astype(str), closed["start_us"], closed["end_us"], closed["thread"].astype(str),
        closed["path"].astype(str), strict=True,
    ):  # fmt: skip
        span = _span(start, end)
        tid = lanes.place(host, threads[thread], f"thread {thread}", span, nested=True)
        yield _complete(name, {"cat": "range", "pid": host, "tid": tid}, span, {"path": path})
    for pid, tid, name in lanes.names():
        yield _metadata("thread_name", pid, tid, name)


class _Lanes:
    """Hands out lanes in which events follow each other, or nest where they may."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[int, int], list[tuple[int, list[float]]]] = {}  # of each lane the ends still open
        self.labels: dict[tuple[int, int], str] = {}
        self.next = EXTRA_LANES

    def place(self, pid: int, tid: int, label: str, span: tuple[float, float], nested: bool = False) -> int:
        """The lane of an event that starts no earlier than those before it."""
        start, end = span
        lanes = self.lanes.setdefault((pid, tid), [])
        for lane, ends in lanes:
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or (nested and end <= ends[-1]):
                ends.append(end)
                return lane
        if lanes:
            tid, label, self.next = self.next, f"{label}, overlapping", self.next + 1
        lanes.append((tid, [end]))
        self.labels[pid, tid] = label
        return tid

    def names(self) -> list[tuple[int, int, str]]:
        """Process, lane and label of all."""
        return [(pid, tid, label) for (pid, tid), label in self.labels.items()]


def _kernel_events(kernels: pd.DataFrame, lanes: _Lanes) -> Iterator[dict[str, Any]]:
    clock = 0.0
    columns = ["name", "start_us", "time_us", "grid", "block", "registers", "smem_bytes", "device_index", "stream"]
    rows: Any = kernels[[*columns, "correlation", "nvtx"]].itertuples(index=False)
    for row in rows:
        if math.isnan(row.time_us):
            continue
        start = clock if math.isnan(row.start_us) else row.start_us
        clock = start + row.time_us
        span = _span(start, clock)
        device = int(row.device_index) if _known(row.device_index) else 0
        stream = int(row.stream) if _known(row.stream) else 0
        tid = lanes.place(device + FIRST_PID, stream, f"stream {stream}", span)
        values = {name: getattr(row, column) for column, name in ARGUMENTS.items()}
        args = {name: _plain(value) for name, value in values.items() if _known(value)}
        yield _complete(str(row.name), {"cat": "kernel", "pid": device + FIRST_PID, "tid": tid}, span, args)


def _plain(value: Any) -> Any:
    """A grid or block as three numbers, a count as int, text as it is."""
    if not isinstance(value, str):
        return int(value)
    return [int(size) for size in value.split("x")] if re.fullmatch(r"\d+x\d+x\d+", value) else value


def _known(value: Any) -> bool:
    import pandas as pd

    return not pd.isna(value)


def _span(start: float, end: float) -> tuple[float, float]:
    """Start and end in whole nanoseconds: each rounded, so that what touched or nested still does."""
    return round(float(start), 3), round(float(end), 3)


def _metadata(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(name: str, lane: dict[str, Any], span: tuple[float, float], args: dict[str, Any]) -> dict[str, Any]:
    start, end = span
    return {"ph": "X", "name": name, **lane, "ts": start, "dur": round(end - start, 3), "args": args}

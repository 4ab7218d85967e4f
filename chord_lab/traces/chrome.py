"""Chrome-trace JSON for ui.perfetto.dev, which draws it in the browser without sending it anywhere."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chord_lab.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from chord_lab.traces.table import Trace


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
    """The events one by one: names of the lanes, kernels, ranges. Times are microseconds."""
    kernels, ranges = trace.kernels, trace.nvtx
    devices = sorted({int(d) for d in kernels["device_index"].dropna().unique()}) or [0]
    for index in devices:
        yield _metadata("process_name", index, 0, f"GPU {index}" + (f" ({trace.device})" if trace.device else ""))
    host = max(devices) + 1
    if len(ranges):
        yield _metadata("process_name", host, 0, "ranges")
    yield from _kernel_events(kernels)
    threads = {thread: i for i, thread in enumerate(dict.fromkeys(ranges["thread"].astype(str)))}
    for thread, tid in threads.items():
        yield _metadata("thread_name", host, tid, f"thread {thread}")
    closed = ranges[ranges["end_us"].notna()]
    for name, start, time, thread, path in zip(
        closed["name"].astype(str), closed["start_us"], closed["time_us"], closed["thread"].astype(str),
        closed["path"].astype(str), strict=True,
    ):  # fmt: skip
        lane = {"cat": "range", "pid": host, "tid": threads[thread]}
        yield _complete(name, lane, start, time, {"path": path})


def _kernel_events(kernels: pd.DataFrame) -> Iterator[dict[str, Any]]:
    clock = 0.0
    columns = ["name", "start_us", "time_us", "grid", "block", "registers", "smem_bytes", "device_index", "stream"]
    rows: Any = kernels[[*columns, "correlation", "nvtx"]].itertuples(index=False)
    for row in rows:
        if math.isnan(row.time_us):
            continue
        start = clock if math.isnan(row.start_us) else row.start_us
        clock = start + row.time_us
        named = {n: getattr(row, n) for n in ("grid", "block", "registers", "smem_bytes", "correlation", "nvtx")}
        args = {n: v if isinstance(v, str) else int(v) for n, v in named.items() if _known(v)}
        device = int(row.device_index) if _known(row.device_index) else 0
        stream = int(row.stream) if _known(row.stream) else 0
        lane = {"cat": "kernel", "pid": device, "tid": stream}
        yield _complete(str(row.name), lane, start, row.time_us, args)


def _known(value: Any) -> bool:
    import pandas as pd

    return not pd.isna(value)


def _metadata(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(name: str, lane: dict[str, Any], start: float, time: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, **lane, "ts": round(float(start), 3), "dur": round(float(time), 3), "args": args}

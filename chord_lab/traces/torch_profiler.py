"""PyTorch profiler (Kineto) JSON and other Chrome traces, as a stream: memory grows with the kernels, not the file.

Kept are kernels, launches and annotations as compact arrays. Categories and argument names changed between versions and
differ between vendors: the sets below and `_kernel_fields` hold all that are known.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chord_lab.errors import UserError
from chord_lab.traces.identity import kernel_identity
from chord_lab.traces.json_stream import Head, Progress, late_value, read_events, read_head
from chord_lab.traces.ranges import PathBook, open_ranges
from chord_lab.traces.table import Trace, dims, kernel_frame, metric_frame, nullable, nvtx_frame

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

KERNEL_CATEGORIES = {"kernel"}  # lower case: "Kernel" before the renaming of 2022
MEMORY_CATEGORIES = {"gpu_memcpy", "gpu_memset", "memcpy", "memset"}
LAUNCH_CATEGORIES = {"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime"}
OTHER_RUNTIMES = ("xpu_", "mtia_", "privateuse1_")  # prefixes of other vendors' runtime and driver categories
RANGE_CATEGORIES = {"user_annotation"}  # record_function and NVTX ranges
DEVICE_TASKS = {"AI_CORE", "AI_VECTOR_CORE", "MIX_AIC", "MIX_AIV", "AI_CPU"}  # Ascend: "Task Type" of a device event
RECORDS_KEY = "chord_lab_records"  # metadata of our own layer traces
INT64 = 2**63
NO_NUMBER = -INT64


def read_torch_profiler(path: Path, progress: Progress | None = None) -> Trace:
    """Kernels and annotations of a profile. Raises UserError for other JSON, by what it is, and for a damaged file."""
    head = read_head(path)
    collected = _Collected()

    def fresh() -> Callable[[Any], None]:
        nonlocal collected
        collected = _Collected()
        return collected.add

    notes = read_events(path, head, fresh, progress)
    if not collected.seen:
        raise UserError(f"{path}: JSON, but no trace: its list of events is empty")
    if not collected.timed:
        raise UserError(f"{path}: JSON, but no trace: none of its {collected.seen:,} events has a time and a duration")
    return _trace(path, head, collected, notes)


class _Collected:
    """The events that matter, as arrays."""

    def __init__(self) -> None:
        self.seen = self.timed = self.memory = self.strange = 0
        self.names: dict[str, int] = {}
        self.shapes: dict[tuple[Any, ...], int] = {}
        self.threads: dict[tuple[str, str], int] = {}
        self.vendors: set[str] = set()
        self.kernel_times, self.kernel_ids = (
            array("d"),
            array("q"),
        )  # ts, dur | name, shape, device, stream, correlation
        self.launch_times, self.launch_ids = array("d"), array("q")  # ts | correlation, pid and tid
        self.range_times, self.range_ids = array("d"), array("q")  # ts, dur | name, pid and tid

    def add(self, event: Any) -> None:
        """Sort one event; what is no event or has odd values is counted, not fatal."""
        self.seen += 1
        if not isinstance(event, dict):
            self.strange += 1
            return
        if event.get("ph") != "X":
            return
        start, duration = _microseconds(event.get("ts")), _microseconds(event.get("dur", 0))
        if start is None or duration is None or duration < 0:
            self.strange += 1
            return
        self.timed += 1
        self._add_timed(event, start, duration)

    def _add_timed(self, event: dict[str, Any], start: float, duration: float) -> None:
        category = str(event.get("cat") or "").lower()
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        name = str(event.get("name"))
        if (
            category in KERNEL_CATEGORIES
            or args.get("Task Type") in DEVICE_TASKS
            or event.get("pid") == "CUDA functions"
        ):
            shape, *ids = _kernel_fields(event, args)
            self.kernel_times.extend((start, duration))
            self.kernel_ids.extend((self._name(name), self.shapes.setdefault(shape, len(self.shapes)), *ids))
        elif category in MEMORY_CATEGORIES:
            self.memory += 1
        elif category in LAUNCH_CATEGORIES or category.startswith(OTHER_RUNTIMES):
            correlation = _whole(args.get("correlation"))
            if correlation != NO_NUMBER:
                self.launch_times.append(start)
                self.launch_ids.extend((correlation, self._thread(event)))
            if name.startswith("hip"):
                self.vendors.add("ROCm")
            elif category.startswith(OTHER_RUNTIMES):
                self.vendors.add(category.partition("_")[0].upper())
        elif category in RANGE_CATEGORIES:
            self.range_times.extend((start, duration))
            self.range_ids.extend((self._name(name), self._thread(event)))

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _thread(self, event: dict[str, Any]) -> int:
        key = (str(event.get("pid")), str(event.get("tid")))
        return self.threads.setdefault(key, len(self.threads))


def _microseconds(value: Any) -> float | None:
    """A time as float; older versions wrote some as text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if not math.isnan(number) and abs(number) < 1e18 else None


def _whole(value: Any) -> int:
    """A 64-bit whole number, NO_NUMBER for anything else."""
    if isinstance(value, Decimal) and value.adjusted() > 20:  # int(Decimal("1e999999999")) would fill the memory
        return NO_NUMBER
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return NO_NUMBER
    return number if -INT64 < number < INT64 else NO_NUMBER


def _kernel_fields(event: dict[str, Any], args: dict[str, Any]) -> tuple[tuple[Any, ...], int, int, int]:
    """Shape (grid, block, registers, shared memory), device, stream, correlation, by any vendor's names."""
    grid, block = _triple(args.get("grid")), _triple(args.get("block"))
    registers = _whole(args.get("registers per thread"))
    smem = _whole(args.get("shared memory"))
    device = _whole(args.get("device", args.get("Device Id", event.get("pid"))))
    stream = _whole(args.get("stream", args.get("Stream Id", args.get("queue"))))
    correlation = _whole(args.get("correlation", args.get("correlation_id", args.get("connection_id"))))
    return (grid, block, registers, smem), device, stream, correlation


def _triple(value: Any) -> str | None:
    if not isinstance(value, list) or not 1 <= len(value) <= 3:
        return None
    sizes = [_whole(v) for v in value] + [1, 1]
    return None if NO_NUMBER in sizes else dims(*sizes[:3])


def _trace(path: Path, head: Head, got: _Collected, notes: list[str]) -> Trace:
    times, ranges = _pairs(got.kernel_times), _pairs(got.range_times)
    origin = min((float(t[:, 0].min()) for t in (times, ranges) if len(t)), default=0.0)
    book = PathBook()
    nvtx, opened = _ranges(got, ranges, origin, book)
    kernels = _kernels(got, times, origin, book, _paths(got, opened, notes))
    if got.strange:
        notes.append(f"{got.strange} events with odd or missing values were left out")
    if not len(kernels):
        notes.append("no GPU kernels: a CPU-only profile")
    elif not any(shape[0] for shape in got.shapes):
        notes.append("no grid, block or registers: this profiler does not record them")
    if not len(ranges):
        notes.append("no annotations: nothing was marked with record_function or NVTX")
    if got.memory:
        notes.append(f"{got.memory} memory copies and sets are left out of the kernel table")
    device = _device(path, head, kernels, notes)
    facts = _facts(head, got)
    if facts["rank"] is None:
        notes.append("the file does not say which rank it is of (no distributedInfo)")
    notes.append("no hardware counters: the PyTorch profiler records times only")
    identity = kernel_identity(kernels["nvtx"], _records(head))
    return Trace("torch-profiler", path, device, kernels, nvtx, metric_frame([]), tuple(notes), facts, identity)


def _records(head: Head) -> list[dict[str, Any]]:
    """Rows of records that `measurement.layer_trace` put into the file; what is no such row is left alone."""
    rows = head.values.get(RECORDS_KEY)
    found = [row for row in rows if isinstance(row, dict) and "key" in row] if isinstance(rows, list) else []
    return [{n: float(v) if isinstance(v, Decimal) else v for n, v in row.items()} for row in found]


def _pairs(values: array[float]) -> np.ndarray:
    import numpy as np

    return np.frombuffer(values, "float64").reshape(-1, 2) if values else np.empty((0, 2))


def _integers(values: array[int], width: int) -> np.ndarray:
    import numpy as np

    return np.frombuffer(values, "int64").reshape(-1, width) if values else np.empty((0, width), "int64")


def _facts(head: Head, got: _Collected) -> dict[str, Any]:
    distributed = head.values.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    return {
        "tool": "PyTorch profiler",
        "schema": _plain(head.values.get("schemaVersion")),
        "rank": _plain(distributed.get("rank")),
        "world_size": _plain(distributed.get("world_size")),
        "vendor": ", ".join(sorted(got.vendors)) or None,
        "events": got.seen,
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int) else str(value)


def _device(path: Path, head: Head, kernels: pd.DataFrame, notes: list[str]) -> str | None:
    """Names of the devices that ran kernels; a file lists all that the host has."""
    if not len(kernels):
        return None
    properties = head.values.get("deviceProperties")
    if properties is None and head.prefix != "item":
        properties = late_value(path, "deviceProperties")
    rows = [p for p in properties if isinstance(p, dict)] if isinstance(properties, list) else []
    named = {_whole(p.get("id")): str(p["name"]) for p in rows if p.get("name")}
    used = kernels["device_index"].dropna().unique().tolist()
    names = dict.fromkeys(named[i] for i in used if i in named)
    if not names:
        notes.append("the file does not name its GPU (no deviceProperties of the devices that ran kernels)")
    return ", ".join(names) or None


def _ranges(got: _Collected, times: np.ndarray, origin: float, book: PathBook) -> tuple[pd.DataFrame, dict[int, Any]]:
    import numpy as np
    import pandas as pd

    if not len(times):
        return nvtx_frame(), {}
    ids = _integers(got.range_ids, 2)
    start, end = times[:, 0], times[:, 0] + times[:, 1]
    texts = list(got.names)
    names = [texts[i] for i in ids[:, 0].tolist()]
    depth, path = np.zeros(len(ids), "int32"), np.zeros(len(ids), "int32")
    opened: dict[int, Any] = {}
    for thread in np.unique(ids[:, 1]).tolist():
        mine = np.flatnonzero(ids[:, 1] == thread)
        opened[thread], depth[mine], path[mine] = open_ranges(start[mine], end[mine], [names[i] for i in mine], book)
    threads, labels = [" / ".join(key) for key in got.threads], book.labels()
    frame = nvtx_frame(
        {
            "name": pd.Categorical(names),
            "start_us": (start - origin).round(3),
            "end_us": (end - origin).round(3),
            "time_us": times[:, 1],
            "depth": depth,
            "path": pd.Categorical([labels[p] for p in path.tolist()]),
            "thread": pd.Categorical([threads[t] for t in ids[:, 1].tolist()]),
            "domain": pd.Categorical([""] * len(ids)),
        }
    )
    return frame.sort_values(["start_us", "depth"], kind="stable", ignore_index=True), opened


def _paths(got: _Collected, opened: dict[int, Any], notes: list[str]) -> np.ndarray:
    """Path code of each kernel: what was open on its launching thread when it was launched."""
    import numpy as np

    correlation = _integers(got.kernel_ids, 5)[:, 4]
    codes = np.zeros(len(correlation), "int32")
    launches = _integers(got.launch_ids, 2)
    if not len(correlation) or not len(launches):
        return codes
    order = np.argsort(launches[:, 0], kind="stable")
    found = order[np.minimum(np.searchsorted(launches[:, 0], correlation, sorter=order), len(order) - 1)]
    matched = launches[found, 0] == correlation
    if not matched.all() and opened:
        notes.append(f"{int((~matched).sum())} of {len(matched)} kernels have no launch call in the file")
    when = np.frombuffer(got.launch_times, "float64")[found]
    for thread, steps in opened.items():
        mine = np.flatnonzero(matched & (launches[found, 1] == thread))
        codes[mine] = steps.at(when[mine])
    return codes


def _kernels(got: _Collected, times: np.ndarray, origin: float, book: PathBook, paths: np.ndarray) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    order = np.argsort(times[:, 0], kind="stable")
    times, ids = times[order], _integers(got.kernel_ids, 5)[order]
    shapes = list(got.shapes)

    def category(codes: np.ndarray, texts: list[str | None]) -> pd.Categorical:
        values = pd.Series(texts, dtype=object).take(codes)
        return pd.Categorical(values)

    def whole(values: np.ndarray, dtype: str) -> Any:
        limit = np.iinfo(dtype.lower()).max  # a device id such as 2**40 is no device id
        return nullable(
            np.where(np.abs(values) > limit, 0, values), (values == NO_NUMBER) | (np.abs(values) > limit), dtype
        )

    shape = ids[:, 1]
    numbers = np.asarray([s[2:] for s in shapes], "int64").reshape(-1, 2)
    return kernel_frame(
        {
            "name": category(ids[:, 0], list(got.names)),
            "start_us": (times[:, 0] - origin).round(3),  # whole nanoseconds in the file
            "time_us": times[:, 1].copy(),
            "grid": category(shape, [s[0] for s in shapes]),
            "block": category(shape, [s[1] for s in shapes]),
            "registers": whole(numbers[shape, 0], "Int32"),
            "smem_bytes": whole(numbers[shape, 1], "Int64"),
            "device_index": whole(ids[:, 2], "Int16"),
            "stream": whole(ids[:, 3], "Int64"),
            "correlation": whole(ids[:, 4], "Int64"),
            "nvtx": category(paths[order], [label or None for label in book.labels()]),
        }
    )

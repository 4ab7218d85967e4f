"""Nsight Compute's CSV pages: raw (a column a metric), details (a row a metric), and the per-kernel summary."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from chord_lab.errors import UserError
from chord_lab.traces.numerals import Numerals, base_unit, learn_numerals
from chord_lab.traces.table import NVTX_SEPARATOR, Trace, kernel_frame, metric_frame, nvtx_frame, parse_dims, plausible
from chord_lab.traces.text_files import Table, find_tables, split_row

IDENTITY = {
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream", "Block Size",
    "Grid Size", "Device", "CC", "Invocations", "Section Name", "Metric Name", "Metric Unit", "Metric Value", "Minimum",
    "Maximum", "Average", "Rule Name", "Rule Type", "Rule Description", "Estimated Speedup Type", "Estimated Speedup",
}  # fmt: skip
NVTX_MARKS = ("push/pop_range", "start/stop_range")

# What each page calls the figures of the kernel table
TIME = ("gpu__time_duration.sum", "gpu__time_duration.avg", "Duration")
REGISTERS = ("launch__registers_per_thread", "Registers Per Thread")
STATIC_SMEM = ("launch__shared_mem_per_block_static", "Static Shared Memory Per Block")
DYNAMIC_SMEM = ("launch__shared_mem_per_block_dynamic", "Dynamic Shared Memory Per Block")
DEVICE_NAME = "device__attribute_display_name"


def is_ncu_header(fields: list[str]) -> bool:
    """A header of any page: it names kernels, and launches or metrics."""
    names = set(fields)
    return "Kernel Name" in names and bool(names & {"ID", "Process ID", "Metric Name", "Invocations"})


def read_ncu_csv(path: Path, text: str, notes: list[str]) -> Trace:
    """The kernels of every page in ``text``. Raises UserError when the numbers cannot be read one way."""
    tables = list(find_tables(text, is_ncu_header))
    if not tables:
        raise UserError(f'{path}: no Nsight Compute CSV table in it (no header row with a "Kernel Name" column)')
    pages = [_Page(path, table) for table in tables]
    try:
        numerals = learn_numerals(value for page in pages for value in page.values())
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    launches: list[_Launch] = []
    for page in pages:
        launches += page.launches(numerals)
    return _trace(path, pages, launches, numerals, [*notes, *_chatter_notes(text, tables)])


class _Launch:
    """One row of the kernel table while it is gathered."""

    def __init__(self, row: dict[str, str]) -> None:
        self.name = row.get("Kernel Name", "")
        self.grid, self.block = row.get("Grid Size", ""), row.get("Block Size", "")
        self.device, self.stream = row.get("Device", ""), row.get("Stream", "")
        self.process = row.get("Process ID", "")
        self.nvtx = _nvtx_path(row)
        self.count = 1
        self.metrics: dict[str, tuple[float, str, str | None]] = {}  # name -> value, base unit, text
        self.missing = 0  # metrics that the tool printed as n/a

    def put(self, name: str, text: str, unit: str, numerals: Numerals) -> None:
        """Keep one metric in its base unit; text that is no number is kept as text."""
        base, factor = base_unit(unit)
        try:
            value = numerals.number(text)
        except ValueError:
            self.metrics.setdefault(name, (float("nan"), unit, text))
            return
        if value is None:
            self.missing += 1
            return
        if name in self.metrics and self.metrics[name][1] != base:  # "Memory Throughput": a share and a rate
            name = f"{name} ({base})"
        self.metrics.setdefault(name, (value * factor, base, None))

    def first(self, names: tuple[str, ...]) -> float:
        """The first of these metrics that the launch has, NaN when it has none or it is infinite."""
        value = next((self.metrics[n][0] for n in names if n in self.metrics), math.nan)
        return value if math.isfinite(value) else math.nan


class _Page:
    """One CSV table, of whichever page."""

    def __init__(self, path: Path, table: Table) -> None:
        self.path, self.table = path, table
        names = set(table.header)
        self.page = "raw" if "Metric Name" not in names else "details" if "Metric Value" in names else "summary"
        self.metric_columns = [
            (i, n) for i, n in enumerate(table.header) if self.page == "raw" and n not in IDENTITY and not _is_nvtx(n)
        ]
        self.units = [""] * len(table.header)
        self.rows = table.rows
        if self.page == "raw" and self.rows and self._is_units_row(self.rows[0]):
            self.units, self.rows = self.rows[0], self.rows[1:]

    def _is_units_row(self, row: list[str]) -> bool:
        identity = [v for v, n in zip(row, self.table.header, strict=True) if n in ("ID", "Kernel Name", "Process ID")]
        return not any(v.strip() for v in identity)

    def values(self) -> list[str]:
        """Every printed figure: what the way of writing numbers is learnt from."""
        if self.page == "raw":
            measured = [i for i, _ in self.metric_columns if self.units[i].strip()]  # others may be texts such as "0,1"
            return [row[i] for row in self.rows for i in measured or [i for i, _ in self.metric_columns]]
        wanted = {"Metric Value"} if self.page == "details" else {"Minimum", "Maximum", "Average"}
        columns = [i for i, n in enumerate(self.table.header) if n in wanted]
        return [row[i] for row in self.rows for i in columns]

    def launches(self, numerals: Numerals) -> list[_Launch]:
        """The page's kernels in the order of the file."""
        if self.page == "raw":
            return [self._raw_launch(row, numerals) for row in self.rows]
        found: dict[tuple[str, ...], _Launch] = {}
        for row in self.rows:
            named = dict(zip(self.table.header, row, strict=True))
            key = (named.get("ID", ""), named.get("Process ID", ""), named.get("Kernel Name", ""))
            launch = found.setdefault(key, _Launch(named))
            if self.page == "summary":
                launch.count = int(named["Invocations"]) if named.get("Invocations", "").strip().isdigit() else 1
            if named["Metric Name"].strip():  # a rule's row has none
                value = named["Metric Value"] if self.page == "details" else named.get("Average", "")
                launch.put(named["Metric Name"].strip(), value, named.get("Metric Unit", ""), numerals)
        return list(found.values())

    def _raw_launch(self, row: list[str], numerals: Numerals) -> _Launch:
        launch = _Launch(dict(zip(self.table.header, row, strict=True)))
        for i, name in self.metric_columns:
            launch.put(name, row[i], self.units[i], numerals)
        return launch


def _is_nvtx(column: str) -> bool:
    return any(mark in column.lower() for mark in NVTX_MARKS)


def _nvtx_path(row: dict[str, str]) -> str:
    """Range names from cells such as ``7  "<default domain>:decode:none:none:none:none:none:none"``."""
    path: list[str] = []
    for column, cell in row.items():
        if not _is_nvtx(column) or not cell.strip():
            continue
        quoted = re.findall(r'"([^"]*)"', cell)
        if not quoted:  # some versions print the bare name
            path.append(cell.strip())
        for entry in quoted:
            # domain:name:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg; the name itself may hold colons
            parts = entry.split(":")
            name = parts[1:-6] if len(parts) >= 8 else parts[1:2] if len(parts) > 1 else parts
            path.append(":".join(name))
    return NVTX_SEPARATOR.join(p for p in path if p)


def _chatter_notes(text: str, tables: list[Table]) -> list[str]:
    notes = []
    between = sum(t.chatter for t in tables)
    if between:
        notes.append(f"lines inside the table that are no rows of it, left out: {between} (other output, or a cut row)")
    if "ERR_NVGPUCTRPERM" in text:
        notes.append("the driver forbade the counters for part of the run (ERR_NVGPUCTRPERM)")
    return notes


def _trace(path: Path, pages: list[_Page], launches: list[_Launch], numerals: Numerals, notes: list[str]) -> Trace:
    times = [plausible(launch.first(TIME) / 1e3) for launch in launches]
    without_time = sum(math.isnan(t) for t in times)
    if not launches:
        notes.append("no kernels: the table has a header and no rows (nothing was profiled)")
    elif without_time:
        notes.append(
            f"{without_time} of {len(launches)} kernels have no duration: "
            "gpu__time_duration.sum was not collected, or is no time"
        )
    if not numerals.certain:
        notes.append("decimal sign not certain: values such as 223,008 are read in the English way (thousands)")
    missing = sum(launch.missing for launch in launches)
    if missing:
        notes.append(f"{missing} metric values are n/a and left out")
    notes.append("no start times: Nsight Compute replays each kernel alone, so there is no timeline")
    if any(p.page == "summary" for p in pages):
        notes.append("a summary: each row is the mean of the launches of one kernel")
    kinds = Counter(p.page for p in pages)
    return Trace(
        kind=f"ncu-csv-{kinds.most_common(1)[0][0]}",
        path=path,
        device=_device(launches, notes),
        kernels=_frame(launches, times),
        nvtx=nvtx_frame(),
        metrics=metric_frame(
            [(i, n, v, u, t) for i, launch in enumerate(launches) for n, (v, u, t) in launch.metrics.items()]
        ),
        notes=tuple(notes),
        facts={"tool": "Nsight Compute", "page": ", ".join(kinds), "decimal": numerals.decimal},
    )


def _device(launches: list[_Launch], notes: list[str]) -> str | None:
    """The GPU's name: a metric of the raw page, or a Device column that holds a name rather than an index."""
    names: dict[str, None] = {}
    for launch in launches:
        name = launch.metrics.get(DEVICE_NAME, (0, "", None))[2] or launch.device.strip()
        if name and not name.isdigit():
            names[name] = None
    if launches and not names:
        notes.append("the file does not name its GPU")
    return ", ".join(names) or None


def _frame(launches: list[_Launch], times: list[float]) -> Any:
    def whole(text: str) -> float:
        return float(text) if text.strip().isdigit() and len(text.strip()) < 16 else float("nan")

    def grid(launch: _Launch, text: str, prefix: str) -> str | None:
        sizes = [launch.first((f"launch__{prefix}_dim_{axis}",)) for axis in "xyz"]
        if not any(map(math.isnan, sizes)):
            return parse_dims("x".join(str(int(s)) for s in sizes))
        return parse_dims(text.strip())

    def smem(launch: _Launch) -> float:
        parts = [launch.first(STATIC_SMEM), launch.first(DYNAMIC_SMEM)]
        known = [round(p) for p in parts if not math.isnan(p)]
        return float(sum(known)) if known else float("nan")

    return kernel_frame(
        {
            "name": [launch.name for launch in launches],
            "time_us": times,
            "launches": [launch.count for launch in launches],
            "grid": [grid(launch, launch.grid, "grid") for launch in launches],
            "block": [grid(launch, launch.block, "block") for launch in launches],
            "registers": [launch.first(REGISTERS) for launch in launches],
            "smem_bytes": [smem(launch) for launch in launches],
            "device_index": [whole(launch.device) for launch in launches],
            "stream": [whole(launch.stream) for launch in launches],
            "nvtx": [launch.nvtx or None for launch in launches],
        }
    )


def has_ncu_table(text: str) -> bool:
    """Whether any line of the text is a header of this tool; quick, for telling files apart."""
    return any("Kernel Name" in line and is_ncu_header(split_row(line)) for line in text.splitlines())

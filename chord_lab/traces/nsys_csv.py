"""`nsys stats --format csv`: the GPU trace (a row a launch) and the kernel summary (a row a kernel)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from chord_lab.errors import UserError
from chord_lab.traces.numerals import Numerals, base_unit, learn_numerals
from chord_lab.traces.table import Trace, dims, kernel_frame, metric_frame, nvtx_frame, plausible
from chord_lab.traces.text_files import Table, find_tables, split_row

# Column stems by what they mean; spellings of 2020 to 2026, units in brackets stripped
SUMMARY = {
    "total": ("Total Time",),
    "launches": ("Instances", "Count", "Num Calls"),
    "mean": ("Avg", "Average"),
    "name": ("Name", "Kernel Name"),
}
MEMORY_OPERATION = re.compile(r"\[CUDA (memcpy|memset|Unified Memory)", re.IGNORECASE)


def is_nsys_header(fields: list[str]) -> bool:
    """A header of a kernel trace or a kernel summary."""
    return _is_trace(fields) or _is_summary(fields)


def _stems(header: list[str]) -> list[str]:
    """Column names without the unit that newer versions append: ``Duration (ns)`` -> ``Duration``."""
    return [re.sub(r"\s*\([^)]*\)$", "", h).strip() for h in header]


def _is_trace(fields: list[str]) -> bool:
    return {"Duration", "GrdX", "Name"} <= set(_stems(fields))


def _is_summary(fields: list[str]) -> bool:
    stems = set(_stems(fields))
    return {"Total Time", "Name"} <= stems and bool(stems & {"Avg", "Average"})


def read_nsys_csv(path: Path, text: str, notes: list[str]) -> Trace:
    """Kernels of the first GPU trace in ``text``, else of its kernel summary."""
    tables = list(find_tables(text, is_nsys_header))
    traces = [t for t in tables if _is_trace(t.header)]
    if not tables:
        raise UserError(f"{path}: no Nsight Systems kernel table in it (cuda_gpu_trace or cuda_gpu_kern_sum)")
    table = traces[0] if traces else tables[0]
    try:
        numerals = learn_numerals(
            v for row in table.rows for v, h in zip(row, table.header, strict=True) if _is_figure(h)
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if len(tables) > 1:
        notes.append(f"{len(tables)} tables in the file; the {'GPU trace' if traces else 'first one'} is shown")
    if table.chatter:
        notes.append(
            f"lines inside the table that are no rows of it, left out: {table.chatter} (other output, or a cut row)"
        )
    reader = _trace_rows if traces else _summary_rows
    columns, device = reader(_Columns(path, table, numerals), notes)
    if not table.rows:
        notes.append("no kernels: the table has a header and no rows")
    if not numerals.certain:
        notes.append("decimal sign not certain: values such as 223,008 are read in the English way (thousands)")
    notes += ["no NVTX ranges and no hardware counters in this report"]
    return Trace(
        kind="nsys-csv-trace" if traces else "nsys-csv-summary",
        path=path,
        device=device,
        kernels=kernel_frame(columns),
        nvtx=nvtx_frame(),
        metrics=metric_frame([]),
        notes=tuple(notes),
        facts={"tool": "Nsight Systems", "decimal": numerals.decimal},
    )


def _is_figure(header: str) -> bool:
    return not any(word in header for word in ("Name", "Device", "Memkd", "MemKd", "Style"))


class _Columns:
    """A table's columns by stem, in base units."""

    def __init__(self, path: Path, table: Table, numerals: Numerals) -> None:
        self.path, self.table, self.numerals = path, table, numerals
        self.at = {stem: i for i, stem in reversed(list(enumerate(_stems(table.header))))}

    def text(self, *stems: str) -> list[str]:
        """The column of the first of these names, "" when there is none."""
        index = next((self.at[s] for s in stems if s in self.at), None)
        return ["" if index is None else row[index] for row in self.table.rows]

    def number(self, *stems: str, scale: bool = True) -> list[float]:
        """The column in base units (ns, byte), NaN where it is empty."""
        stem = next((s for s in stems if s in self.at), None)
        if stem is None:
            return [float("nan")] * len(self.table.rows)
        header = self.table.header[self.at[stem]]
        unit = re.search(r"\(([^)]*)\)$", header)
        factor = base_unit(unit[1])[1] if unit and scale else 1.0
        values = []
        for text in self.text(stem):
            try:
                value = self.numerals.number(text)
            except ValueError:
                raise UserError(f"{self.path}: column {header!r} holds {text!r}, which is not a number") from None
            values.append(math.nan if value is None or not math.isfinite(value) else value * factor)
        return values


def _trace_rows(columns: _Columns, notes: list[str]) -> tuple[dict[str, Any], str | None]:
    names = columns.text("Name")
    kernel = [
        not MEMORY_OPERATION.match(n) and g.strip() != "" for n, g in zip(names, columns.text("GrdX"), strict=True)
    ]
    skipped = len(names) - sum(kernel)
    if skipped:
        notes.append(f"{skipped} memory copies and sets are left out of the kernel table")
    pick = lambda values: [v for v, keep in zip(values, kernel, strict=True) if keep]  # noqa: E731
    start, time = pick(columns.number("Start")), pick(columns.number("Duration"))
    devices = pick(columns.text("Device"))
    origin = min((s for s in start if not math.isnan(s)), default=0.0)
    static, dynamic = pick(columns.number("StcSMem")), pick(columns.number("DymSMem"))
    sizes = {a: pick(columns.number(a)) for a in ("GrdX", "GrdY", "GrdZ", "BlkX", "BlkY", "BlkZ")}
    if any("(MB)" in h and "SMem" in h for h in columns.table.header):
        notes.append("shared memory is rounded by the report to whole kilobytes")
    named = [re.fullmatch(r"(.*?)\s*\((\d+)\)", d.strip()) for d in devices]
    models = dict.fromkeys(m[1] if m else d.strip() for m, d in zip(named, devices, strict=True))
    return {
        "name": pick(names),
        "start_us": [(s - origin) / 1e3 for s in start],
        "time_us": [plausible(t / 1e3) for t in time],
        "grid": [_shape(xyz) for xyz in zip(sizes["GrdX"], sizes["GrdY"], sizes["GrdZ"], strict=True)],
        "block": [_shape(xyz) for xyz in zip(sizes["BlkX"], sizes["BlkY"], sizes["BlkZ"], strict=True)],
        "registers": pick(columns.number("Reg/Trd")),
        "smem_bytes": [
            round(a + b) if not math.isnan(a + b) else float("nan") for a, b in zip(static, dynamic, strict=True)
        ],
        "device_index": [float(m[2]) if m else float("nan") for m in named],
        "stream": pick(columns.number("Strm")),
        "correlation": pick(columns.number("CorrId")),
    }, ", ".join(m for m in models if m) or None


def _shape(xyz: tuple[float, float, float]) -> str | None:
    return dims(*(int(v) for v in xyz)) if not any(map(math.isnan, xyz)) else None  # type: ignore[call-arg]


def _summary_rows(columns: _Columns, notes: list[str]) -> tuple[dict[str, Any], str | None]:
    notes.append("a summary: each row is the mean of the launches of one kernel; no start times, grids or registers")
    launches = columns.number(*SUMMARY["launches"], scale=False)
    names = columns.text(*SUMMARY["name"])
    kept = [i for i, name in enumerate(names) if not MEMORY_OPERATION.match(name)]
    means = columns.number(*SUMMARY["mean"])
    return {
        "name": [names[i] for i in kept],
        "time_us": [plausible(means[i] / 1e3) for i in kept],
        "launches": [1 if math.isnan(launches[i]) else int(launches[i]) for i in kept],
    }, None


def has_nsys_table(text: str) -> bool:
    """Whether any line of the text is a header of this tool; quick, for telling files apart."""
    return any("Name" in line and is_nsys_header(split_row(line)) for line in text.splitlines())

"""``chord-lab trace``: one kernel table from any profile file."""

from __future__ import annotations

import json
import math
import sys
from contextlib import contextmanager
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord_lab.cli import app, console, notes, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chord_lab.traces import Trace

SHOWN = 20  # rows of a table on a terminal
NAME = 100  # characters of a kernel's name
LABEL_WIDTH, COUNTER_WIDTH = 41, 10  # characters of the counters' table


@app.command("trace")
def trace(
    file: Annotated[Path, typer.Argument(help="Nsight Compute, Nsight Systems or PyTorch profiler file.")],
    against: Annotated[Path | None, typer.Option(help="A second profile: show what changed from FILE to it.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Also write a Chrome trace for ui.perfetto.dev.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Also write the kernel table with all metrics.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Kernels and ranges in --json; 0: all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Read a profile into one kernel table: time, grid, registers, stream, NVTX path, metrics; say what it lacks."""
    from chord_lab.traces import read_trace

    with _progress(file) as told:
        first = read_trace(file, told)
    if chrome is not None:
        from chord_lab.traces.chrome import write_chrome_trace

        count = write_chrome_trace(first, chrome)
        notes.print(f"{chrome}: {count:,} events; open it at https://ui.perfetto.dev", markup=False, highlight=False)
    if parquet is not None:
        from chord_lab.traces.stored import write_stored

        write_stored(first, parquet)
    if against is not None:
        with _progress(against) as told:
            second = read_trace(against, told)
        _compare(first, second, as_json)
    elif as_json:
        _write_json(first, limit)
    else:
        _show(first)


@contextmanager
def _progress(file: Path) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says how much was read, for files that take long; nothing when stderr is no terminal."""
    if not notes.is_terminal:
        yield lambda _: None
        return
    with notes.status(f"reading {file.name}") as status:
        yield lambda text: status.update(f"reading {file.name}: {text}")


def _write_json(found: Trace, limit: int) -> None:
    """Written row by row: a file may have ten million kernels."""
    from chord_lab.cli.jsonable import jsonable
    from chord_lab.traces.rows import kernel_rows, range_rows

    out = sys.stdout
    head: dict[str, Any] = {"kind": found.kind, "file": str(found.path), "device": found.device, "facts": found.facts}
    head |= {"num_kernels": len(found.kernels), "num_ranges": len(found.nvtx), "notes": list(found.notes)}
    out.write(json.dumps(jsonable(head), indent=2, allow_nan=False)[:-2])
    for key, rows in (("kernels", kernel_rows(found, limit)), ("nvtx", range_rows(found, limit))):
        out.write(f',\n  "{key}": [')
        separator = "\n    "
        for row in rows:
            out.write(separator + json.dumps(jsonable(row), allow_nan=False))
            separator = ",\n    "
        out.write("]" if separator == "\n    " else "\n  ]")
    out.write("\n}\n")


def _show(found: Trace) -> None:
    from rich.table import Table

    from chord_lab.traces.compare import kernel_totals

    facts = ", ".join(f"{k} {v}" for k, v in found.facts.items() if isinstance(v, (str, int)) and v != "")
    console.print(f"{found.path.name}: {found.kind} ({facts})", markup=False, highlight=False)
    console.print(f"device: {found.device or 'not named'}", markup=False, highlight=False)
    totals = kernel_totals(found)
    if totals:
        _kernel_table(found, totals)
    if found.metrics is not None and len(found.metrics):
        _counter_table(found)
    if len(found.nvtx):
        longest = found.nvtx.sort_values("time_us", ascending=False).head(SHOWN)
        table = Table(title=f"{len(found.nvtx):,} ranges, the longest {len(longest)}")
        for column in ("range", "start us", "time us", "depth"):
            table.add_column(column, justify="left" if column == "range" else "right", overflow="fold")
        columns = [longest[c].tolist() for c in ("name", "start_us", "time_us", "depth")]
        for name, start, time, depth in zip(*columns, strict=True):
            table.add_row(str(name), f"{start:.1f}", f"{time:.1f}", str(depth))
        console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _kernel_table(found: Trace, totals: list[Any]) -> None:
    from rich.table import Table

    from chord_lab.traces.table import shorten

    count = int(found.kernels["launches"].sum())
    table = Table(title=f"{count:,} launches of {len(totals):,} kernels, by time")
    for column in ("kernel", "launches", "total us", "median us", "share"):
        table.add_column(column, justify="left" if column == "kernel" else "right", overflow="fold")
    for total in totals[:SHOWN]:
        figures = (f"{total.launches:,}", f"{total.total_us:,.1f}", f"{total.median_us:,.3f}", f"{total.share:.1%}")
        table.add_row(shorten(total.name, NAME), *figures)
    console.print(table)
    if len(totals) > SHOWN:
        console.print(f"and {len(totals) - SHOWN:,} more kernels", highlight=False)


def _counter_table(found: Trace) -> None:
    """Counters of as many launches as fit, each under a letter that the lines below spell out."""
    from chord_lab.cli.verdict_tables import compact_table
    from chord_lab.traces.counters import COUNTERS, counter_frame
    from chord_lab.traces.table import shorten

    shown = min(len(found.kernels), max(1, (console.width - LABEL_WIDTH) // COUNTER_WIDTH), len(ascii_lowercase))
    frame, kernels = counter_frame(found).head(shown), found.kernels.head(shown)
    table = compact_table()
    table.add_column("counter", no_wrap=True)
    for letter in ascii_lowercase[:shown]:
        table.add_column(letter, justify="right", no_wrap=True)
    for item in COUNTERS:
        if frame[item.name].notna().any():
            unit = ", % busy" if item.name.startswith("pipe_") else ""
            table.add_row(item.label + unit, *("-" if math.isnan(v) else f"{v:,.4g}" for v in frame[item.name]))
    console.print(table)
    columns = (kernels["name"].astype(str), kernels["time_us"], kernels["nvtx"])
    for letter, name, time, path in zip(ascii_lowercase, *columns, strict=False):
        parts = path.split(" > ") if isinstance(path, str) and path else []
        about = [part for part in parts if not part.startswith("record ")][-2:]
        text = f"  {letter}  {shorten(name, 60)}, {time:.1f} us" + (f": {', '.join(about)}" if about else "")
        console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
    if len(found.kernels) > shown:
        rest = f"counters of the first {shown} of {len(found.kernels):,} kernels; a wider terminal or --json has more"
        console.print(rest, highlight=False, soft_wrap=True)


def _compare(first: Trace, second: Trace, as_json: bool) -> None:
    from rich.table import Table

    from chord_lab.traces.compare import counter_changes, kernel_changes
    from chord_lab.traces.table import shorten

    kernels = kernel_changes(first, second)
    counted = len(first.metrics) > 0 and len(second.metrics) > 0
    counters = counter_changes(first, second) if counted else []
    if as_json:
        print_json({"before": first.path, "after": second.path, "kernels": kernels, "counters": counters})
        return
    table = Table(title=f"{first.path.name} -> {second.path.name}, kernels by change of total time")
    for column in ("kernel", "before us", "after us", "change us"):
        table.add_column(column, justify="left" if column == "kernel" else "right", overflow="fold")
    for change in kernels[:SHOWN]:
        sides = [f"{side.total_us:,.1f}" if side else "-" for side in (change.before, change.after)]
        table.add_row(shorten(change.name, NAME), *sides, f"{change.delta_us:+,.1f}")
    console.print(table)
    if counters:
        table = Table(title="counters of the first kernel of each")
        for column in ("counter", "before", "after", "change"):
            table.add_column(column, justify="left" if column == "counter" else "right")
        for item in counters:
            table.add_row(item.label, f"{item.before:,.4g}", f"{item.after:,.4g}", f"{item.after - item.before:+,.4g}")
        console.print(table)

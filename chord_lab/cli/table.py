"""``chord-lab table show|check|lookup FILE``: tuning tables, ours and those of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord_lab.cli import app, console, print_json
from chord_lab.cli.table_rows import basis, covers, facts, print_rows
from chord_lab.errors import UserError

if TYPE_CHECKING:
    from w4a16_moe.tables import ProblemTable, TuningFile

    from chord_lab.export.tables.foreign import Foreign

tables = typer.Typer(name="table", help="Look into tuning tables, ours and those of other tools.", no_args_is_help=True)
app.add_typer(tables)

File = Annotated[Path, typer.Argument(help="A table: ours, vLLM's, SGLang's, Humming's rows, Kernel Tuner's, ...")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]
Largest = Annotated[int, typer.Option("--to", min=1, max=10_000_000, help="Largest number of rows to try one by one.")]
MOST_ROWS = 40


def is_ours(path: Path) -> bool:
    """Whether the file says that it is of the kernel package's format."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and str(value.get("format", "")).startswith("w4a16-moe-tuning")


@tables.command("show")
def show(file: File, as_json: Json = False) -> None:
    """What a table holds, and what is odd about it."""
    if is_ours(file):
        _show_ours(file, as_json)
    else:
        _show_foreign(file, as_json)


@tables.command("check")
def check(
    file: File,
    largest: Largest = 20000,
    as_json: Json = False,
) -> None:
    """Prove that rows have neither gap nor overlap and agree with the resolver for every m."""
    if not is_ours(file):
        _check_foreign(file, as_json)
        return
    from chord_lab.export.tables.kernels import check as prove

    result = prove(file, largest=largest)
    if as_json:
        print_json(result._asdict() | {"ok": True})
        return
    console.print(
        f"ok: {result.tables} tables, {result.rows} rows of {result.device} / {result.profile}: no gap, no overlap, "
        f"and the resolver gives the same row for every m from {result.checked_m[0]} to {result.checked_m[1]}",
        highlight=False,
        soft_wrap=True,
    )
    for row in result.unsupported:
        console.print(f"no measured point supports {row}", style="yellow", highlight=False)
    for line in result.warnings:
        console.print(line, style="yellow", highlight=False)


@tables.command("lookup")
def lookup(
    file: File,
    m: Annotated[int, typer.Option("--m", help="Routed rows on this GPU (other tools' tables: tokens).")],
    scenario: Annotated[str, typer.Option(help="Whose problem to look up, where the file has several.")] = "",
    projection: Annotated[str, typer.Option(help="gate_up or down.")] = "",
    shape: Annotated[str, typer.Option(help="Search a folder of vLLM or SGLang tables: E,N as in 48,2048.")] = "",
    device_name: Annotated[str, typer.Option(help="With --shape: the device as its driver reports it.")] = "",
    as_json: Json = False,
) -> None:
    """Which row serves M, and by which rule. Several problems in the file: all are shown, the first one leads."""
    if m < 0:
        raise UserError(f"--m must be at least 0, not {m}")
    if file.is_dir():
        found = _lookup_folder(file, m, shape, device_name)
    else:
        found = _lookup_ours(file, m, scenario, projection) if is_ours(file) else _lookup_foreign(file, m)
    if as_json:
        print_json(found[0] | ({"tables": found} if len(found) > 1 else {}))
        return
    for entry in found:
        if "problem" in entry:
            p = entry["problem"]
            console.print(
                f"[bold]{entry['projection']}[/bold] E={p['num_experts']} N={p['N']} K={p['K']}", highlight=False
            )
        lines = {
            "schedule": entry["label"],
            "rule": entry["rule"],
            "row": _row_text(entry["row"]),
            "warning": entry["warning"],
        }
        for name, text in lines.items():
            if text:
                style = "yellow" if name == "warning" else ""
                console.print(f"  {name:<9} {text}", style=style, highlight=False, markup=False, soft_wrap=True)


def _row_text(row: Any) -> str:
    if row is None:
        return "none"
    if isinstance(row, dict) and "min_m" in row:
        about = basis(row.get("measured_m") or [], row.get("note", ""))
        return f"{covers(row['min_m'], row['max_m'])}; {row.get('verdict', '')}; {about}"
    return str(row)


def projection_of(file: TuningFile, table: ProblemTable) -> str:
    """gate_up reads each row of x for several experts; down reads each once. A lone table of top_k 1 stays unnamed."""
    if table.problem.top_k > 1:
        return "gate_up"
    mates = [t for t in file.tables if t.problem.num_experts == table.problem.num_experts and t.problem.top_k > 1]
    return "down" if mates else ""


def _lookup_ours(path: Path, m: int, scenario: str, projection: str) -> list[dict[str, Any]]:
    from w4a16_moe.resolve import resolve_schedule

    from chord_lab.export.tables.kernels import load_table
    from chord_lab.scenarios import PROJECTIONS, get_scenario

    if projection and projection not in PROJECTIONS:
        raise UserError(f"--projection {projection!r} is unknown; legal: {', '.join(PROJECTIONS)}")
    file = load_table(path)
    wanted = list(get_scenario(scenario).problems.values()) if scenario else None
    found = []
    for table in file.tables:
        name = projection_of(file, table)
        if (projection and name not in ("", projection)) or (wanted is not None and table.problem not in wanted):
            continue
        resolved = resolve_schedule(table.problem, m, file.profile, file.device, tables=path)
        found.append(
            {
                "schedule": resolved.schedule.to_dict() if resolved.schedule else None,
                "label": resolved.schedule.label() if resolved.schedule else "none",
                "rule": resolved.rule,
                "row": resolved.row.to_dict() if resolved.row else None,
                "warning": resolved.warning,
                "m": m,
                "projection": name,
                "problem": table.problem.to_dict(),
                "device": file.device,
                "profile": file.profile.name,
            }
        )
    if not found:
        have = "; ".join(
            f"{projection_of(file, t) or 'problem'} E={t.problem.num_experts} N={t.problem.N} K={t.problem.K}"
            for t in file.tables
        )
        raise UserError(
            f"{path} has no table for {scenario or 'that'} {projection}".rstrip() + f"; it has: {have or 'none'}"
        )
    return found


def _lookup_foreign(path: Path, m: int) -> list[dict[str, Any]]:
    from chord_lab.export.tables.foreign import lookup_nearest, read_foreign

    table = read_foreign(path)
    found = lookup_nearest(table, m)
    return [
        {
            "schedule": found.row.values,
            "label": ", ".join(f"{k}={v}" for k, v in found.row.values.items()),
            "rule": found.rule,
            "row": {"key": found.row.key},
            "warning": found.warning,
            "m": m,
            "target": table.target,
        }
    ]


def _lookup_folder(folder: Path, m: int, shape: str, device_name: str) -> list[dict[str, Any]]:
    """A shape's table in a folder of another tool's tables; none there means the tool's default, and is no error."""
    from chord_lab.export.tables.foreign import find_table
    from chord_lab.export.tables.names import whole

    parts = [whole(part.strip()) for part in shape.split(",")]
    if len(parts) != 2 or parts[0] is None or parts[1] is None or not device_name:
        raise UserError(f"{folder} is a folder: say which table with --shape E,N and --device-name")
    found = find_table(folder, E=parts[0], N=parts[1], device_name=device_name)
    if found.path is not None:
        return [entry | {"table": found.path} for entry in _lookup_foreign(found.path, m)]
    tried = ", ".join(map(str, found.tried))
    return [
        {
            "schedule": None,
            "label": "the tool's own default",
            "rule": "default",
            "row": None,
            "warning": f"no table for E={parts[0]} N={parts[1]} on {device_name}: using default; tried {tried}",
            "m": m,
            "tried": found.tried,
        }
    ]


def _show_ours(path: Path, as_json: bool) -> None:
    from chord_lab.export.tables.kernels import load_table

    file = load_table(path)
    if as_json:
        print_json({"kind": "kernels", **file.to_dict()})
        return
    console.print(f"{file.device} / {file.profile.name}: {file.profile.summary}", highlight=False, soft_wrap=True)
    for name, value in file.provenance.items():
        console.print(f"  {name}: {facts(value)}", style="dim", highlight=False, markup=False, soft_wrap=True)
    for table in file.tables:
        p = table.problem
        title = f"{projection_of(file, table)} E={p.num_experts} N={p.N} K={p.K} top_k={p.top_k}: routed rows"
        print_rows(title.lstrip(), (row.to_dict() | {"schedule": row.schedule.label()} for row in table.rows))


def _show_foreign(path: Path, as_json: bool) -> None:
    from rich.table import Table

    from chord_lab.export.tables.foreign import read_foreign

    found = read_foreign(path)
    if as_json:
        print_json(found)
        return
    console.print(
        f"{found.kind}" + (f": acts on {found.target}" if found.target else ""), highlight=False, markup=False
    )
    if found.name:
        said = {k: v for k, v in vars(found.name).items() if v not in (None, "", (), {}, False)}
        console.print("  " + ", ".join(f"{k}={v}" for k, v in said.items()), highlight=False, markup=False)
    for remark in found.remarks:
        console.print(f"  {remark}", style="yellow", highlight=False, markup=False)
    if not found.rows:
        return
    columns = list(dict.fromkeys(k for row in found.rows[:MOST_ROWS] for k in row.values))[:8]
    table = Table(box=None)
    for column in ("key", *columns):
        table.add_column(column, overflow="ellipsis", max_width=24)
    for row in found.rows[:MOST_ROWS]:
        table.add_row(str(row.key), *(str(row.values.get(column, "")) for column in columns))
    console.print(table)
    if len(found.rows) > MOST_ROWS:
        console.print(f"... {len(found.rows) - MOST_ROWS} more rows (--json has all)", style="dim")


def _check_foreign(path: Path, as_json: bool) -> None:
    found = _odd(path)
    if as_json:
        print_json({"ok": not found.remarks, "kind": found.kind, "remarks": found.remarks, "rows": len(found.rows)})
    else:
        console.print(f"{found.kind}, {len(found.rows)} rows", highlight=False)
        for remark in found.remarks:
            console.print(f"  {remark}", style="yellow", highlight=False, markup=False)


def _odd(path: Path) -> Foreign:
    from chord_lab.export.tables.foreign import read_foreign

    found = read_foreign(path)
    if found.kind == "unknown":
        raise UserError(f"{path}: {found.remarks[0]}")
    return found

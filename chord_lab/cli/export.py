"""``chord-lab export DIR --to ...``: tuning tables from a run, told what they rest on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord_lab.cli import app, console, notes, print_json
from chord_lab.cli.reading import cut_short, read_run, say
from chord_lab.cli.table_rows import print_rows
from chord_lab.errors import UserError

if TYPE_CHECKING:
    from w4a16_moe.tables import TuningFile

    from chord_lab.export.tables.collect import Collected
    from chord_lab.export.tables.kernels import KernelTables

FORMATS = ("kernels", "vllm", "sglang", "humming", "t4")


@app.command("export")
def export(
    directory: Annotated[Path, typer.Argument(help="A run's directory, or a records file.")],
    to: Annotated[str, typer.Option(help="kernels, vllm, sglang, humming or t4.")] = "kernels",
    out: Annotated[Path | None, typer.Option(help="Where to write; DIRECTORY/tables when not given.")] = None,
    into_package: Annotated[
        bool, typer.Option("--into-package", help="Write into the kernel package, where the resolver finds it.")
    ] = False,
    draw: Annotated[str | None, typer.Option(help="The routing draw that the table is for.")] = None,
    scenario: Annotated[str | None, typer.Option(help="Only this scenario's points.")] = None,
    profile: Annotated[str | None, typer.Option(help="Only this profile.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Join rows where one schedule stays within the noise of each winner.")
    ] = False,
    pin_default: Annotated[
        bool, typer.Option("--pin-default", help="vllm, sglang: add an untuned entry for 1 token.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write tuning tables. Ties keep the default; missing points and unsupported rows are named first."""
    from chord_lab.export.tables.collect import collect

    if to not in FORMATS:
        raise UserError(f"--to {to!r} is unknown; legal: {', '.join(FORMATS)}")
    if into_package and to != "kernels":
        raise UserError(f"--into-package writes the kernel package's tables; it does not go with --to {to}")
    table = read_run(directory)
    folder = out or (directory if directory.is_dir() else directory.parent) / "tables"
    collected = collect(table, draw=draw, profile=profile, scenario=scenario)
    partial = ["the run was cut short: this export is partial"] if cut_short(directory) else []
    say([*partial, *collected.remarks])
    if to == "kernels":
        result = export_kernels(collected, folder, into_package=into_package, merge=merge)
    elif to in ("vllm", "sglang"):
        result = _export_triton(collected, folder, to, pin_default=pin_default)
    else:
        result = _export_rows(collected, folder, to, merge=merge)
    result["missing"] = collected.missing
    if as_json:
        print_json(result)
    else:
        _print(result)


def export_kernels(collected: Collected, folder: Path, *, into_package: bool, merge: bool) -> dict[str, Any]:
    """Write one file per device and profile, prove each against the resolver, and say what changed."""
    from w4a16_moe.resolve import BUNDLED

    from chord_lab.export.tables.kernels import build, differences, legal_points, load_table, package_path, write

    files = []
    for recorded in collected.tables:
        tables, remarks = legal_points(recorded)
        say(remarks)
        path = package_path(tables.device, tables.profile, BUNDLED if into_package else folder)
        if into_package and "predicted" in tables.provenance["records"]["source"]:
            raise UserError("predicted times do not go into the package: measure, or export to a folder")
        existing = load_table(path) if path.is_file() else None
        file = build(tables, merge=merge, existing=existing)
        changed = differences(existing, file)
        proved = write(file, path, tables.points)
        files.append(
            _kernel_summary(file, tables, path) | {"new": existing is None, "changed": changed, "proved": proved}
        )
    return {"to": "kernels", "target": "kernels of w4a16_moe", "files": files}


def _kernel_summary(file: TuningFile, tables: KernelTables, path: Path) -> dict[str, Any]:
    mine = {p.problem: p.projection for p in tables.points}
    rows = [
        {
            "projection": mine[table.problem],
            "num_experts": table.problem.num_experts,
            "min_m": row.min_m,
            "max_m": row.max_m,
            "schedule": row.schedule.label(),
            "verdict": row.verdict,
            "measured_m": row.measured_m,
            "note": row.note,
        }
        for table in file.tables
        if table.problem in mine
        for row in table.rows
    ]
    return {"path": path, "device": tables.device, "profile": tables.profile, "rows": rows}


def _export_triton(collected: Collected, folder: Path, to: str, *, pin_default: bool) -> dict[str, Any]:
    from chord_lab.export.tables import triton_moe

    tables = triton_moe.build_triton_tables(collected.frame)
    files = []
    for table in tables:
        if pin_default:
            problem = next(p.problem for t in collected.tables for p in t.points if p.problem.num_experts == table.E)
            table = triton_moe.pinned(table, problem, problem.top_k)  # noqa: PLW2901 (the pinned one is what is written)
        path = (triton_moe.write_vllm if to == "vllm" else triton_moe.write_sglang)(table, folder / to)
        rows = [
            {
                "tokens": tokens,
                "schedule": schedule.label(),
                "layer_us": table.layer_us.get(tokens),
                "default_us": table.default_us.get(tokens),
            }
            for tokens, schedule in table.entries.items()
        ]
        warning = triton_moe.small_batch_warning(list(table.entries))
        slow = [f"{t} tokens: not faster than the untuned schedule of our kernel" for t in table.not_faster()]
        files.append(
            {
                "path": path,
                "rows": rows,
                "left_out": table.left_out,
                "warnings": [*slow, *([warning] if warning else [])],
            }
        )
    return {"to": to, "target": triton_moe.TARGETS[to], "files": files}


def _export_rows(collected: Collected, folder: Path, to: str, *, merge: bool) -> dict[str, Any]:
    from chord_lab.export.tables.kernels import build, legal_points
    from chord_lab.export.tables.rows import write_humming, write_t4

    if to == "t4":
        paths = write_t4(collected.frame, folder / "t4")
        return {"to": to, "target": "any reader of T4 results", "files": [{"path": p, "rows": []} for p in paths]}
    paths = [
        path
        for tables in collected.tables
        for path in write_humming(build(legal_points(tables)[0], merge=merge), tables, folder / "humming")
    ]
    target = "kernels of w4a16_moe, in Humming's row form"
    return {"to": to, "target": target, "files": [{"path": p, "rows": []} for p in paths]}


def _print(result: dict[str, Any]) -> None:
    for missing in result["missing"]:
        notes.print(
            f"missing: {missing.projection} at {missing.routed_m} rows: {missing.reason}",
            style="yellow",
            highlight=False,
        )
    console.print(f"target: {result['target']} (a table acts only on the backend it was tuned for)", highlight=False)
    for file in result["files"]:
        _print_rows(file)
        for line in (*file.get("left_out", ()), *file.get("warnings", ())):
            console.print(f"  {line}", style="yellow", highlight=False)
        if "proved" in file:
            agrees = f"  resolver agrees at {file['proved']} points; {_change(file)}"
            console.print(agrees, highlight=False, soft_wrap=True)
        console.print(f"wrote {file['path']}", highlight=False, soft_wrap=True)


def _change(file: dict[str, Any]) -> str:
    if file["new"]:
        return "there was no file before"
    return f"{len(file['changed'])} ranges differ from the file before" if file["changed"] else "as the file before"


def _print_rows(file: dict[str, Any]) -> None:
    from rich.table import Table

    if not file["rows"]:
        return
    if "profile" in file:
        console.print(f"{file['device']} / {file['profile']}", style="bold", highlight=False)
        for place in dict.fromkeys((row["projection"], row["num_experts"]) for row in file["rows"]):
            mine = [row for row in file["rows"] if (row["projection"], row["num_experts"]) == place]
            print_rows(f"{place[0]}, {place[1]} experts: routed rows", mine)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("tokens", "schedule", "gate_up + down, us", "untuned, us"):
        table.add_column(column, justify="right" if column != "schedule" else "left")
    for row in file["rows"]:
        time = "not measured" if row["layer_us"] is None else f"{row['layer_us']:.1f}"
        untuned = "-" if row["default_us"] is None else f"{row['default_us']:.1f}"
        table.add_row(str(row["tokens"]), row["schedule"], time, untuned)
    console.print(table)

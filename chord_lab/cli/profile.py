"""``chord-lab profile``: from a point and its schedules to counters, joined with event times of the same run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord_lab.cli import app, console, print_json
from chord_lab.cli.profiling import chosen_collector, chosen_jobs, run_profile

if TYPE_CHECKING:
    from chord_lab.cli.profiling import Profiled

Schedules = Annotated[
    list[str] | None, typer.Option(help="default, a label, or changes such as block_m=64; repeatable.")
]
Tokens = Annotated[int | None, typer.Option(help="Token count as the scenario counts; its largest when not given.")]
ProfileName = Annotated[
    str | None, typer.Option("--profile", help="Weight profile; the scenario's own when not given.")
]
Metrics = Annotated[str, typer.Option(help="lab (what the notebooks use), time, full, or ncu metrics by name.")]


@app.command("profile")
def profile(
    scenario: Annotated[str, typer.Argument(help="For example kimi-k2/ep8/decode; `chord-lab scenarios` lists them.")],
    schedule: Schedules = None,
    projection: Annotated[str, typer.Option(help="gate_up or down.")] = "gate_up",
    tokens: Tokens = None,
    draw: Annotated[str | None, typer.Option(help="Routing: uniform, balanced, zipf:S, file:PATH.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the routing draw.")] = 0,
    profile_name: ProfileName = None,
    collector: Annotated[str, typer.Option(help="ncu, nsight-python, cupti, events; auto takes counters.")] = "auto",
    metrics: Metrics = "lab",
    out: Annotated[Path, typer.Option(help="Folder for the report, the table and the records.")] = Path("runs/profile"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Record hardware counters and event times of one point under one or more schedules, on this machine's GPU."""
    jobs = chosen_jobs(
        scenario,
        schedule or ["default"],
        projection=projection,
        tokens=tokens,
        draw=draw,
        seed=seed,
        profile=profile_name,
    )
    done = run_profile(jobs, out, collector=chosen_collector(collector), metrics=metrics)
    if as_json:
        print_json({"name": done.name, "files": done.files, "points": point_rows(done)})
        return
    _show(done)


def point_rows(done: Profiled) -> list[dict[str, Any]]:
    """A row a schedule: event time, profiler's time, their ratio, the counters that decide."""
    from chord_lab.records import median_us
    from chord_lab.traces.join import points_frame

    frame = points_frame([done.trace]) if done.trace is not None else None
    profiled = {} if frame is None or not len(frame) else {row["key"]: row for row in frame.to_dict("records")}
    rows = []
    for record in done.records:
        if record.kind != "candidate":
            continue
        row = profiled.get(record.key(), {})
        time_us, profiled_us = median_us(record), row.get("profiled_us", math.nan)
        rows.append(
            {
                "key": record.key(),
                "scenario": record.scenario,
                "projection": record.projection,
                "routed_m": record.routed_m,
                "schedule": record.schedule.label() if record.schedule else "",
                "status": record.status,
                "time_us": time_us,
                "profiled_us": profiled_us,
                "profiled_over_time": profiled_us / time_us if time_us else math.nan,
            }
            | {name: row.get(name, math.nan) for name in ("dram_pct", "pipe_tensor_pct", "issue_pct", "stall_wait")}
        )
    return rows


FIGURES = {
    "time_us": "events us",
    "profiled_us": "profiler us",
    "profiled_over_time": "ratio",
    "dram_pct": "DRAM %",
    "pipe_tensor_pct": "tensor pipe %",
    "issue_pct": "issue %",
    "stall_wait": "stall wait",
}


def _show(done: Profiled) -> None:
    from rich.table import Table

    rows = point_rows(done)
    where = f"{rows[0]['scenario']} {rows[0]['projection']} {rows[0]['routed_m']} rows" if rows else done.name
    table = Table(title=where)
    for head in ("schedule", *FIGURES.values()):
        table.add_column(head, justify="left" if head == "schedule" else "right", overflow="fold")
    for row in rows:
        name = row["schedule"] if row["status"] == "ok" else f"{row['schedule']} ({row['status']})"
        table.add_row(name, *(_figure(row[figure]) for figure in FIGURES))
    console.print(table)
    for file in done.files:
        console.print(str(file), markup=False, highlight=False, soft_wrap=True)


def _figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"

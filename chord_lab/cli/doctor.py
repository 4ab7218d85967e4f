"""``chord-lab doctor``: what this machine can do, and why not."""

from __future__ import annotations

from typing import Annotated

import typer

from chord_lab.cli import app, console, print_json


@app.command("doctor")
def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False) -> None:
    """GPU, driver, CUDA, torch, triton, profilers, peers: what is available and why not."""
    from rich.table import Table

    from chord_lab import __version__
    from chord_lab.capabilities import diagnose

    report = diagnose()
    if as_json:
        print_json({"chord_lab": __version__, **report._asdict()})
        return
    table = Table(title=f"chord-lab {__version__}")
    for column in ("", "found", "remark"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        mark = "[green]yes[/green]" if check.ok else "[yellow]no[/yellow]"
        table.add_row(f"{check.name} {mark}", check.found, check.remark)
    console.print(table)
    for capability in report.capabilities:
        if capability.available:
            console.print(f"[green]can[/green]     {capability.name}", highlight=False)
        else:
            console.print(f"[yellow]cannot[/yellow]  {capability.name}: {capability.why_not}", highlight=False)

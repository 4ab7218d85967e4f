"""``chord-lab report DIR -o FILE``: one offline HTML file of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chord_lab.cli import app, console, print_json
from chord_lab.cli.reading import cut_short, read_run, say
from chord_lab.errors import UserError


@app.command("report")
def report(
    directory: Annotated[Path, typer.Argument(help="A run's directory, or a records file.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="HTML file (DIRECTORY/report.html).")] = None,
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write a report that opens with no network: winners with margins, figures, peers, failures, environment."""
    table = read_run(directory)
    try:
        from chord_lab.export.report import write_report
    except ModuleNotFoundError as error:
        if str(error.name).startswith("chord_lab"):
            raise
        needs = "a report needs the extra: pip install 'chord-lab[lab]'"
        raise UserError(f"{error.name} is not installed; {needs}") from None
    remarks = ("the run was cut short: this report is partial",) if cut_short(directory) else ()
    folder = directory if directory.is_dir() else directory.parent
    written = write_report(table, output or folder / "report.html", title=title, remarks=remarks)
    if as_json:
        print_json(written)
        return
    say(written.remarks)
    console.print(f"{written.num_points} points, {written.num_figures} figures", highlight=False)
    console.print(f"wrote {written.path}", highlight=False, soft_wrap=True)

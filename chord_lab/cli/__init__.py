"""The command line. One module per group of commands; each registers itself on `app`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import typer
from rich.console import Console

from chord_lab import __version__
from chord_lab.errors import UserError

app = typer.Typer(
    name="chord-lab",
    help="Which W4A16 MoE schedule wins at these shapes, this routing and this GPU, and why?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()  # results
notes = Console(stderr=True)  # progress and remarks: never mixed into --json

# Modules that register commands; heavy imports stay inside their functions, so that --help is quick.
COMMAND_MODULES: tuple[str, ...] = (
    "lab",
    "doctor",
    "routing",
    "scenarios",
    "trace",
    "profile",
    "sweep",
    "tune",
    "winners",
    "record",
    "export",
    "table",
    "report",
    "predict",
)


def print_json(value: Any) -> None:
    """The machine form of a reading command: one JSON document on stdout, NaN and inf as null."""
    from chord_lab.cli.jsonable import jsonable

    sys.stdout.write(json.dumps(jsonable(value), indent=2, allow_nan=False) + "\n")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit


def run() -> None:
    """Entry point: a UserError is one line on stderr and exit code 2."""
    for name in COMMAND_MODULES:
        importlib.import_module(f"chord_lab.cli.{name}")
    try:
        app()
    except UserError as error:
        notes.print(f"chord-lab: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
    except BrokenPipeError:  # `chord-lab ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None

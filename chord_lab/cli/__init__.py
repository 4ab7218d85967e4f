"""The command line. One module per group of commands; each registers itself on `app`."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from typing import Any

import typer
from rich.console import Console

from chord_lab import __version__
from chord_lab.errors import UserError

# Typer brings click along under names of its own: the class of its usage errors is a base of the one it shows.
_UsageError: Any = typer.BadParameter.__mro__[1]

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
    """Entry point: bad input, a full disk or an unwritable place is one line on stderr and exit code 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: `chord-lab ... >&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (lives as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character shows another
            stream.reconfigure(errors="replace")
    for name in COMMAND_MODULES:
        importlib.import_module(f"chord_lab.cli.{name}")
    try:
        code = app(prog_name="chord-lab", standalone_mode=False)
    except BrokenPipeError:  # `chord-lab ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (UserError, _UsageError, typer.Abort, OSError, MemoryError) as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help was printed while it was made
            raise SystemExit(2) from None
        notes.print(f"chord-lab: {_one_line(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _one_line(error: Any) -> str:
    """What went wrong, in words."""
    if isinstance(error, _UsageError):
        command = error.ctx.command_path if error.ctx else "chord-lab"
        return f"{' '.join(error.format_message().split())} (see `{command} --help`)"
    if isinstance(error, OSError) and error.strerror:
        where = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{where}: {error.strerror}" if where else error.strerror
    if isinstance(error, typer.Abort):
        return "a file or the input ended early"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    return str(error)

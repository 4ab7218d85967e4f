"""Rows of tuning tables in a terminal: one line for what runs where, one for what it rests on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chord_lab.cli import console


def covers(min_m: int, max_m: int | None) -> str:
    """``161 to 320`` or ``from 321``: the routed rows that a table row serves."""
    first = min_m + 1
    return f"from {first}" if max_m is None else f"{first}" if first == max_m else f"{first} to {max_m}"


def basis(measured_m: Iterable[int], note: str) -> str:
    """What a row rests on."""
    measured = ", ".join(map(str, measured_m))
    parts = [f"measured at {measured}" if measured else "no measured point supports it", note]
    return "; ".join(part for part in parts if part)


def print_rows(title: str, rows: Iterable[dict[str, Any]]) -> None:
    """rows: min_m, max_m, schedule (its label), verdict, measured_m, note."""
    console.print(title, style="bold cyan", markup=False, highlight=False)
    for row in rows:
        where = covers(row["min_m"], row["max_m"])
        style = "bold green" if row["verdict"] == "win" else ""
        console.print(
            f"  {where:<15} {row['verdict']:<7} {row['schedule']}", style=style, markup=False, highlight=False,
            soft_wrap=True,
        )  # fmt: skip
        about = basis(row["measured_m"], row["note"])
        console.print(f"    {about}", style="dim", markup=False, highlight=False, soft_wrap=True)


def facts(value: Any) -> str:
    """A header's value in plain words: ``torch 2.11.0, triton 3.6.0``; lists joined."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {facts(inner)}" for name, inner in value.items())
    return " and ".join(map(facts, value)) if isinstance(value, (list, tuple)) else str(value)

"""``chord-lab winners``: who beats the default by more than the noise."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chord_lab.cli import app, console, notes, print_json
from chord_lab.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from w4a16_moe.schedule import Schedule

    from chord_lab.sweeps.winners import Winner


@app.command("winners")
def winners(
    directory: Annotated[pathlib.Path, typer.Argument(help="Directory of a run, or a records file.")],
    margin: Annotated[float, typer.Option(help="Least gain over the default that counts as a win.")] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Default against winner at every point: margin, interval, verdict, failures, Humming beside it."""
    found = read_winners(directory, margin)
    if as_json:
        print_json([as_dict(w) for w in found])
        return
    print_winners(found)


def read_winners(directory: pathlib.Path, margin: float = 0.01) -> list[Winner]:
    """Winners of everything recorded under a directory; what could not be read is named."""
    from chord_lab.records.parquet import read_tables
    from chord_lab.sweeps.winners import winners as compute

    if not 0 <= margin < 1:
        raise UserError(f"--margin must be from 0 to below 1, not {margin:g}")
    table, skipped = read_tables(directory)
    for text in skipped:
        notes.print(text, markup=False, highlight=False, soft_wrap=True)
    if not len(table):
        raise UserError(f"{directory} holds no records; `chord-lab sweep ... --out {directory}` makes some")
    return compute(table, margin)


def as_dict(winner: Winner) -> dict[str, Any]:
    """The machine form of one verdict."""
    return {
        "scenario": winner.scenario,
        "projection": winner.projection,
        "profile": winner.profile,
        "num_tokens": winner.num_tokens,
        "routed_m": winner.routed_m,
        "draw": winner.draw,
        "schedule": winner.schedule.to_dict() if winner.schedule else None,
        "time_us": winner.time_us,
        "default_schedule": winner.default_schedule.to_dict() if winner.default_schedule else None,
        "default_time_us": winner.default_time_us,
        "verdict": winner.verdict,
        "margin": winner.margin,
        "ratio_interval": None if winner.ratio_low is None else [winner.ratio_low, winner.ratio_high],
        "num_rounds": winner.num_rounds,
        "candidates": winner.candidates,
        "failed": winner.failed,
        "failures": winner.failures,
        "humming_us": winner.humming_us,
        "humming_best_us": winner.humming_best_us,
        "baseline_us": winner.baseline_us,
        "flags": list(winner.flags),
        "source": winner.source,
        "device": winner.device,
        "date": winner.date,
    }


def print_winners(found: list[Winner]) -> None:
    """A table for each scenario, profile and projection."""
    groups: dict[tuple[str, str, str], list[Winner]] = {}
    for winner in found:
        groups.setdefault((winner.scenario, winner.profile, winner.projection), []).append(winner)
    for (scenario, profile, projection), rows in groups.items():
        newest = max(rows, key=lambda w: w.date)
        console.print(
            f"\n{scenario} {projection}, profile {profile}: {newest.source} on {newest.device}, {newest.date[:10]}",
            highlight=False,
            style="bold",
        )
        console.print(winners_table(rows))
    for winner in found:
        for flag in winner.flags:
            place = f"{winner.projection} {winner.routed_m} rows {winner.draw}"
            console.print(f"{place}: {flag}", markup=False, highlight=False, soft_wrap=True)


def winners_table(rows: list[Winner]) -> Table:
    """Default against winner, microseconds; columns that say nothing here, or do not fit the terminal, are left out."""
    several_draws = len({w.draw for w in rows}) > 1
    wide = console.width >= 150
    columns: list[tuple[str, str, Callable[[Winner], str], bool]] = [
        ("rows", "right", lambda w: str(w.routed_m), True),
        ("draw", "left", lambda w: w.draw, several_draws),
        ("default", "left", lambda w: _label(w.default_schedule), wide),
        ("us", "right", lambda w: _us(w.default_time_us), True),
        ("winner", "left", _winner_label, True),
        ("us", "right", lambda w: _us(w.time_us if w.verdict == "win" else _best_us(w)), True),
        ("gain", "right", lambda w: "-" if w.margin is None else f"{w.margin:+.1%}", True),
        ("95 % interval", "right", _interval, True),
        ("verdict", "left", lambda w: w.verdict, True),
        ("Humming", "right", lambda w: _us(w.humming_us), any(w.humming_us for w in rows)),
        ("its best", "right", lambda w: _us(w.humming_best_us), any(w.humming_best_us for w in rows)),
        ("bf16", "right", lambda w: _us(w.baseline_us), wide and any(w.baseline_us for w in rows)),
        ("failed", "right", lambda w: f"{w.failed}/{w.candidates}", True),
    ]
    table = Table(box=None, pad_edge=False, header_style="dim")
    shown = [column for column in columns if column[3]]
    for name, justify, _, _ in shown:
        table.add_column(name, justify=justify, no_wrap=name not in ("winner", "default"))  # type: ignore[arg-type]
    for w in rows:
        table.add_row(*(cell(w) for _, _, cell, _ in shown))
    return table


def _label(schedule: Schedule | None) -> str:
    return schedule.label() if schedule else "-"


def _winner_label(winner: Winner) -> str:
    if winner.verdict == "none":
        return "-"
    return "default" if winner.best == winner.default_schedule else _label(winner.best)


def _interval(winner: Winner) -> str:
    if winner.ratio_low is None or winner.ratio_high is None or winner.best == winner.default_schedule:
        return "-"
    return f"{1 - winner.ratio_high:+.1%}..{1 - winner.ratio_low:+.1%}"


def _best_us(winner: Winner) -> float | None:
    if winner.default_time_us is None or winner.margin is None:
        return winner.time_us
    return winner.default_time_us * (1 - winner.margin)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

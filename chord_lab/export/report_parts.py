"""What a report is made of, before it is HTML: sections of notes, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from chord_lab.sweeps.winners import Winner


@dataclass(frozen=True)
class Cell:
    """A table cell: text, and a class that says what it means (win, tie, none, number, doubt)."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under a caption."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    block = "table"


@dataclass(frozen=True)
class Figure:
    """A plotly figure and one line that says what to look at."""

    figure: go.Figure
    look_at: str = ""
    half: bool = False  # two of these stand side by side where the page is wide
    block = "figure"


@dataclass(frozen=True)
class Note:
    """A paragraph; `kind` doubt marks what a reader should be careful about."""

    text: str
    kind: str = ""
    block = "note"


@dataclass
class Section:
    """One question of the report."""

    id: str
    title: str
    blocks: list[Any] = field(default_factory=list)


def us(value: float | None) -> Cell:
    """A time in microseconds."""
    return Cell("–" if value is None else f"{value:.1f}", "number")


def beside(other: float | None, ours: float | None) -> Cell:
    """Another's time, and how many times ours it is."""
    if not other:
        return Cell("–", "number")
    return Cell(f"{other:.1f} ({other / ours:.2f}x)" if ours else f"{other:.1f}", "number")


def winners_table(winners: Sequence[Winner], caption: str) -> Table:
    """One line a point: default against winner, margin with its interval, verdict, peers beside it, failures."""
    columns = [
        "rows", "per expert", "default, us", "winner, us", "time saved (95 %)", "verdict", "schedule",
        "Humming, us (/ ours)", "its best tile", "bf16 matmul", "tried (failed)",
    ]  # fmt: skip
    care = any(w.flags for w in winners)
    rows = [_winner_row(w) for w in winners]
    if care:
        columns.append("care")
        rows = [[*row, Cell("; ".join(w.flags), "doubt")] for row, w in zip(rows, winners, strict=True)]
    return Table(caption, columns, rows)


def _winner_row(w: Winner) -> list[Cell]:
    leads = w.best is not None and w.best == w.default_schedule
    saved = "–" if w.margin is None else "default leads" if leads else f"{w.margin:+.1%}"
    if not leads and w.ratio_low is not None and w.ratio_high is not None:
        saved += f" ({1 - w.ratio_high:+.1%} to {1 - w.ratio_low:+.1%})"
    return [
        Cell(str(w.routed_m), "number"),
        Cell(f"{w.routed_m / w.num_experts:.1f}", "number"),
        us(w.default_time_us),
        us(w.time_us),
        Cell(saved, "number"),
        Cell(w.verdict, w.verdict),
        Cell(w.schedule.label() if w.schedule else "no candidate succeeded", "code"),
        beside(w.humming_us, w.time_us),
        beside(w.humming_best_us, w.time_us),
        beside(w.baseline_us, w.time_us),
        Cell(f"{w.candidates} ({w.failed})", "number"),
    ]

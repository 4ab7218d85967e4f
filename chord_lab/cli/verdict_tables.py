"""Verdicts as tables that fit 80 columns: schedules and peers' tiles are letters, spelled out under each table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from string import ascii_lowercase
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from chord_lab.cli import console

if TYPE_CHECKING:
    from chord_lab.sweeps.layers import Layer
    from chord_lab.sweeps.winners import Winner

DOUBT = "†"  # beside the rows of a layer whose times want care
STYLES = {"win": "bold green", "tie": "dim", "none": "bold red"}
READING = (
    "times in us; gain: of the fastest over the default, with its 95 % interval",
    "verdict: win, or tie (the default stays), and the letter of what should run",
    "Humming: with its own tile, and with its best; bf16: weights dequantised first",
)


class Letters:
    """Names a, b, c, ... for long texts, in the order of their first use."""

    def __init__(self, upper: bool = False):
        self.upper = upper
        self.texts: list[str] = []

    def of(self, text: str) -> str:
        """The letter of `text`; nothing for no text."""
        if not text:
            return ""
        if text not in self.texts:
            self.texts.append(text)
        number = self.texts.index(text)
        times, place = divmod(number, len(ascii_lowercase))
        letter = ascii_lowercase[place] * (times + 1)
        return letter.upper() if self.upper else letter

    def legend(self, prefix: str = "") -> Iterable[str]:
        """One line a letter."""
        return [f"  {self.of(text)}  {prefix}{text}" for text in self.texts]


def print_winners(found: list[Winner]) -> None:
    """A table for each scenario, profile, draw and projection; the scenario's own profile leads."""
    for line in READING:
        _say(line, "dim")
    for group in _by_profile(found):
        first, newest = group[0], max(group, key=lambda w: w.date)
        place = f"{first.scenario}, profile {first.profile}, draw {first.draw}"
        console.print(f"\n{place}", style="bold", markup=False, highlight=False)
        _say(f"{newest.source} on {newest.device}, {newest.date[:10]}", "bold")
        for projection in dict.fromkeys(w.projection for w in group):
            _print_projection([w for w in group if w.projection == projection])


def own_profile_first(scenario: str, profiles: Iterable[str]) -> list[str]:
    """Profiles in reading order: the scenario's own, then the others as they come."""
    from chord_lab.errors import UserError
    from chord_lab.scenarios import get_scenario

    try:
        own = get_scenario(scenario).profile
    except UserError:  # a scenario of another version or config
        own = ""
    return sorted(dict.fromkeys(profiles), key=lambda profile: profile != own)


def _by_profile(found: list[Winner]) -> list[list[Winner]]:
    groups: dict[tuple[str, str, str], list[Winner]] = {}
    for scenario in dict.fromkeys(w.scenario for w in found):
        mine = [w for w in found if w.scenario == scenario]
        for profile in own_profile_first(scenario, (w.profile for w in mine)):
            for winner in mine:
                if winner.profile == profile:
                    groups.setdefault((scenario, profile, winner.draw), []).append(winner)
    return list(groups.values())


def _print_projection(rows: list[Winner]) -> None:
    """One table with its legend, failures and doubts."""
    ours, theirs = Letters(), Letters(upper=True)
    humming, baseline = any(w.humming_us for w in rows), any(w.baseline_us for w in rows)
    columns: list[tuple[str, Callable[[Winner], str], bool]] = [
        ("rows", lambda w: str(w.routed_m), True),
        ("default", lambda w: us(w.default_time_us), True),
        ("fastest", lambda w: us(_best_us(w)), True),
        ("gain", _gain, True),
        ("95 % interval", _interval, True),
        ("verdict", lambda w: f"{w.verdict} {ours.of(w.schedule.label() if w.schedule else ''):>2}", True),
        ("Humming", lambda w: _peer(w.humming_us, theirs.of(w.humming_tile)), humming),
        ("its best", lambda w: _peer(w.humming_best_us, theirs.of(w.humming_best_tile)), humming),
        ("bf16", lambda w: us(w.baseline_us), baseline),
    ]  # fmt: skip
    _say(rows[0].projection, "bold cyan")
    table = compact_table()
    shown = [column for column in columns if column[2]]
    for name, _, _ in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for w in rows:
        cells = [Text(cell(w), STYLES[w.verdict] if name == "verdict" else "") for name, cell, _ in shown]
        table.add_row(*cells)
    console.print(table)
    for line in (*ours.legend(), *theirs.legend("Humming ")):
        _say(line, "dim")
    _say(_failures(rows), "dim")
    for winner in rows:
        for flag in winner.flags:
            _say(f"  {winner.routed_m} rows: {flag}", "yellow")


def compact_table() -> Table:
    """Columns one blank apart: nine of them fit 80 characters."""
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")


def _failures(rows: list[Winner]) -> str:
    tried = sorted({w.candidates for w in rows})
    many = f"{tried[0]} to {tried[-1]}" if len(tried) > 1 else str(tried[0])
    failed = [
        f"{w.failed} of {w.candidates} at {w.routed_m} rows ({kinds_of([w])})" if w.failures else
        f"{w.failed} of {w.candidates} at {w.routed_m} rows (too short to time)"
        for w in rows
        if w.failed
    ]  # fmt: skip
    return f"  tried {many} candidates a point; " + (f"failed: {', '.join(failed)}" if failed else "none failed")


def kinds_of(found: Iterable[Winner]) -> str:
    """``2 compile_error, 1 timeout``."""
    totals: dict[str, int] = {}
    for winner in found:
        for status, count in winner.failures.items():
            totals[status] = totals.get(status, 0) + count
    return ", ".join(f"{count} {status}" for status, count in sorted(totals.items()))


def print_layers(made: list[Layer]) -> None:
    """gate_up + down; routing, activation and communication are not in it."""
    for scenario, draw in dict.fromkeys((layer.scenario, layer.draw) for layer in made):
        group = [layer for layer in made if (layer.scenario, layer.draw) == (scenario, draw)]
        _say(f"layer (gate_up + down), {scenario}, draw {draw}: us, and the peer's time / ours", "bold")
        table = compact_table()
        for name in ("profile", "rows", "default", "tuned", "gain", "Humming", "its best"):
            table.add_column(name, justify="left" if name == "profile" else "right", no_wrap=True)
        for profile in own_profile_first(scenario, (layer.profile for layer in group)):
            for layer in (one for one in group if one.profile == profile):
                gain = f"{1 - layer.time_us / layer.default_time_us:+.1%}"
                peers = (_beside(time, layer.time_us) for time in (layer.humming_us, layer.humming_best_us))
                mark = DOUBT if layer.doubtful else ""
                ours = (f"{layer.routed_m}{mark}", us(layer.default_time_us), us(layer.time_us), gain)
                table.add_row(profile, *ours, *peers)
        console.print(table)
        if any(layer.doubtful for layer in group):
            _say(f"  {DOUBT} a GEMM of this layer carries a flag, named above", "yellow")


def us(value: float | None) -> str:
    """Microseconds in at most six characters up to a second."""
    return "-" if value is None else f"{value:.1f}" if value < 9999.95 else f"{value:.0f}"


def _beside(time: float | None, ours: float) -> str:
    return f"{us(time)} {time / ours:.2f}x" if time else "-"


def _peer(time: float | None, letter: str) -> str:
    return f"{us(time)} {letter:<1}" if time else "-"


def _gain(winner: Winner) -> str:
    leads = winner.margin is None or winner.best == winner.default_schedule
    return "-" if leads else f"{winner.margin:+.1%}"


def _interval(winner: Winner) -> str:
    if winner.best is not None and winner.best == winner.default_schedule:
        return "default leads"
    if winner.ratio_high is None:
        return "-"
    if winner.ratio_low is None:  # of a mix of draws only the bound is known
        return f"at least {100 * (1 - winner.ratio_high):+.1f}%"
    return f"{100 * (1 - winner.ratio_high):+.1f}..{100 * (1 - winner.ratio_low):+.1f}%"


def _best_us(winner: Winner) -> float | None:
    if winner.default_time_us is None or winner.margin is None:
        return winner.time_us
    return winner.default_time_us * (1 - winner.margin)


def _say(text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

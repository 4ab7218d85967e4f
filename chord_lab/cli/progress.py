"""Progress of a run: a bar with rate, remaining time, best so far and failures; plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chord_lab.cli import notes

if TYPE_CHECKING:
    from chord_lab.sweeps.run import Progress as RunProgress
    from chord_lab.sweeps.run import Watch

LINE_EVERY_S = 15.0


@contextmanager
def watching() -> Iterator[Watch]:
    """A `watch` for `sweeps.run.run`; its notes are printed once each."""
    shown = 0

    def print_notes(progress: RunProgress) -> None:
        nonlocal shown
        for text in progress.notes[shown:]:
            notes.print(text, markup=False, highlight=False, soft_wrap=True)
        shown = len(progress.notes)

    if not notes.is_terminal:
        last = time.monotonic()

        def lines(progress: RunProgress) -> None:
            nonlocal last
            print_notes(progress)
            if time.monotonic() - last > LINE_EVERY_S:
                last = time.monotonic()
                notes.print(_line(progress), markup=False, highlight=False, soft_wrap=True)

        yield lines
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("", total=None, rate="")

        def update(progress: RunProgress) -> None:
            print_notes(progress)
            text = f"{progress.now_at[:60]:<60} {_best(progress)}{_failures(progress)}"
            rate = f"{progress.rate:.1f}/s"
            bar.update(task, total=progress.total, completed=progress.finished, description=text, rate=rate)

        yield update


def _line(progress: RunProgress) -> str:
    left = max(0, progress.total - progress.finished)
    remaining = f", {left / progress.rate:.0f} s left" if progress.rate > 0 else ""
    return (
        f"{progress.finished}/{progress.total} candidates, {progress.rate:.1f}/s{remaining}"
        f"{_failures(progress)}; {progress.now_at}; {_best(progress)}"
    )


def _best(progress: RunProgress) -> str:
    place = " ".join(progress.now_at.split(" ")[:3])
    best = progress.best.get(place)
    return f"best {best[0]:.1f} us {best[1]}" if best else ""


def _failures(progress: RunProgress) -> str:
    failed = sum(progress.failed.values())
    return f", {failed} failed ({', '.join(f'{n} {s}' for s, n in progress.failed.most_common())})" if failed else ""

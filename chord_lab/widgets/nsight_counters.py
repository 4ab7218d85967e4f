"""NsightCounters: two captured schedules side by side: roofline, stall reasons, pipes, and what else changed."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets

from chord_lab.errors import UserError
from chord_lab.export.nsight_figures import draw_nsight_roofline, draw_stalls, draw_uses
from chord_lab.traces.captures import Library
from chord_lab.traces.counters import COUNTERS
from chord_lab.traces.views import roofline_info, side_by_side
from chord_lab.widgets import controls
from chord_lab.widgets.live_figure import LiveFigure
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.nsight_timeline import library_of
from chord_lab.widgets.panel import Panel


class NsightCounters(Panel):
    """Captures of a folder; those that the project ships when none is given."""

    title = "Counters: why is this schedule slow?"

    def __init__(self, captures: Library | str | Path | None = None):
        super().__init__(None, Measurements.empty())
        self.library = captures if isinstance(captures, Library) else library_of(captures)
        if not len(self.library.points):
            raise UserError(f"{self.library.source()}: `chord-lab profile` makes some on a GPU")
        options = capture_choices(self.library)
        self.first = controls.choice("Schedule", options, options[0][1], "a captured schedule")
        self.second = controls.choice(
            "Against", options, options[min(1, len(options) - 1)][1], "the one to compare it with"
        )
        self.swap = controls.button("Swap", "exchange the two")
        self.figures: list[LiveFigure] = []
        self.table = controls.text()
        self.swap.on_click(self._swapped)
        for control in (self.first, self.second):
            control.layout.width = "60em"
            control.observe(self.redraw, "value")
        self.redraw()

    def draw(self) -> None:
        """Draw both schedules."""
        keys = list(dict.fromkeys((self.first.value, self.second.value)))
        pair = side_by_side(self.library.points, keys)
        source = self.library.source()
        roof = roofline_info(self.library.points, self.library.ceilings())
        drawn = [
            draw_stalls(pair, source=source),
            draw_uses(pair, source=source),
            draw_nsight_roofline(roof, source=source, chosen=tuple(keys)),
        ]
        if self.figures:
            for shown, figure in zip(self.figures, drawn, strict=True):
                shown.show(figure)
        else:
            self.figures = [LiveFigure(figure) for figure in drawn]
            self.figures[2].on_click(self._picked)
            pickers = ipywidgets.VBox([self.first, self.second, controls.row(self.swap)])
            self.arrange(pickers, *(f.widget for f in self.figures), self.table)
        self.table.value = counter_table(self.library, keys)

    def _picked(self, _name: str, _x: Any, key: Any) -> None:
        if key is not None:
            self.second.value = str(key)

    def _swapped(self, _button: Any) -> None:
        self.first.value, self.second.value = self.second.value, self.first.value


def capture_choices(library: Library) -> list[tuple[str, str]]:
    """Every captured schedule with its point and time."""
    columns = ("projection", "routed_m", "label", "profiled_us", "key")
    return [
        (f"{projection} {routed_m:,} rows: {label} ({time:.1f} us)", str(key))
        for projection, routed_m, label, time, key in zip(*(library.points[c] for c in columns), strict=True)
    ]


def counter_table(library: Library, keys: list[str]) -> str:
    """Every counter that was collected, a column a schedule."""
    rows = library.points.set_index("key").loc[keys]
    names = {"record_time_us": "time by events, us", "profiled_us": "time by the profiler, us"}
    names |= {"registers": "registers a thread", "smem_bytes": "shared memory, bytes"} | {
        c.name: c.label for c in COUNTERS
    }
    head = "".join(
        f"<th style='text-align:right;padding-left:1em'>{escape(str(label))}</th>" for label in rows["label"]
    )
    body = ""
    for name, label in names.items():
        if rows[name].notna().any():
            cells = "".join(f"<td style='text-align:right'>{_figure(v)}</td>" for v in rows[name].astype(float))
            body += f"<tr><th style='text-align:left'>{escape(label)}</th>{cells}</tr>"
    return f"<details><summary>All counters</summary><table><tr><th></th>{head}</tr>{body}</table></details>"


def _figure(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.4g}"

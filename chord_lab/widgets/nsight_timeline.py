"""NsightTimeline: ranges and kernels over time, zoomed and selected; above them the load of the selected kernel."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import ipywidgets

from chord_lab.analysis.load import load_info
from chord_lab.errors import UserError
from chord_lab.export.nsight_figures import draw_nsight_timeline
from chord_lab.traces.captures import Library, load_library
from chord_lab.traces.table import Trace, shorten
from chord_lab.traces.views import kernel_label, kernel_story, timeline_info, trace_source
from chord_lab.widgets import controls
from chord_lab.widgets.live_figure import LiveFigure
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.panel import Panel

STEP = 2.0  # a press of a zoom button


class NsightTimeline(Panel):
    """Timelines of a folder of captures, or of one file that is given."""

    title = "Timeline: where does the time go?"

    def __init__(self, captures: Library | str | Path | None = None):
        super().__init__(None, Measurements.empty())
        self.library = captures if isinstance(captures, Library) else library_of(captures)
        names = [*self.library.timelines, *self.library.counters]
        if not names:
            raise UserError(f"{self.library.folder} holds nothing with kernels to draw")
        self.file = controls.choice("Capture", names, names[0], "a profile of this folder")
        self.kernel = controls.choice("Kernel", [("none", None)], None, "the kernel whose schedule and load are shown")
        self.kernel.layout.width = "60em"
        self.zoom_in = controls.button("Zoom in", "half the time, around the middle")
        self.zoom_out = controls.button("Zoom out", "twice the time")
        self.whole = controls.button("Whole trace", "from the first event to the last")
        self.live: LiveFigure | None = None
        self.story = controls.text()
        self.trace: Trace | None = None
        self.window: tuple[float, float] | None = None
        self._busy = False
        self.file.observe(self._opened, "value")
        self.kernel.observe(self.redraw, "value")
        self.zoom_in.on_click(lambda _: self._zoom(1 / STEP))
        self.zoom_out.on_click(lambda _: self._zoom(STEP))
        self.whole.on_click(lambda _: self.show(None))
        self._opened()

    def _opened(self, _change: Any = None) -> None:
        name = self.file.value
        try:
            self.trace = self.library.counters.get(name) or self.library.timeline(name)
        except UserError as error:
            self.message.value = f"<b role='alert'>{escape(str(error))}</b>"
            return
        self.window = None
        with self.kernel.hold_trait_notifications():
            controls.set_options(self.kernel, kernel_choices(self.trace), None)
        self.redraw()

    def show(self, window: tuple[float, float] | None) -> None:
        """Zoom to these microseconds; None shows the whole trace."""
        self.window = window
        self.redraw()

    def select(self, row: int) -> None:
        """Select a kernel by its row; one that the list does not offer is added to it."""
        if row not in [value for _, value in self.kernel.options]:
            self.kernel.options = (*self.kernel.options, (f"kernel {row}", row))
        self.kernel.value = row

    def draw(self) -> None:
        """Draw the window, the selection and its load."""
        if self.trace is None:
            return
        info = timeline_info(self.trace, self.window)
        row = self.kernel.value
        story = {} if row is None else kernel_story(self.trace, row)
        counts = story.pop("tok_e", None)
        figure = draw_nsight_timeline(
            info,
            source=trace_source(self.trace),
            selected=row,
            load=load_info(counts) if counts else None,
            load_title=f"local expert: {story['point']}" if counts else "",
        )
        self._busy = True
        try:
            self._place(figure)
        finally:
            self._busy = False
        self.story.value = story_table(story)

    def _place(self, figure: Any) -> None:
        if self.live is not None:
            self.live.show(figure)
            return
        self.live = LiveFigure(figure)
        self.live.on_click(self._clicked)
        if self.live.figure is not None:
            self.live.figure.layout.on_change(self._dragged, "xaxis2.range")
        buttons = controls.row(self.zoom_in, self.zoom_out, self.whole)
        self.arrange(ipywidgets.VBox([self.file, self.kernel, buttons]), self.live.widget, self.story)

    def _clicked(self, name: str, _x: Any, picked: Any) -> None:
        if name == "kernels" and picked is not None:
            self.select(int(picked[0]))

    def _dragged(self, _layout: Any, window: Any) -> None:
        """The person zoomed with the mouse: bars that were merged part again."""
        if not self._busy and window is not None and window[0] < window[1]:
            self.show((float(window[0]), float(window[1])))

    def _zoom(self, factor: float) -> None:
        assert self.trace is not None
        info = timeline_info(self.trace, self.window)
        middle, half = (info.start_us + info.end_us) / 2, (info.end_us - info.start_us) * factor / 2
        low, high = max(0.0, middle - half), min(info.whole_us, middle + half)
        self.show(None if (low, high) == (0.0, info.whole_us) else (low, high))


def library_of(captures: str | Path | None) -> Library:
    """The captures of a folder, or one file as a folder of its own; the shipped ones for None."""
    path = None if captures is None else Path(captures)
    if path is None or path.is_dir():
        return load_library(path)
    import pandas as pd

    return Library(path.parent, {}, {path.name: path}, pd.DataFrame(), ())


def kernel_choices(trace: Trace, most: int = 200) -> list[tuple[str, int | None]]:
    """The longest kernels, in order of start; those of a record by projection and schedule."""
    longest = trace.kernels["time_us"].nlargest(most).index.sort_values()
    choices: list[tuple[str, int | None]] = [("none", None)]
    for row in longest.tolist():
        label = shorten(kernel_label(trace, row), 80)
        choices.append((f"{row}: {label}, {trace.kernels['time_us'].iloc[row]:.1f} us", row))
    return choices


def story_table(story: dict[str, Any]) -> str:
    """A kernel's facts as a small HTML table."""
    if not story:
        return "<em>Select a kernel, in the list or by a click on its bar.</em>"
    head = "<th style='text-align:left;padding-right:1em'>"
    cells = (f"<tr>{head}{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in story.items())
    return f"<table aria-label='selected kernel'>{''.join(cells)}</table>"

"""What all panels share: a title, controls, figures, one line for what went wrong."""

from __future__ import annotations

import html
from typing import Any

import ipywidgets

from chord_lab.widgets import controls
from chord_lab.widgets.frame import make_frame
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.selection import Selection


class Framed(ipywidgets.VBox):
    """A titled part of the screen whose figures take its width."""

    title = ""

    def __init__(self) -> None:
        self.message = controls.text()
        super().__init__([], layout={"padding": "0 0 1em 0"})

    def arrange(self, *parts: ipywidgets.Widget) -> None:
        """Lay out the title, the line for errors, and the parts."""
        frame = make_frame()
        head = ipywidgets.HTML(f"<h3 style='margin:0'>{self.title}</h3>")
        self.children = (head, self.message, *parts, *([frame] if frame is not None else []))


class Panel(Framed):
    """A part of the screen that follows a `Selection`. Subclasses build their parts, then call `follow`."""

    title = ""
    point: ipywidgets.Widget | None = None  # the controls that choose the point, where a panel has them

    def __init__(self, selection: Selection | None = None, measurements: Measurements | None = None):
        self._drawn = False
        self.selection = selection if selection is not None else Selection()
        self.measurements = measurements if measurements is not None else Measurements.recorded()
        super().__init__()

    def follow(self, *names: str) -> None:
        """Redraw now and whenever one of these traits of the selection changes."""
        self.redraw()
        self.selection.observe(self.redraw, list(names))

    def redraw(self, _change: Any = None) -> None:
        """Draw what the selection says; bad input becomes one line, and the last good figure stays, which it says."""
        try:
            self.draw()
        except ValueError as error:  # UserError is one
            first = (str(error).splitlines() or [type(error).__name__])[0]
            kept = "; below is what was shown before" if self._drawn else ""
            if not self.children:
                self.arrange(*([self.point] if self.point else []))
            self.message.value = f"<b role='alert'>{html.escape(first)}{kept}</b>"
        else:
            self._drawn = True
            self.message.value = ""

    def draw(self) -> None:
        """Update the figures; raise UserError with one line where that is impossible."""
        raise NotImplementedError

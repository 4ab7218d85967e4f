"""A figure that redraws in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets
import plotly.graph_objects as go

from chord_lab.widgets.figure_widget import make_figure_widget

MISSING = "anywidget is not installed: figures are redrawn whole and do not answer clicks (pip install anywidget)"


class LiveFigure:
    """Shows one plotly figure after another in the same place; the browser is sent only what changed.

    `widget` is what a panel lays out. Without anywidget it is a plain figure under one line that says why.
    """

    def __init__(self, figure: go.Figure) -> None:
        self._shown = figure.to_plotly_json()
        self._act: Callable[[str, Any, Any], None] | None = None
        self.figure: go.FigureWidget | None
        try:
            self.figure = make_figure_widget(figure)
            self.figure._config = {**self.figure._config, "responsive": True, "displaylogo": False}
        except ImportError:
            self.figure = None
            self._output = ipywidgets.Output()
            note = ipywidgets.HTML(f"<em>{MISSING}</em>")
            self.widget: ipywidgets.Widget = ipywidgets.VBox([note, self._output])
            self._draw_plain(figure)
        else:
            self.widget = self.figure

    def show(self, figure: go.Figure) -> None:
        """Replace what is shown."""
        new = figure.to_plotly_json()
        old, self._shown = self._shown, new
        if self.figure is None:
            self._draw_plain(figure)
        elif [trace["type"] for trace in new["data"]] == [trace["type"] for trace in old["data"]]:
            with self.figure.batch_update():
                for trace, before, after in zip(self.figure.data, old["data"], new["data"], strict=True):
                    _apply(trace, before, after)
                _apply(self.figure.layout, old["layout"], new["layout"])
        else:
            self.figure.data = []
            self.figure.add_traces(list(figure.data))
            with self.figure.batch_update():
                _apply(self.figure.layout, old["layout"], new["layout"])
            self._listen()

    def on_click(self, act: Callable[[str, Any, Any], None]) -> None:
        """Call ``act(trace name, x, customdata)`` for the point that is clicked."""
        self._act = act
        self._listen()

    def _listen(self) -> None:
        if self.figure is not None and self._act is not None:
            for trace in self.figure.data:
                trace.on_click(self._clicked)

    def _clicked(self, trace: Any, points: Any, _state: Any) -> None:
        if not points.point_inds or self._act is None:
            return
        index = points.point_inds[0]
        data = trace.customdata
        picked = data[index] if data is not None and isinstance(index, int) and index < len(data) else None
        self._act(trace.name, points.xs[0], picked)

    def _draw_plain(self, figure: go.Figure) -> None:
        bundle = {"application/vnd.plotly.v1+json": figure.to_plotly_json(), "text/plain": repr(figure)[:200]}
        self._output.outputs = ({"output_type": "display_data", "data": bundle, "metadata": {}},)


def _apply(target: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Set the top-level properties that differ; one that is gone becomes None."""
    for name in before.keys() - after.keys():
        target[name] = None
    for name, value in after.items():
        if name not in before or not _same(before[name], value):
            target[name] = value


def _same(a: Any, b: Any) -> bool:
    """Equality that reads arrays, which `==` would compare element by element."""
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)

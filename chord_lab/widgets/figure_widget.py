"""plotly's FigureWidget with its script sent once a kernel.

plotly sends its 5 MB script with every FigureWidget: thirty figures are 150 MB on the wire and in the widget state that
`nbconvert --execute` saves. Here one invisible widget carries the script, and each figure waits for it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from contextlib import suppress
from typing import Any

import plotly.graph_objects as go

# Both sides meet in one object on the page, whichever of them comes first.
_MEET = """
const meeting = (window.chordLabPlotly ??= (() => {
  let give;
  const promise = new Promise((resolve) => { give = resolve; });
  return { promise, give };
})());
"""
_CARRY = (
    _MEET
    + """
export default {
  async initialize({ model }) {
    const url = URL.createObjectURL(new Blob([model.get("script")], { type: "text/javascript" }));
    meeting.give((await import(url)).default);
    URL.revokeObjectURL(url);
  },
};
"""
)
_WAIT = (
    _MEET
    + """
export default async () => {
  const widget = await meeting.promise;
  return typeof widget === "function" ? await widget() : widget;
};
"""
)


def import_nbformat() -> None:
    """What plotly imports before a kernel's first figure, without 1.6 of its 1.8 seconds.

    nbformat brings jsonschema, and jsonschema, where it finds rfc3987_syntax, has 38 grammars built for its checks of
    IRIs. No notebook format has one to check: the package is hidden while nbformat is imported.
    """
    grammars = "rfc3987_syntax"
    if "jsonschema" in sys.modules or grammars in sys.modules:
        return
    sys.modules[grammars] = None  # type: ignore[assignment]  # import then says: not there
    try:
        with suppress(ImportError):
            importlib.import_module("nbformat")
    finally:
        del sys.modules[grammars]


import_nbformat()


def make_figure_widget(figure: go.Figure) -> Any:
    """A FigureWidget of `figure`.

    Raises:
        ImportError: anywidget is not installed.
    """
    carry_script()
    return _figure_class()(figure)


@functools.cache
def carry_script() -> Any:
    """The widget that brings plotly's script to the page; one for each kernel."""
    import anywidget
    import traitlets

    script = go.FigureWidget._esm
    text = script.read_text(encoding="utf-8") if hasattr(script, "read_text") else str(script)

    class Carrier(anywidget.AnyWidget):
        """No view; it acts when the page first hears of it."""

        _esm = _CARRY
        script = traitlets.Unicode(text).tag(sync=True)

    return Carrier()


@functools.cache
def _figure_class() -> Any:
    class FigureWidget(go.FigureWidget):
        """plotly's widget, waiting for the carried script."""

        _esm = _WAIT

    return FigureWidget

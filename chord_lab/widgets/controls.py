"""Controls that look and behave alike in every panel: visible labels, keyboard steps, one line of help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets

LABEL = {"description_width": "9.5em"}
WIDE = {"width": "28em"}


def choice(label: str, options: Sequence[Any], value: Any, tooltip: str) -> ipywidgets.Dropdown:
    """One of a few named values."""
    return ipywidgets.Dropdown(
        description=label, options=options, value=value, tooltip=tooltip, style=LABEL, layout=WIDE
    )


def steps(label: str, options: Sequence[Any], value: Any, tooltip: str) -> ipywidgets.SelectionSlider:
    """A slider over values that are not evenly spaced: token counts, block sizes."""
    return ipywidgets.SelectionSlider(
        description=label, options=options, value=value, tooltip=tooltip, style=LABEL, layout=WIDE
    )


def whole(label: str, low: int, high: int, value: int, tooltip: str, step: int = 1) -> ipywidgets.IntSlider:
    """A whole number."""
    return ipywidgets.IntSlider(
        description=label, min=low, max=high, step=step, value=value, tooltip=tooltip, style=LABEL, layout=WIDE
    )


def real(label: str, low: float, high: float, value: float, tooltip: str, step: float) -> ipywidgets.FloatSlider:
    """A number with a fraction."""
    return ipywidgets.FloatSlider(
        description=label,
        min=low,
        max=high,
        step=step,
        value=value,
        tooltip=tooltip,
        readout_format=".2f",
        style=LABEL,
        layout=WIDE,
    )


def switch(label: str, value: bool, tooltip: str) -> ipywidgets.Checkbox:
    """On or off."""
    return ipywidgets.Checkbox(description=label, value=value, tooltip=tooltip, indent=False)


def button(label: str, tooltip: str, *, style: str = "") -> ipywidgets.Button:
    """An action; style: primary, warning, danger or empty."""
    return ipywidgets.Button(description=label, tooltip=tooltip, button_style=style, layout={"width": "auto"})


def text(html: str = "") -> ipywidgets.HTML:
    """A line of results under a figure."""
    return ipywidgets.HTML(value=html, layout={"overflow": "auto"})


def set_options(control: Any, options: Sequence[Any], value: Any) -> None:
    """Change what a control offers. It passes through its first option: observers must be told to look away.

    The browser gets options and value at once: a slider that knew the new options with the old place would move to the
    last of them, and send that back as a person's choice.
    """
    with control.hold_sync():
        if tuple(control.options) != tuple(options):
            control.options = options
        control.value = value


def offer(control: Any, value: Any) -> None:
    """Set a control's value, adding it to what is on offer if need be."""
    options = control.options if value in control.options else sorted({*control.options, value})
    set_options(control, options, value)


def row(*parts: ipywidgets.Widget) -> ipywidgets.HBox:
    """Controls side by side; they wrap where the window is narrow."""
    return ipywidgets.HBox(list(parts), layout={"flex_flow": "row wrap", "align_items": "center"})

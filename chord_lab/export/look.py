"""How every figure looks: colour-blind-safe, readable on light and dark pages, the source under the title."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

# Okabe and Ito's palette: told apart with any common colour blindness, and on white as on near-black.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, GREY, YELLOW = "#56B4E9", "#CC79A7", "#8a8a8a", "#c9b800"
CYCLE = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")  # a second cue beside colour
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")

TEXT = "#777777"  # contrast 4.5:1 on white and 4.2:1 on JupyterLab's dark page
GRID = "rgba(128,128,128,0.25)"
CLEAR = "rgba(0,0,0,0)"
HEIGHT = 360


def layout(
    figure: go.Figure, *, title: str, source: str, x: str, y: str, height: int = HEIGHT, **more: Any
) -> go.Figure:
    """Give a figure its finding as title, its source under it, and units on both axes.

    more: further layout properties; ``xaxis_type`` and the like go into the axis. Set at once: plotly checks a whole
    layout ten times faster than the same properties one update after another, and panels redraw with every key press.
    """
    heading, origin = _lines(title, 105), _lines(source, 150)
    # A line is as high as the title's font asks, also where a smaller one is written on it.
    top = 30 + 20 * (heading.count("<br>") + origin.count("<br>") + 2)
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}
    values: dict[str, Any] = {
        "title": {
            "text": f"{heading}<br><span style='font-size:11px'>{origin}</span>",
            "x": 0.01,
            "xanchor": "left",
            "font": {"size": 15, "color": TEXT},
        },
        "font": {"color": TEXT, "size": 12},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "height": height,
        "autosize": True,
        "margin": {"l": 60, "r": 20, "t": top, "b": 50},
        # At the figure's foot, under the axis title: plotly keeps room for its rows there.
        "legend": {"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0, "x": 0, "bgcolor": CLEAR},
        "colorway": list(CYCLE),
        "hoverlabel": {"namelength": -1},
        "uirevision": "keep",  # a redraw keeps the person's zoom
        "xaxis": {"title": {"text": x}, **axis},
        "yaxis": {"title": {"text": y}, **axis},
    }
    before = figure.to_plotly_json().get("layout", {})
    before.pop("template", None)  # plotly's own theme: all that it sets is set here
    figure.layout = _merged(_merged(before, values), _nested(more))
    return figure


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """``{"xaxis_type": "log"}`` -> ``{"xaxis": {"type": "log"}}``, for axes alone."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        axis, mark, rest = name.partition("_")
        if mark and axis.startswith(("xaxis", "yaxis")):
            nested.setdefault(axis, {})[rest] = value
        else:
            nested[name] = _merged(nested.get(name, {}), value) if isinstance(value, dict) else value
    return nested


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, `above` where they differ; dicts are merged at any depth."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _lines(text: str, width: int) -> str:
    return "<br>".join(textwrap.wrap(text, width))


def for_print(figure: go.Figure) -> go.Figure:
    """A copy with dark text on white, for pictures that leave the notebook."""
    printed = go.Figure(figure)
    dark = "#222222"
    printed.update_layout(paper_bgcolor="white", plot_bgcolor="white", font_color=dark, title_font_color=dark)
    return printed


def log_axis(values: Sequence[float | None], *, alone: bool = False) -> dict[str, Any]:
    """A log axis labelled 1, 2, 5, 10, ...: plotly's own labels drop the zeros of what lies between decades.

    alone: the axis shows these values and nothing beyond, so that few of those labels may fall on it.
    """
    known = [v for v in values if v is not None and v > 0]
    if not known:
        return {"type": "log"}
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    marks = [m * 10.0**d for d in range(low, high + 1) for m in (1, 2, 5)]
    ticks = sorted({*marks, *(_between(min(known), max(known)) if alone else ())})
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{t:g}" for t in ticks]}


def _between(low: float, high: float) -> list[float]:
    """Round numbers for values of less than a decade, of which 1, 2, 5 would label one or none."""
    if not low < high < 10 * low:
        return []
    scale = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(m * scale for m in (1, 2, 5, 10) if (high - low) / (m * scale) <= 5)
    return [round(k * step, 10) for k in range(max(1, math.floor(low / step)), math.ceil(high / step) + 1)]

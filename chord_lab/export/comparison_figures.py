"""Figures that put ours beside others, or one schedule beside another."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from chord_lab.analysis import CompareInfo, LayerInfo, PairInfo
from chord_lab.export import look, palette
from chord_lab.export.figures import Times, whiskers
from chord_lab.records.peer_tile import tile_text

# From here on a bar would flatten those that are compared: such an implementation is named under the title instead.
FAR = 4.0


def draw_layer(info: LayerInfo) -> go.Figure:
    """Layer time of the others over ours."""
    figure = go.Figure()
    labels = [
        f"{t} {d}" if len(set(info.draw)) > 1 else str(t) for t, d in zip(info.num_tokens, info.draw, strict=True)
    ]
    near, far = _near_and_far(info)
    for k, name in near:
        figure.add_trace(
            go.Bar(
                x=labels, y=[row[k] for row in info.ratio], name=palette.NAMES.get(name, name),
                marker_color=palette.of(palette.IMPLEMENTATION, name, k),
                hovertext=[
                    f"{name} {row[k]:.1f} us, ours {ours:.1f} us" if row[k] is not None else ""
                    for row, ours in zip(info.other_us, info.ours_us, strict=True)
                ],
                hoverinfo="text+x",
            )
        )  # fmt: skip
    figure.update_layout(shapes=[_level(1.0)])
    return look.layout(
        figure,
        title=layer_finding(info),
        source=f"{info.source}; {info.scenario}, {_draws(info.draw)}; gate_up + down alone; "
        f"above 1 ours is faster{far}",
        x="tokens",
        y="time / our time",
        xaxis_type="category",
        barmode="group",
    )


def layer_finding(info: LayerInfo) -> str:
    """What the layer's ratios say, in one sentence."""
    if not info.implementation:
        return "No other implementation was measured on both projections"
    k, name = _judged(info.implementation)
    ratios = _ratios(info, k)
    faster = sum(r > 1 for r in ratios)
    span = f"{min(ratios):.2f} to {max(ratios):.2f}"
    tail = f"ours is faster at {faster} of {len(ratios)} points"
    return f"{palette.NAMES.get(name, name)} takes {span} times our time for the layer; {tail}"


def _judged(implementations: list[str]) -> tuple[int, str]:
    """Whom the title names: the peer's best tile where it is known (tuned against tuned), else the first."""
    name = "humming_best_tile" if "humming_best_tile" in implementations else implementations[0]
    return implementations.index(name), name


def _ratios(info: LayerInfo | CompareInfo, k: int) -> list[float]:
    return [ratio for row in info.ratio if (ratio := row[k]) is not None]


def _near_and_far(info: LayerInfo | CompareInfo) -> tuple[list[tuple[int, str]], str]:
    """Implementations to draw, and words for those that are `FAR` or more times slower at every point."""
    near, far = [], ""
    for k, name in enumerate(info.implementation):
        ratios = _ratios(info, k)
        if ratios and min(ratios) >= FAR:
            far += f"; {palette.NAMES.get(name, name)} takes {min(ratios):.0f} to {max(ratios):.0f} times our time"
        else:
            near.append((k, name))
    return near, far


def draw_compare(info: CompareInfo) -> go.Figure:
    """Time of every other implementation over ours at each point, with the 95 % interval of the paired repeats."""
    figure = go.Figure()
    labels = [list(info.projection), [str(m) for m in info.routed_m]]
    near, far = _near_and_far(info)
    for k, name in near:
        ratios = [row[k] for row in info.ratio]
        low, high = ([row[k] for row in rows] for rows in (info.ratio_low, info.ratio_high))
        figure.add_trace(
            go.Bar(
                x=labels, y=ratios, name=palette.NAMES.get(name, name), hovertext=_compare_hover(info, k),
                hoverinfo="text+y", marker_color=palette.of(palette.IMPLEMENTATION, name, k),
                error_y=_around(ratios, low, high),
            )
        )  # fmt: skip
    figure.update_layout(shapes=[_level(1.0)])
    k, judged = _judged(info.implementation)
    known = _ratios(info, k)
    span = f"{min(known):.2f} to {max(known):.2f} times our time" if known else "a time that is not known"
    where = f"{info.projection[0]}: " if len(set(info.projection)) == 1 else ""
    return look.layout(
        figure,
        title=f"{where}{palette.NAMES.get(judged, judged)} takes {span}",
        source=f"{info.source}; {_draws(info.draw)}; same routing; above 1 ours is faster; "
        f"whiskers: 95 % interval{far}",
        x="routed rows",
        y="time / our time",
        xaxis_type="multicategory",
        barmode="group",
    )


def _compare_hover(info: CompareInfo, k: int) -> list[str]:
    """Both times, the other's tile and the rows that it pads to."""
    texts = []
    for ours, times, configs, pads in zip(info.ours_us, info.other_us, info.config, info.padded_rows, strict=True):
        time = f"{times[k]:.1f} us, ours {ours:.1f} us" if times[k] is not None else ""
        padded = f"{pads[k]} rows with padding" if pads[k] else ""
        texts.append("<br>".join(part for part in (time, tile_text(configs[k]), padded) if part))
    return texts


def draw_pair(info: PairInfo) -> go.Figure:
    """One schedule's time over another's."""
    labels = [list(info.projection), [f"{m} {d}" for m, d in zip(info.routed_m, info.draw, strict=True)]]
    figure = go.Figure(
        go.Bar(
            x=labels, y=info.ratio, marker_color=[look.GREEN if r > 1 else look.VERMILION for r in info.ratio],
            error_y=_around(info.ratio, info.ratio_low, info.ratio_high),
        )
    )  # fmt: skip
    figure.update_layout(shapes=[_level(1.0)])
    knobs = ", ".join(f"{name} {a} against {b}" for name, (a, b) in info.differs.items()) or "nothing"
    faster = sum(r > 1 for r in info.ratio)
    return look.layout(
        figure,
        title=f"{info.first} is faster at {faster} of {len(info.ratio)} points than {info.second}",
        source=f"{info.source}; they differ in {knobs}; whiskers: 95 % interval",
        x="point",
        y="time of second / first",
        xaxis_type="multicategory",
    )


def _around(values: Times, low: Times, high: Times) -> dict[str, Any]:
    """Whiskers from an interval's two ends."""
    above = [None if v is None or h is None else h - v for v, h in zip(values, high, strict=True)]
    below = [None if v is None or b is None else v - b for v, b in zip(values, low, strict=True)]
    return whiskers(above, below)


def _draws(draws: list[str]) -> str:
    return "draw " + ", ".join(dict.fromkeys(draws))


def _level(y: float) -> dict[str, Any]:
    line = {"color": look.GREY, "dash": "dot", "width": 2}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}

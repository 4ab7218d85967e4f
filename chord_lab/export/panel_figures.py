"""What the panels draw. No arithmetic beyond choosing what to show: numbers come from `analysis`."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from chord_lab.analysis.crossover import ThresholdInfo, TurnInfo
from chord_lab.analysis.load import GpuLoadInfo, LoadInfo, PaddingInfo
from chord_lab.analysis.point import PointInfo, ScheduleFacts
from chord_lab.analysis.roofline import RooflineInfo
from chord_lab.export import look
from chord_lab.export.figures import roofline_axes, roofline_points, span


def draw_load(info: LoadInfo, *, block_m: int, by_load: bool = False) -> go.Figure:
    """Rows per expert, cut where a block ends."""
    counts = np.asarray(info.tok_e)
    order = np.argsort(-counts, kind="stable") if by_load else np.arange(counts.size)
    names = [str(e) for e in order] if by_load else order.tolist()
    text = [f"expert {e}: {c} rows, {-(-c // block_m)} blocks" for e, c in zip(order, counts[order], strict=True)]
    figure = go.Figure(
        [
            go.Bar(
                x=names, y=counts[order], marker_color=look.BLUE, name="rows", hovertext=text, hoverinfo="text"
            ),
            go.Scatter(
                x=[names[0], names[-1]], y=[info.mean] * 2, mode="lines", name=f"mean {info.mean:.1f}",
                line={"color": look.ORANGE, "dash": "dash"}, hoverinfo="skip",
            ),
        ]
    )  # fmt: skip
    edges = [k * block_m for k in range(1, min(40, info.busiest // block_m + 1) + 1)]
    shapes = [_edge(edge) for edge in edges if edge <= info.busiest * 1.1]
    share = info.busiest / info.mean if info.mean else 0
    return look.layout(
        figure,
        title=f"The busiest expert has {share:.2f} times the mean; {info.active_experts} of {counts.size} are active",
        source=info.source + (f"; dotted lines: ends of blocks of {block_m} rows" if shapes else ""),
        x="local expert" + (", busiest first" if by_load else ""),
        y="routed rows",
        xaxis_type="category" if by_load else "linear",
        bargap=0.1,
        shapes=shapes,
    )


def _edge(y: float) -> dict[str, Any]:
    line = {"color": look.GREY, "dash": "dot", "width": 1}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def draw_padding(info: PaddingInfo, *, block_m: int) -> go.Figure:
    """Padding and passes over the weights for each block_m."""
    labels = [str(b) for b in info.block_m]
    at = info.block_m.index(block_m)
    colours = [look.VERMILION if b == block_m else look.SKY for b in info.block_m]
    figure = go.Figure(
        [
            go.Bar(x=labels, y=[100 * s for s in info.padding_share], name="padding, %", marker_color=colours),
            go.Scatter(
                x=labels, y=info.weight_passes, name="passes over an active expert's weights", yaxis="y2",
                mode="lines+markers", line_color=look.ORANGE,
            ),
        ]
    )  # fmt: skip
    passes = info.weight_passes[at]
    return look.layout(
        figure,
        title=f"block_m {block_m}: {info.padding_share[at]:.0%} of the padded rows are empty, "
        + (f"weights are read {passes:.2f} times" if passes is not None else "nothing is routed"),
        source=info.source,
        x="block_m, rows",
        y="padding, % of padded rows",
        xaxis_type="category",
        yaxis2={
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
            "tickmode": "auto",  # its own round numbers, not those beside the left axis' lines
            "title": {"text": "passes over weights"},
        },
    )


def draw_gpu_load(info: GpuLoadInfo) -> go.Figure:
    """Rows per GPU of the whole system."""
    figure = go.Figure(
        go.Bar(
            x=[f"GPU {g}" for g in info.gpu],
            y=info.rows,
            marker_color=[look.VERMILION if r == max(info.rows) else look.BLUE for r in info.rows],
            hovertext=[f"{a} active experts" for a in info.active_experts],
        )
    )
    over = info.busiest_over_mean
    title = (
        "nothing is routed"
        if over is None
        else f"The busiest GPU has {over:.2f} times the mean: the others wait for it"
    )
    return look.layout(
        figure, title=title, source=f"{info.source}; {info.placement}", x="", y="routed rows", height=300
    )


def draw_threshold(info: ThresholdInfo) -> go.Figure:
    """The model's choice against the best block_m at each measured point, and what the difference costs."""
    x = [f"{tokens:.3g}" for tokens in info.tokens_per_expert]
    changed = [look.VERMILION if c else look.BLUE for c in info.changed]
    picked = [[tokens] for tokens in info.tokens_per_expert]
    text = [
        f"model {m}, best {b}, {r:+.1%}" for m, b, r in zip(info.block_m, info.best_block_m, info.regret, strict=True)
    ]
    regret = [100 * r for r in info.regret]
    figure = go.Figure(
        [
            go.Scatter(
                x=x, y=info.best_block_m, mode="markers", name="fastest measured", hoverinfo="skip",
                marker={"symbol": "diamond-open", "size": 13, "color": look.ORANGE, "line_width": 2}, customdata=picked,
            ),
            go.Scatter(
                x=x, y=info.block_m, mode="lines+markers", name="chosen at this threshold", hovertext=text,
                hoverinfo="text", line={"color": look.BLUE, "width": 1}, marker={"size": 9, "color": changed},
                customdata=picked,
            ),
            go.Bar(
                x=x, y=regret, name="what the choice costs", marker_color=changed, hovertext=text, hoverinfo="text",
                xaxis="x2", yaxis="y2",
            ),
        ]
    )  # fmt: skip
    axis = {"gridcolor": look.GRID, "automargin": True}
    return look.layout(
        figure,
        title=_threshold_title(info),
        source=f"{info.source}; any recorded block_m may be chosen; red: differs from the default; dotted: default",
        x="",
        y="block_m, rows",
        height=460,
        xaxis={"type": "category", "showticklabels": False, "anchor": "y", "matches": "x2"},
        yaxis={"domain": [0.44, 1]},
        xaxis2={"type": "category", "anchor": "y2", "title": {"text": "tokens per expert"}, **axis},
        yaxis2={"domain": [0, 0.38], "title": {"text": "over the best, %"}, "rangemode": "tozero", **axis},
        shapes=[
            upright(_between(info.tokens_per_expert, info.threshold), look.VERMILION, "solid"),
            upright(_between(info.tokens_per_expert, info.default_threshold), look.GREY, "dot"),
        ],
    )


def _threshold_title(info: ThresholdInfo) -> str:
    if info.threshold == info.default_threshold:
        text = f"Threshold {info.threshold:g}, the default, costs"
        return f"{text} {info.mean_regret:.1%} over the best block_m on average, {info.worst_regret:.1%} at worst"
    return (
        f"Threshold {info.threshold:g}: {sum(info.changed)} rows change, {info.against_default:+.1%} time "
        f"against {info.default_threshold:g}; mean regret {info.mean_regret:.1%}"
    )


def _between(points: list[float], threshold: float) -> float:
    """Place on an axis of categories: half a step before the first point that the threshold does not pass."""
    return sum(point < threshold for point in points) - 0.5


def upright(x: float, colour: str, dash: str) -> dict[str, Any]:
    """A line across the whole figure at `x`."""
    line = {"color": colour, "dash": dash, "width": 2}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x, "line": line}


def draw_turn(info: TurnInfo, at: ThresholdInfo) -> go.Figure:
    """Mean regret of every threshold; it changes where a measured point goes over to the other rule."""
    points = sorted(set(at.tokens_per_expert))
    edges = [0.0, *points, max(info.threshold)]
    top = min(info.best_high, edges[-1])
    best = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": info.best_low, "x1": top, "line_width": 0}
    figure = go.Figure(
        go.Scatter(
            x=edges, y=[100 * r for r in (*info.mean_regret, info.mean_regret[-1])], mode="lines", name="mean regret",
            line={"shape": "hv", "color": look.BLUE},
        )
    )  # fmt: skip
    good = "is among the best" if info.default_is_best else f"costs {info.default_regret - info.best_regret:.1%} more"
    return look.layout(
        figure,
        title=f"Least regret with a threshold {span(info.best_low, info.best_high)} tokens per expert; "
        f"the default of {info.default_threshold:g} {good}",
        source=f"{info.source}; green: thresholds that the noise cannot tell from the best",
        x="threshold, tokens per expert",
        y="mean regret, %",
        height=300,
        yaxis_rangemode="tozero",
        shapes=[
            best | {"fillcolor": look.GREEN, "opacity": 0.15},
            upright(at.threshold, look.VERMILION, "solid"),
            upright(info.default_threshold, look.GREY, "dot"),
        ],
    )


def draw_point(info: PointInfo | None, *, ours: ScheduleFacts, rival: ScheduleFacts) -> go.Figure:
    """Every timed schedule of a point by block_m, the two at hand on top."""
    figure = go.Figure()
    if info is not None:
        figure.add_trace(
            go.Scatter(
                x=[str(b) for b in info.block_m], y=info.time_us, mode="markers", name=f"{len(info.label)} recorded",
                marker={"color": look.GREY, "size": 6, "opacity": 0.6}, hovertext=info.label, hoverinfo="text+y",
                customdata=[[label] for label in info.label],
            )
        )  # fmt: skip
    for facts, name, colour, symbol in (
        (rival, "compared with", look.BLUE, "diamond-open"),
        (ours, "at hand", look.VERMILION, "star"),
    ):
        shown = f"{name}: {facts.schedule.label()}"
        figure.add_trace(
            go.Scatter(
                x=[str(facts.schedule.block_m)], y=[facts.time_us], mode="markers", name=shown, hovertext=[shown],
                hoverinfo="text+y", marker={"color": colour, "size": 14, "symbol": symbol},
                error_y=_whiskers(facts),
            )
        )  # fmt: skip
    blocks = sorted({*(info.block_m if info else ()), ours.schedule.block_m, rival.schedule.block_m})
    failed = f"; {info.num_failed} more failed" if info and info.num_failed else ""
    return look.layout(
        figure,
        title=_point_title(ours, rival),
        source=(info.source if info else "nothing was timed at this point") + f"{failed}; dotted: floor of this point",
        x="block_m, rows",
        y="time, us",
        xaxis={"type": "category", "categoryorder": "array", "categoryarray": [str(b) for b in blocks]},
        shapes=[_edge(ours.floor_us)] if ours.floor_us else [],
        yaxis_rangemode="tozero",
    )


def _whiskers(facts: ScheduleFacts) -> dict[str, Any]:
    if facts.low_us is None or facts.high_us is None or facts.time_us is None:
        return {"visible": False}
    return {
        "type": "data",
        "symmetric": False,
        "array": [facts.high_us - facts.time_us],
        "arrayminus": [facts.time_us - facts.low_us],
    }


def _point_title(ours: ScheduleFacts, rival: ScheduleFacts) -> str:
    if ours.time_us is None:
        return "No time is known for the schedule at hand"
    text = f"{ours.time_us:.1f} us {'predicted' if _is_predicted(ours) else 'recorded'}"
    if rival.time_us and rival.schedule != ours.schedule:
        text += f", {rival.time_us / ours.time_us:.2f} times as fast as the one compared with"
    if ours.share_of_floor:
        over = 1 / ours.share_of_floor - 1
        text += (
            f"; {abs(over):.0%} {'above' if over >= 0 else 'below'} the floor"
            if abs(over) >= 0.005
            else "; at the floor"
        )
    return text


def _is_predicted(facts: ScheduleFacts) -> bool:
    return facts.source.startswith("predicted")


def draw_roofline_of(info: RooflineInfo | None, *, ours: ScheduleFacts) -> go.Figure:
    """The scenario's best points under the ceilings, and the schedule at hand."""
    figure = go.Figure() if info is None else roofline_points(info)
    if ours.tflops and ours.bandwidth_gbps:
        figure.add_trace(
            go.Scatter(
                x=[ours.tflops / ours.bandwidth_gbps * 1e3], y=[ours.tflops], mode="markers", name="at hand",
                marker={"color": look.VERMILION, "symbol": "star", "size": 16},
            )
        )  # fmt: skip
    share = "an unknown share" if ours.share_of_floor is None else f"{ours.share_of_floor:.0%}"
    how = "should by prediction reach" if _is_predicted(ours) else "reaches"
    title = f"This point is {ours.bound} bound; the schedule at hand {how} {share} of the measured ceiling"
    unknown = {
        "source": "nothing was timed in this scenario; the ceiling is that of the other records",
        "x": "FLOPs per byte that must move",
        "y": "TFLOPS of real rows",
    }
    return look.layout(figure, title=title, **(roofline_axes(info) if info else unknown), height=360)

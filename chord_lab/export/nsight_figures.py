"""Figures of profiles. No arithmetic beyond choosing what to show: numbers come from `traces.views`."""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from chord_lab.analysis.load import LoadInfo
from chord_lab.export import look, palette
from chord_lab.traces.table import shorten
from chord_lab.traces.views import Bars, Lane, Roofline, RooflinePoint, SideBySide, Timeline

LANE_PX = 26
LETTERS = 140  # that fit beside each other over a timeline's width
FEWEST_LETTERS, MOST_LETTERS = 16, 60  # of a name on its bar; hovering shows all


def draw_nsight_timeline(
    info: Timeline, *, source: str, selected: int | None = None, load: LoadInfo | None = None, load_title: str = ""
) -> go.Figure:
    """Lanes of ranges over lanes of kernels; above them the per-expert load of the selected kernel.

    Bars carry ``customdata`` [table row, bars merged]; traces are named ``kernels`` and ``ranges``.
    """
    load_px, lanes_px = 150, LANE_PX * max(4, len(info.lanes))
    figure = make_subplots(
        rows=2, cols=1, row_heights=[load_px, lanes_px], vertical_spacing=70 / (load_px + lanes_px + 70)
    )
    counts = load.tok_e if load else [0]  # a bar of no height: plotly draws the axes of an empty trace at NaN
    figure.add_trace(
        go.Bar(
            x=list(range(len(counts))), y=counts, marker_color=look.BLUE, name="load",
            hovertemplate="expert %{x}: %{y} rows<extra></extra>", showlegend=False,
        ),
        row=1, col=1,
    )  # fmt: skip
    for kind, name, colour in (("range", "ranges", look.SKY), ("kernel", "kernels", look.BLUE)):
        lanes = [lane for lane in info.lanes if lane.kind == kind]
        letters = LETTERS / (info.end_us - info.start_us)
        figure.add_trace(_bars_of(lanes, name, colour, selected if kind == "kernel" else None, letters), row=2, col=1)
    shown = f"{info.end_us - info.start_us:,.1f} us"
    title = f"{info.busy_share:.0%} of the {shown} shown have a kernel running"
    if math.isnan(info.busy_share):
        title = f"{info.num_shown:,} kernels, {shown} if they ran one after another"
    look.layout(
        figure, title=title, source="; ".join([source, *info.notes[:1]]), x="", y="", height=load_px + lanes_px + 240
    )
    axis = {"gridcolor": look.GRID, "zerolinecolor": look.GRID, "linecolor": look.GRID, "automargin": True}
    figure.update_layout(
        barmode="overlay",
        bargap=0.15,
        xaxis={"title": {"text": load_title or "local expert (select a kernel of a GEMM)"}},
        yaxis={"title": {"text": "routed rows"}, "range": [0, 1.05 * max([*counts, 1])]},
        xaxis2={"title": {"text": "time, us"}, "range": [info.start_us, info.end_us], **axis},
        yaxis2={**axis, "autorange": "reversed", "type": "category", "title": {"text": ""}, "fixedrange": True},
    )
    return figure


def _bars_of(lanes: list[Lane], name: str, colour: str, selected: int | None, letters: float) -> go.Bar:
    """``letters``: how many fit into a microsecond's width; a name of which too little fits is seen by hovering."""
    flat = [
        (lane.name, lane.row[i], lane.label[i], lane.start_us[i], lane.time_us[i], lane.merged[i])
        for lane in lanes
        for i in range(len(lane.row))
    ]
    colours = [look.VERMILION if row == selected else colour for _, row, *_ in flat]
    texts = [f"{label}<br>{start:,.3f} us, {time:,.3f} us long" for _, _, label, start, time, _ in flat]
    return go.Bar(
        orientation="h",
        y=[lane for lane, *_ in flat],
        base=[start for _, _, _, start, _, _ in flat],
        x=[time for *_, time, _ in flat],
        customdata=[[row, merged] for _, row, *_, merged in flat],
        text=[_fitting(label, min(int(time * letters), MOST_LETTERS)) for _, _, label, _, time, _ in flat],
        textposition="inside",
        insidetextanchor="start",
        constraintext="inside",
        textangle=0,
        hovertext=texts,
        hoverinfo="text",
        marker={"color": colours, "line": {"width": 0.5, "color": look.GREY}},
        name=name,
        showlegend=False,  # lanes are named at the axis; a legend would show the colour of the first bar alone
    )


def _fitting(label: str, letters: int) -> str:
    """As much of a name as fits: both its ends, its first word alone, or nothing."""
    if letters >= min(len(label), FEWEST_LETTERS):
        return shorten(label, letters)
    first = label.split(maxsplit=1)[0] if label.strip() else ""
    return first if len(first) <= letters else ""


def draw_nsight_roofline(info: Roofline, *, source: str, chosen: tuple[str, ...] = ()) -> go.Figure:
    """Points by counted traffic under the ceilings measured beside them; customdata is the record's key."""
    x = np.asarray([p.intensity for p in info.points])
    grid = np.geomspace(x.min() / 3, x.max() * 3, 60)
    figure = go.Figure()
    if info.copy_gbps:
        roof = grid * info.copy_gbps / 1e3
        roof = np.minimum(roof, info.dense_tflops) if info.dense_tflops else roof
        figure.add_scatter(
            x=grid, y=roof, mode="lines", name=_ceilings_name(info), line_color=look.GREY, hoverinfo="skip"
        )
    names = list(dict.fromkeys((p.projection, p.routed_m) for p in info.points))
    for i, name in enumerate(names):
        points = [p for p in info.points if (p.projection, p.routed_m) == name]
        big = [p.key in chosen for p in points]
        figure.add_scatter(
            x=[p.intensity for p in points],
            y=[p.tflops for p in points],
            mode="markers",
            name=f"{name[0]}, {name[1]:,} rows",
            customdata=[p.key for p in points],
            hoverinfo="text",
            hovertext=[_roofline_text(p) for p in points],
            marker={
                "size": [16 if b else 10 for b in big],
                "color": look.CYCLE[i % len(look.CYCLE)],
                "symbol": look.SYMBOLS[i % len(look.SYMBOLS)],
                "line": {"width": [3 if b else 0 for b in big], "color": look.VERMILION},
            },
        )
    best = max(info.points, key=lambda p: p.tflops)
    title = f"Most work a second: {best.tflops:,.0f} TFLOPS while moving {best.dram_gbps:,.0f} GB/s, by {best.label}"
    return look.layout(
        figure,
        title=title,
        source="; ".join([f"{source}; FLOPs of real rows, DRAM bytes as counted", *info.notes]),
        x="FLOPs per byte of DRAM traffic",
        y="TFLOPS of real rows",
        xaxis=look.log_axis(list(x)),
        yaxis=look.log_axis([p.tflops for p in info.points]),
    )


def _ceilings_name(info: Roofline) -> str:
    dense = f", dense bf16 product {info.dense_tflops:,.0f} TFLOPS" if info.dense_tflops else ""
    return f"measured ceilings: copy {info.copy_gbps:,.0f} GB/s{dense}"


def _roofline_text(p: RooflinePoint) -> str:
    return (
        f"{p.label}<br>{p.tflops:,.1f} TFLOPS, {p.dram_gbps:,.0f} GB/s, tensor pipe {p.tensor_pct:.0f} %<br>"
        f"{p.traffic_over_need:.2f} times the bytes that must move"
    )


def draw_stalls(info: SideBySide, *, source: str) -> go.Figure:
    """Why warps did not issue, schedule against schedule."""
    figure = _grouped(info.stalls, info)
    axis = "cycles that a warp waits, for each instruction it issues"
    look.layout(figure, title=info.finding, source="; ".join([source, *info.notes]), x=axis, y="")
    return _bar_room(figure, len(info.stalls.name))


def draw_uses(info: SideBySide, *, source: str) -> go.Figure:
    """Pipes and shares in percent, schedule against schedule."""
    bars = Bars(
        [*info.shares.name, *info.pipes.name],
        [*info.shares.label, *(f"{label}, % busy" for label in info.pipes.label)],
        [[*a, *b] for a, b in zip(info.shares.values, info.pipes.values, strict=True)],
        [*info.shares.meaning, *info.pipes.meaning],
    )
    figure = _grouped(bars, info)
    look.layout(figure, title=_uses_title(info), source=source, x="percent", y="", xaxis_range=[0, 100])
    return _bar_room(figure, len(bars.name))


def _uses_title(info: SideBySide) -> str:
    """How near DRAM and the busiest pipe come to their peaks."""
    words = []
    if "dram_pct" in info.shares.name:
        at = info.shares.name.index("dram_pct")
        words.append(f"DRAM runs at {_percents([values[at] for values in info.shares.values])} of its peak")
    if info.pipes.name:
        busiest = [max(zip(values, info.pipes.label, strict=True)) for values in info.pipes.values]
        which = ", ".join(dict.fromkeys(label for _, label in busiest))
        words.append(f"the busiest pipe is busy for {_percents([value for value, _ in busiest])} ({which})")
    return "; ".join(words) or "Neither DRAM nor pipe counters were collected"


def _percents(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _grouped(bars: Bars, info: SideBySide) -> go.Figure:
    figure = go.Figure()
    for i, (schedule, values) in enumerate(zip(info.names, bars.values, strict=True)):
        figure.add_bar(
            orientation="h",
            y=[_with_meaning(*texts) for texts in zip(bars.label, bars.meaning, strict=True)],
            x=values,
            name=schedule,
            marker_color=palette.of(palette.SLICING, schedule.removeprefix("token_slicing "), i),
            marker_pattern_shape=("", "/", "x", ".")[i % 4],
            hovertext=bars.label,
            hovertemplate="%{hovertext}: %{x:.3g}<extra>%{fullData.name}</extra>",
        )
    return figure.update_layout(barmode="group")


def _with_meaning(label: str, meaning: str) -> str:
    """A counter's name, and under it in small letters what it says."""
    short = meaning.partition(";")[0]
    return f"{label}<br><span style='font-size:9px'>{short}</span>" if short else label


def _bar_room(figure: go.Figure, groups: int) -> go.Figure:
    """Height for so many groups of bars."""
    return figure.update_layout(yaxis_autorange="reversed", height=36 * max(3, groups) + 190)

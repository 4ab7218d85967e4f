"""Infos of `analysis` to figures: the title states the finding, axes carry units, the source stands under the title.

No arithmetic beyond what a label needs. The panels' figures are in `panel_figures`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from w4a16_moe.block_m import DEFAULT_THRESHOLD

from chord_lab.analysis import (
    CrossoverInfo,
    LayersInfo,
    RooflineInfo,
    SlicingInfo,
    TurnInfo,
    WavesInfo,
    changes_in_words,
)
from chord_lab.analysis.crossover import NOISE
from chord_lab.export import look, palette
from chord_lab.sweeps.winners import Winner

Times = Sequence[float | None]
MOST_CELLS = 40_000  # a heatmap of more cells than this is thinned, and says so
MOST_RUNS = 4  # stretches of tokens that a title can name


def draw_block_m(info: CrossoverInfo) -> go.Figure:
    """Time against block_m, one line for each number of tokens per expert; a star marks each line's best."""
    figure = go.Figure()
    labels = [str(b) for b in info.block_m]
    for j, colour in enumerate(palette.ordered(len(info.routed_m))):
        times = [row[j] for row in info.time_us]
        best = info.block_m.index(info.best_block_m[j])
        figure.add_trace(
            go.Scatter(
                x=labels, y=times, mode="lines+markers", name=f"{info.tokens_per_expert[j]:.3g} rows/expert",
                connectgaps=True, line={"color": colour, "dash": look.DASHES[j % len(look.DASHES)]},
                marker={
                    "size": [13 if i == best else 6 for i in range(len(labels))],
                    "symbol": ["star" if i == best else "circle" for i in range(len(labels))],
                },
                hovertext=[row[j] for row in info.schedule], hoverinfo="text+y+name",
                error_y=_whiskers(times, [row[j] for row in info.low_us], [row[j] for row in info.high_us]),
            )
        )  # fmt: skip
    first, last = info.best_block_m[0], info.best_block_m[-1]
    moves = f"grows from {first} to {last}" if last > first else f"is {first} throughout" if last == first else "falls"
    span = f"{info.tokens_per_expert[0]:.3g} to {info.tokens_per_expert[-1]:.3g} tokens per expert"
    return look.layout(
        figure,
        title=f"{info.projection}: the best block_m {moves} over {span}",
        source=f"{info.source}; {info.scenario}, draw {info.draw}; star: fastest; whiskers: quartiles of repeats",
        x="block_m, rows",
        y="time, us",
        yaxis=look.log_axis([t for row in info.time_us for t in row], alone=True),
        height=430,
        xaxis={"type": "category", "categoryorder": "array", "categoryarray": labels},
    )


def _whiskers(
    time: Sequence[float | None], low: Sequence[float | None], high: Sequence[float | None]
) -> dict[str, Any]:
    """Quartiles as error bars; nothing where they coincide with the time."""
    above = [None if t is None or h is None else h - t for t, h in zip(time, high, strict=True)]
    below = [None if t is None or b is None else t - b for t, b in zip(time, low, strict=True)]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1, "width": 2}


def draw_crossover(info: CrossoverInfo, turn: TurnInfo | None = None) -> go.Figure:
    """How much slower each block_m is than the best one, along tokens per expert."""
    figure = go.Figure()
    x = info.tokens_per_expert
    for i, colour in enumerate(palette.ordered(len(info.block_m))):
        over = [None if t is None else 100 * (t / b - 1) for t, b in zip(info.time_us[i], info.best_us, strict=True)]
        figure.add_trace(
            go.Scatter(
                x=x, y=over, mode="lines+markers", name=f"block_m {info.block_m[i]}", connectgaps=True,
                line={"color": colour, "dash": look.DASHES[i % len(look.DASHES)]},
                marker={"symbol": look.SYMBOLS[i % len(look.SYMBOLS)], "size": 8},
                hovertext=info.schedule[i], hoverinfo="text+x+y+name",
            )
        )  # fmt: skip
    shapes = [_upright(DEFAULT_THRESHOLD, look.GREY, "dot")]
    if turn is not None:
        top = turn.best_high if math.isfinite(turn.best_high) else max(2 * x[-1], 1.1 * DEFAULT_THRESHOLD)
        band = {
            "type": "rect",
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line_width": 0,
            "fillcolor": look.GREEN,
            "opacity": 0.12,
        }
        shapes.append(band | {"x0": max(turn.best_low, x[0] / 2), "x1": top})
    figure.update_layout(shapes=shapes)
    return look.layout(
        figure,
        title=f"{info.projection}: {_turn_sentence(info, turn)}",
        source=f"{info.source}; {info.scenario}, draw {info.draw}; dotted: {DEFAULT_THRESHOLD:g}"
        + ("; green: thresholds as good as the best" if turn else ""),
        x="tokens per expert (mean rows of a local expert)",
        y="time over the best block_m, %",
        xaxis=look.log_axis(x),
        yaxis_range=[-2, min(100.0, _most(figure) * 1.1 + 2)],
        height=430,
    )


def _most(figure: go.Figure) -> float:
    return max((y for trace in figure.data for y in trace.y if y is not None), default=0.0)


def _turn_sentence(info: CrossoverInfo, turn: TurnInfo | None) -> str:
    if turn is None:
        changes = changes_in_words(info)
        return f"block_m turns from {changes} tokens per expert" if changes else "one block_m serves every point"
    cost = turn.default_regret - turn.best_regret
    usual = f"{turn.default_threshold:g}"
    verdict = f"{usual} is among the best" if turn.default_is_best else f"{usual} costs {cost:.1%} more"
    return f"least time with a threshold {span(turn.best_low, turn.best_high)} tokens per expert; {verdict}"


def span(low: float, high: float) -> str:
    """An interval of thresholds in words."""
    if math.isinf(high):
        return f"above {low:.3g}" if low else "of any number of"
    return f"between {low:.3g} and {high:.3g}" if low else f"up to {high:.3g}"


def _upright(x: float, colour: str, dash: str) -> dict[str, Any]:
    line = {"color": colour, "dash": dash, "width": 2}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x, "line": line}


def draw_winners(winners: Sequence[Winner], source: str) -> go.Figure:
    """Gain of the fastest schedule over the default at each point, with its 95 % interval; colour is the verdict."""
    figure = go.Figure()
    shown = [w for w in winners if w.margin is not None]
    for verdict in ("win", "tie"):  # both over all places, so that the axis keeps their order
        part = [w if w.verdict == verdict else None for w in shown]
        gain = [None if w is None else 100 * float(w.margin or 0) for w in part]
        figure.add_trace(
            go.Bar(
                x=_places(shown), y=gain, name=verdict, marker_color=palette.VERDICT[verdict],
                hovertext=[w.best.label() if w and w.best else "" for w in part], hoverinfo="text+y+x",
                error_y=_interval(part, gain),
            )
        )  # fmt: skip
    wins = sum(w.verdict == "win" for w in winners)
    best = max((float(w.margin or 0) for w in shown if w.verdict == "win"), default=0.0)
    none = sum(w.verdict == "none" for w in winners)
    more = f" (up to {best:.0%} less time)" if wins else ""
    return look.layout(
        figure,
        title=f"{wins} of {len(winners)} points beat the default by more than the noise{more}"
        + (f"; {none} have no result" if none else ""),
        source=f"{source}; whiskers: 95 % interval of the paired repeats",
        x="routed rows",
        y="time saved, %",
        xaxis_type="multicategory",
        barmode="overlay",
        bargap=0.3,
    )


def _places(part: Sequence[Winner]) -> list[list[str]]:
    """Projection and routed rows, for an axis of two levels."""
    return [[w.projection for w in part], [str(w.routed_m) for w in part]]


def _interval(part: Sequence[Winner | None], gain: Sequence[float | None]) -> dict[str, Any]:
    above, below = [], []
    for w, g in zip(part, gain, strict=True):
        known = w is not None and g is not None and w.ratio_low is not None and w.ratio_high is not None
        above.append(100 * (1 - w.ratio_low) - g if known else None)  # type: ignore[union-attr,operator]
        below.append(g - 100 * (1 - w.ratio_high) if known else None)  # type: ignore[union-attr,operator]
    return whiskers(above, below)


def whiskers(above: Times, below: Times) -> dict[str, Any]:
    """Error bars of a bar chart, upwards and downwards."""
    bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return bars | {"thickness": 1, "width": 3, "color": look.TEXT}


def draw_roofline(info: RooflineInfo) -> go.Figure:
    """Every record under the measured ceilings."""
    return look.layout(roofline_points(info), title=_roofline_title(info), **roofline_axes(info), height=460)


def roofline_points(info: RooflineInfo) -> go.Figure:
    """The ceilings and a trace for each implementation and projection; far slower ones are left to the source line."""
    figure = go.Figure()
    if info.ridge and info.copy_gbps and info.dense_tflops:
        low, high = min(info.intensity) / 1.5, max(*info.intensity, info.ridge) * 1.5
        figure.add_trace(
            go.Scatter(
                x=[low, info.ridge, high], y=[low * info.copy_gbps / 1e3, info.dense_tflops, info.dense_tflops],
                mode="lines", name="measured ceilings", line={"color": look.GREY, "dash": "dash"}, hoverinfo="skip",
            )
        )  # fmt: skip
    far = _far_below(info)
    keys = list(zip(info.implementation, info.projection, strict=True))
    for name, projection in (key for key in dict.fromkeys(keys) if key[0] not in far):
        rows = [i for i, key in enumerate(keys) if key == (name, projection)]
        figure.add_trace(
            go.Scatter(
                x=[info.intensity[i] for i in rows], y=[info.tflops[i] for i in rows], mode="markers",
                name=f"{palette.NAMES.get(name, name)}, {projection}",
                marker={
                    # A ring around its best tile, which often is the same record.
                    "color": palette.of(palette.IMPLEMENTATION, name), "size": 13 if name == "humming" else 9,
                    "symbol": "circle" if projection == "gate_up" else "diamond-open",
                },
                hovertext=[_roofline_hover(info, i) for i in rows], hoverinfo="text",
            )
        )  # fmt: skip
    return figure


def roofline_axes(info: RooflineInfo) -> dict[str, Any]:
    """Axes and the source line of a roofline, for `look.layout`."""
    return {
        "source": "; ".join(
            (info.source, "bytes that must move and FLOPs of real rows only", *_above(info), *_far_below(info).values())
        ),
        "x": "FLOPs per byte that must move",
        "y": "TFLOPS of real rows",
        "xaxis": look.log_axis(info.intensity),
        "yaxis": look.log_axis(info.tflops),
    }


def _above(info: RooflineInfo) -> list[str]:
    """Words for points above the matmul ceiling: they are no error, and no reader should have to guess."""
    over = any(
        s is not None and s > 1.005 and b == "compute" for s, b in zip(info.share_of_floor, info.bound, strict=True)
    )
    return ["the flat ceiling is the rate of one large bf16 matmul, which shorter launches may exceed"] if over else []


def _far_below(info: RooflineInfo) -> dict[str, str]:
    """Implementations that stay under a tenth of the ceilings, which would flatten the others -> words for it."""
    shares: dict[str, list[float]] = {}
    for name, share in zip(info.implementation, info.share_of_floor, strict=True):
        shares.setdefault(name, []).append(1.0 if share is None else share)
    return {
        name: f"{palette.NAMES.get(name, name)} reaches {max(found):.0%} and is not drawn"
        for name, found in shares.items()
        if max(found) < 0.1 and name != "w4a16_moe"
    }


def _roofline_hover(info: RooflineInfo, i: int) -> str:
    share = info.share_of_floor[i]
    text = f"{info.label[i]}<br>{info.routed_m[i]} rows: {info.time_us[i]:.1f} us, {info.bandwidth_gbps[i]:.0f} GB/s"
    text += f"<br>{share:.0%} of the {info.bound[i]} ceiling" if share else ""
    return text + (f"<br>{info.impossible[i]}" if info.impossible[i] else "")


def _roofline_title(info: RooflineInfo) -> str:
    ours = [i for i, name in enumerate(info.implementation) if name == "w4a16_moe"]
    shares = [s for i in ours if (s := info.share_of_floor[i]) is not None]
    if not shares:
        return "No ceilings were measured in this run, so no share of them is known"
    bad = sum(bool(text) for text in info.impossible)
    tail = f"; {bad} times are beyond what the card can do" if bad else ""
    return f"Our best schedules reach {min(shares):.0%} to {max(shares):.0%} of the measured ceiling{tail}"


def draw_slicing(info: SlicingInfo) -> go.Figure:
    """Time of each token slicing, other knobs equal."""
    figure = go.Figure()
    hover = [
        f"{s}<br>{f:.2f} of {n} slices of a tile hold rows"
        for s, f, n in zip(info.schedule, info.slices_per_tile, info.slices_in_tile, strict=True)
    ]
    for k, name in enumerate(info.slicing):
        figure.add_trace(
            go.Scatter(
                x=info.tokens_per_expert, y=info.time_us[k], mode="lines+markers", name=name, hovertext=hover,
                hoverinfo="text+y+name", line={"color": palette.of(palette.SLICING, name, k), "dash": look.DASHES[k]},
                marker={"symbol": look.SYMBOLS[k], "size": 8},
                error_y=_whiskers(info.time_us[k], info.low_us[k], info.high_us[k]),
            )
        )  # fmt: skip
    return look.layout(
        figure,
        title=slicing_finding(info),
        source=f"{info.source}; {_shared_knobs(info)}; whiskers: quartiles of repeats",
        x="tokens per expert",
        y="time, us",
    )


def _shared_knobs(info: SlicingInfo) -> str:
    """The schedule that the slicings have in common: another one may be faster, and rank them otherwise."""
    shared = list(dict.fromkeys(info.schedule))
    return f"all {shared[0]}" if len(shared) == 1 else "other knobs equal at each point, hover names them"


def slicing_finding(info: SlicingInfo) -> str:
    """Which slicing leads where along the tokens; or which one leads most often, and what the others take over it."""
    columns = zip(*info.time_us, strict=True)
    at = [{n: t for n, t in zip(info.slicing, times, strict=True) if t is not None} for times in columns]
    runs = _leaders(at)
    if 1 < len(runs) <= MOST_RUNS:
        x = info.tokens_per_expert
        spans = [f"{name} at {x[a]:.3g}" if a == b else f"{name} from {x[a]:.3g} to {x[b]:.3g}" for name, a, b in runs]
        return f"{info.projection}: in the lead {', then '.join(spans)} tokens per expert"
    firsts = [min(times, key=lambda name: times[name]) for times in at]
    best = max(info.slicing, key=firsts.count)
    over = []
    for name in info.slicing:
        more = [100 * (times[name] / times[best] - 1) for times in at if name in times and best in times]
        if name != best and more:
            over.append(f"{name} {' to '.join(dict.fromkeys(f'{m:+.1f}' for m in (min(more), max(more))))}%")
    return (
        f"{info.projection}: {best} is fastest at {firsts.count(best)} of {len(at)} points; over it: {', '.join(over)}"
    )


def _leaders(at: list[dict[str, float]]) -> list[tuple[str, int, int]]:
    """(name, first, last) of as few stretches as possible in each of which one name is within `NOISE` of the least."""
    runs: list[tuple[set[str], int, int]] = []
    for place, times in enumerate(at):
        near = {name for name, time in times.items() if time <= min(times.values()) * (1 + NOISE)}
        if runs and runs[-1][0] & near:
            names, first, _ = runs.pop()
            runs.append((names & near, first, place))
        else:
            runs.append((near, place, place))

    return [(" or ".join(name for name in at[a] if name in names), a, b) for names, a, b in runs]


def draw_waves(info: WavesInfo) -> go.Figure:
    """Time against waves over the SMs: the tail of the last wave is idle time."""
    figure = go.Figure()
    for k, streamed in enumerate((False, True)):
        rows = [i for i, s in enumerate(info.stream_k) if s is streamed]
        if not rows:
            continue
        figure.add_trace(
            go.Scatter(
                x=[info.waves[i] for i in rows], y=[100 * info.idle_share[i] for i in rows], mode="markers",
                name="stream-K" if streamed else "tiles by waves",
                marker={"color": (look.BLUE, look.ORANGE)[k], "symbol": look.SYMBOLS[k], "size": 7},
                hovertext=[f"{info.label[i]}<br>{info.routed_m[i]} rows: {info.time_us[i]:.1f} us" for i in rows],
                hoverinfo="text",
            )
        )  # fmt: skip
    worst = max(range(len(info.label)), key=lambda i: info.idle_share[i])
    return look.layout(
        figure,
        title=f"Up to {info.idle_share[worst]:.0%} of the slot-time is idle in the last wave "
        f"({info.num_tiles[worst]:,} tiles in {info.waves[worst]:.2f} waves)",
        source=f"{info.source}; {info.num_sms} SMs; if all tiles took equally long",
        x="waves (tiles / slots)",
        y="idle slot-time, %",
        xaxis=look.log_axis(info.waves, alone=True),
    )


def draw_layers(info: LayersInfo) -> go.Figure:
    """Load of each expert of each layer relative to its layer's mean; layers without rows stay blank."""
    width = max(info.num_experts, default=0)
    step = max(1, math.ceil(len(info.layer) * width / MOST_CELLS))
    layers = info.layer[::step]
    cells = [
        [c * n / sum(counts) for c in counts] if sum(counts) else [None] * n
        for counts, n in zip(info.tok_e[::step], info.num_experts[::step], strict=True)
    ]
    figure = go.Figure(
        go.Heatmap(z=cells, y=layers, colorscale="Cividis", colorbar={"title": "rows / mean"}, hoverongaps=False)
    )
    middle = info.median_balancedness
    thinned = f"; one layer in {step} shown" if step > 1 else ""
    empty = f"; {info.num_empty} layers without rows" if info.num_empty else ""
    return look.layout(
        figure,
        title="No layer has a routed row"
        if not middle
        else f"In the median layer the busiest expert has {1 / middle:.1f} times the mean (balancedness {middle:.2f})",
        source=f"{info.source}; {info.definition}{empty}{thinned}",
        x="expert",
        y="layer",
    )

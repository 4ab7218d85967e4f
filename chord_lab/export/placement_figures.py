"""Where things lie: tiles on the card's slots over time, weights in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from chord_lab.analysis.raster import IDLE, RasterInfo
from chord_lab.analysis.timeline import TimelineInfo
from chord_lab.export import look
from chord_lab.export.panel_figures import upright


def draw_timeline(info: TimelineInfo, raster: RasterInfo) -> go.Figure:
    """Slots over time, coloured by expert."""
    experts = int(raster.expert.max(initial=0)) + 1
    # Each expert one flat colour, neighbours in the order differ; idle stretches show the page.
    colours = [look.CLEAR, *(look.CYCLE[e % len(look.CYCLE)] for e in range(experts))]
    bands = [((i + side) / len(colours), colour) for i, colour in enumerate(colours) for side in (0, 1)]
    figure = go.Figure(
        go.Heatmap(
            z=raster.expert, x=raster.time_us, y=raster.slot, zmin=IDLE - 0.5, zmax=experts - 0.5,
            colorscale=bands, showscale=False, hovertemplate="slot %{y}, %{x:.1f} us: expert %{z}<extra></extra>",
        )
    )  # fmt: skip
    shapes, dashed = [], ""
    if info.recorded_us is not None:
        shapes, dashed = [upright(info.recorded_us, look.VERMILION, "dash")], "; dashed: recorded time"
    thinned = "" if len(raster.slot) == raster.num_slots else f"; {len(raster.slot)} of {raster.num_slots} slots shown"
    checked = "not recorded" if info.error is None else f"recorded {info.recorded_us:.1f} us, error {info.error:+.0%}"
    return look.layout(
        figure,
        title=f"Simulated {info.simulated_us:.1f} us ({checked}); slots are busy {info.busy_share:.0%} of the time",
        source=f"{info.source}; one colour per expert, neighbours differ{dashed}{thinned}",
        x="time, us",
        y="slot (SM x CTA)",
        height=420,
        hovermode="closest",
        shapes=shapes,
    )


def draw_layout(loads: npt.NDArray[np.int64], *, chosen: int, layout: str) -> go.Figure:
    """``loads [n, k]``: which 16-byte load holds each weight of a block; the chosen one stands out."""
    picked = loads == chosen
    rows, columns = np.nonzero(picked)
    figure = go.Figure(
        [
            go.Heatmap(
                z=loads, colorscale="Cividis", colorbar={"title": "load"}, opacity=0.55,
                hovertemplate="n %{y}, k %{x}: load %{z}<extra></extra>",
            ),
            go.Scatter(
                x=columns, y=rows, mode="markers", name=f"load {chosen}", hoverinfo="skip",
                marker={"symbol": "square", "size": 7, "color": look.VERMILION},
            ),
        ]
    )  # fmt: skip
    return look.layout(
        figure,
        title=f"{layout}: one 16-byte load brings {int(picked.sum())} weights of {len(set(rows.tolist()))} output "
        f"columns (n) and {len(set(columns.tolist()))} reduction elements (k)",
        source=f"read back from the packer; a block of {loads.shape[0]} x {loads.shape[1]}; red: the chosen load",
        x="k, reduction element",
        y="n, output column",
        height=480,
        xaxis_range=[-0.5, loads.shape[1] - 0.5],
        yaxis_range=[loads.shape[0] - 0.5, -0.5],
    )

"""Draw docs/gallery from the shipped records: one picture a figure, each titled by what it found.

    .venv/bin/python -m scripts.gallery [--out docs/gallery]

Pictures come from kaleido, which drives an installed Chromium or Chrome.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from chord_lab import analysis
from chord_lab.analysis.raster import raster_info
from chord_lab.errors import UserError
from chord_lab.export import comparison_figures, figures, look, panel_figures, placement_figures
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.selection import Selection

ROOT = pathlib.Path(__file__).resolve().parent.parent
DECODE, PREFILL, SMALL_BATCH = "kimi-k2/ep8/decode", "kimi-k2/ep8/prefill", "kimi-k2/tp8/decode"
WIDTH, SCALE = 1000, 1.5
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def load(data: Measurements) -> go.Figure:
    """Rows per expert of one decode step."""
    look_at = Selection(scenario=DECODE, num_tokens=40)
    info = analysis.load_info(look_at.tok_e(), source=f"{DECODE}, 40 tokens per GPU, drawn: uniform, seed 0")
    return panel_figures.draw_load(info, block_m=8, by_load=True)


def padding(data: Measurements) -> go.Figure:
    """What each block_m costs at that step."""
    tok_e = Selection(scenario=DECODE, num_tokens=40).tok_e()
    source = f"{DECODE}, 40 tokens per GPU, drawn: uniform, seed 0"
    return panel_figures.draw_padding(analysis.padding_info(tok_e, source=source), block_m=16)


def block_m(data: Measurements) -> go.Figure:
    """Time against block_m."""
    return figures.draw_block_m(data.crossover(PREFILL, "gate_up", "uniform"))


def threshold(data: Measurements) -> go.Figure:
    """The rule at 80 tokens per expert, judged."""
    return panel_figures.draw_threshold(analysis.threshold_info(data.crossover(PREFILL, "gate_up", "uniform")))


def slicing(data: Measurements) -> go.Figure:
    """Token slicings in decode."""
    info = analysis.slicing_info(data.of_scenario(DECODE), projection="gate_up", draw="uniform")
    return figures.draw_slicing(info)


def timeline(data: Measurements) -> go.Figure:
    """Tiles on slots."""
    look_at = Selection(scenario=DECODE, num_tokens=40, projection="down")
    schedule = data.schedule_or_best(look_at)
    row = data.schedules_at(look_at)[schedule]
    info = analysis.timeline_info(
        look_at.problem, schedule, look_at.tok_e(), data.card, recorded_us=float(row["time_us"]),
        source=f"{DECODE} down, {schedule.label()}; simulated from measured ceilings",
    )  # fmt: skip
    return placement_figures.draw_timeline(info, raster_info(info))


def winners(data: Measurements) -> go.Figure:
    """Who beats the default."""
    found = data.winners(SMALL_BATCH, draw="uniform")
    return figures.draw_winners(found, data.source(data.of_scenario(SMALL_BATCH)))


def layer_decode(data: Measurements) -> go.Figure:
    """The layer against peers in decode."""
    return comparison_figures.draw_layer(analysis.layer_info(data.of_scenario(DECODE), draw="uniform"))


def layer_prefill(data: Measurements) -> go.Figure:
    """The layer against peers in prefill."""
    return comparison_figures.draw_layer(analysis.layer_info(data.of_scenario(PREFILL), draw="uniform"))


def roofline(data: Measurements) -> go.Figure:
    """Share of the ceilings in decode."""
    return figures.draw_roofline(analysis.roofline_info(data.of_scenario(DECODE), draw="uniform"))


PICTURES: tuple[Callable[[Measurements], go.Figure], ...] = (
    load, padding, block_m, threshold, slicing, timeline, winners, layer_decode, layer_prefill, roofline,
)  # fmt: skip


def main() -> int:
    """Draw every picture that the records can carry; name the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "gallery")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None and "BROWSER_PATH" not in os.environ:
        print("gallery: no Chromium or Chrome; on Debian: apt-get install chromium", file=sys.stderr)
        return 2
    os.environ.setdefault("BROWSER_PATH", str(browser))
    try:
        data = Measurements.recorded()
    except UserError as error:
        print(f"gallery: {error}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = ["# Gallery", "", f"Drawn by `make gallery` from the shipped records: {data.source()}.", ""]
    for draw in PICTURES:
        try:
            lines += picture(draw, data, arguments.out)
        except UserError as error:
            print(f"gallery: {draw.__name__} is left out: {error}", file=sys.stderr)
    (arguments.out / "README.md").write_text("\n".join(lines))
    print(f"gallery: {(len(lines) - 4) // 4} pictures in {arguments.out}")
    return 0


def picture(draw: Callable[[Measurements], go.Figure], data: Measurements, out: pathlib.Path) -> list[str]:
    """Write one PNG; returns its lines of the page."""
    figure = look.for_print(draw(data))
    height = int(figure.layout.height or look.HEIGHT)
    image: Any = figure.to_image(format="png", width=WIDTH, height=height, scale=SCALE)
    unfinished = out / f"{draw.__name__}.png.tmp"
    unfinished.write_bytes(image)
    unfinished.replace(out / f"{draw.__name__}.png")
    title = re.sub(r"<[^>]+>", " ", str(figure.layout.title.text).split("<br><span")[0])
    return [f"## {title}", "", f"![{title}]({draw.__name__}.png)", ""]


if __name__ == "__main__":
    sys.exit(main())

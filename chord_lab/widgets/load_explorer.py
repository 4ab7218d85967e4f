"""LoadExplorer: who gets the rows, what padding that costs, and how unevenly GPUs are loaded."""

from __future__ import annotations

import ipywidgets

from chord_lab import analysis
from chord_lab.export import panel_figures as figures
from chord_lab.routing import parse_draw
from chord_lab.widgets import controls
from chord_lab.widgets.live_figure import LiveFigure
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.panel import Panel
from chord_lab.widgets.point_controls import PointControls
from chord_lab.widgets.selection import Selection, drawn


class LoadExplorer(Panel):
    """Rows per expert, padding of each block_m, rows per GPU."""

    title = "Load: which experts get the rows?"

    def __init__(self, selection: Selection | None = None, measurements: Measurements | None = None):
        super().__init__(selection, measurements)
        self.point = PointControls(self.selection, self.measurements.scenarios, seed=True)
        self.block_m = controls.steps("block_m", analysis.load.BLOCK_MS, 64, "rows of a tile: experts are padded to it")
        self.by_load = controls.switch("Busiest expert first", True, "off: experts in their own order")
        self.whole = controls.switch("All GPUs", False, "draw the whole system's experts: rows of every GPU")
        self.load: LiveFigure | None = None
        self.summary = controls.text()
        self.block_m.observe(self.redraw, "value")
        self.by_load.observe(self.redraw, "value")
        self.whole.observe(self.redraw, "value")
        self.follow("scenario", "num_tokens", "draw", "seed")

    def draw(self) -> None:
        """Draw the routing of the selected point."""
        chosen = self.selection
        tok_e = chosen.tok_e()
        load = analysis.load_info(tok_e, source=self.origin())
        padding = analysis.padding_info(tok_e, source=self.origin())
        drawn = [
            figures.draw_load(load, by_load=self.by_load.value, block_m=self.block_m.value),
            figures.draw_padding(padding, block_m=self.block_m.value),
        ]
        if self.load is None:
            self.load, self.padding = map(LiveFigure, drawn)
            self.gpu = LiveFigure(figures.draw_gpu_load(self.gpus()))
            self.system = ipywidgets.VBox([self.gpu.widget])
            options = controls.row(self.block_m, self.by_load, self.whole)
            self.arrange(self.point, options, self.load.widget, self.summary, self.padding.widget, self.system)
        else:
            self.load.show(drawn[0])
            self.padding.show(drawn[1])
        self.system.layout.display = "" if self.whole.value else "none"
        if self.whole.value:
            self.gpu.show(figures.draw_gpu_load(self.gpus()))
        at = padding.block_m.index(self.block_m.value)
        self.summary.value = (
            f"{load.routed_m:,} routed rows on {len(load.tok_e)} local experts, {load.active_experts} of them active; "
            f"mean {load.mean:.1f}, busiest {load.busiest}. At block_m {self.block_m.value}: "
            f"{padding.num_m_blocks[at]} blocks, {padding.padding_share[at]:.0%} of the padded rows hold nothing."
        )

    def gpus(self) -> analysis.GpuLoadInfo:
        """Rows of every GPU of the system, all experts drawn at once."""
        layer = self.selection.layer
        num_experts, top_k, ep = layer.model.num_experts, layer.model.top_k, layer.shard.ep
        system_rows = self.selection.routed_m * ep
        everyone = drawn(self.selection.draw, max(1, system_rows // top_k), num_experts, top_k, self.selection.seed)
        return analysis.gpu_load_info(everyone, ep, source=self.origin())

    def origin(self) -> str:
        """Where the counts come from."""
        draw = parse_draw(self.selection.draw)
        if draw.kind == "file":
            return f"recorded in {draw.path}"
        return f"drawn: {draw}, seed {self.selection.seed}"

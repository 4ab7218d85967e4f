"""TimelineExplorer: each expert's tiles on the card's slots over time, simulated and checked against the record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chord_lab import analysis
from chord_lab.analysis.raster import raster_info
from chord_lab.export import placement_figures as figures
from chord_lab.widgets import controls
from chord_lab.widgets.live_figure import LiveFigure
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.panel import Panel
from chord_lab.widgets.point_controls import PointControls
from chord_lab.widgets.schedule_knobs import values_on_offer
from chord_lab.widgets.selection import Selection


class TimelineExplorer(Panel):
    """Follows the selected schedule, or the fastest recorded one."""

    title = "Timeline: which tile runs where, and when?"

    def __init__(self, selection: Selection | None = None, measurements: Measurements | None = None):
        super().__init__(selection, measurements)
        self.point = PointControls(self.selection, self.measurements.scenarios)
        self.ctas = controls.steps("ctas_per_sm", (1, 2, 3, 4), 1, "resident CTAs per SM: slots are SMs times this")
        self.block_m = controls.steps("block_m", analysis.load.BLOCK_MS, 64, "rows of a tile")
        self.stream_k = controls.switch("stream_k", False, "cut the work into equal shares")
        self.figure: LiveFigure | None = None
        self.summary = controls.text()
        self._busy = False
        for control in (self.ctas, self.block_m, self.stream_k):
            control.observe(self._turned, "value")
        self.follow("scenario", "projection", "num_tokens", "draw", "seed", "schedule")

    def draw(self) -> None:
        """Simulate the launch and draw it."""
        chosen, known = self.selection, self.measurements
        schedule = known.schedule_or_best(chosen)
        row = known.schedules_at(chosen).get(schedule)
        info = analysis.timeline_info(
            chosen.problem,
            schedule,
            chosen.tok_e(),
            known.card,
            recorded_us=None if row is None else float(row["time_us"]),
            source="simulated from measured ceilings and the drawn counts",
        )
        figure = figures.draw_timeline(info, raster_info(info))
        if self.figure is None:
            self.figure = LiveFigure(figure)
            self.arrange(
                self.point, controls.row(self.block_m, self.ctas, self.stream_k), self.figure.widget, self.summary
            )
        else:
            self.figure.show(figure)
        self._busy = True
        try:
            offers = values_on_offer(schedule, known.profile_of(chosen.scenario))
            controls.set_options(self.block_m, offers["block_m"], schedule.block_m)
            controls.set_options(self.ctas, offers["ctas_per_sm"], schedule.ctas_per_sm)
            self.stream_k.value = schedule.stream_k
        finally:
            self._busy = False
        broken = known.broken(chosen, schedule)
        self.summary.value = describe(info, known) + (f" It may not run: {broken.reason}." if broken else "")

    def _turned(self, _change: Any) -> None:
        if self._busy:
            return
        schedule = self.measurements.schedule_or_best(self.selection)
        turned = replace(
            schedule, block_m=self.block_m.value, ctas_per_sm=self.ctas.value, stream_k=self.stream_k.value
        )
        # Which grids are persistent is the kernel's own rule: the other kind is taken where this one may not run.
        kinds = [turned, replace(turned, persistent=not turned.persistent)]
        self.selection.schedule = next((s for s in kinds if not self.measurements.broken(self.selection, s)), turned)


def describe(info: analysis.TimelineInfo, known: Measurements) -> str:
    """The simulation in words, its error first."""
    if info.recorded_us is None:
        checked = "no record of this schedule here to check it against"
    else:
        checked = f"recorded {info.recorded_us:.1f} us, so the simulation is off by {info.error:+.0%}"
    error = known.once("timeline error", lambda: analysis.timeline_error_info(known.frame))
    return (
        f"<b>{info.schedule}</b>: {info.num_tiles:,} tiles on {info.num_slots} slots, {info.busy_share:.0%} of "
        f"slot-time busy; simulated {info.simulated_us:.1f} us, {checked}. Over {error.num_records} recorded "
        f"schedules the simulation is off by {error.median_absolute_error:.0%} in the median ({error.source})."
    )

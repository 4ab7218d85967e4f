"""ScheduleExplorer: turn every knob of a schedule at one point; see its time, its limits, and how it compares."""

from __future__ import annotations

from typing import Any

import ipywidgets
from w4a16_moe.schedule import Schedule

from chord_lab import analysis
from chord_lab.analysis.point import PointInfo, ScheduleFacts, point_info, rival_info, schedule_facts
from chord_lab.export import panel_figures as figures
from chord_lab.records.statistics import as_read
from chord_lab.widgets import controls, facts_table
from chord_lab.widgets.live_figure import LiveFigure
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.panel import Panel
from chord_lab.widgets.point_controls import PointControls
from chord_lab.widgets.schedule_knobs import ScheduleKnobs
from chord_lab.widgets.selection import Selection


class ScheduleExplorer(Panel):
    """Two schedules side by side, among all that were timed at the point."""

    title = "Schedule: what does each knob do here?"

    def __init__(self, selection: Selection | None = None, measurements: Measurements | None = None):
        super().__init__(selection, measurements)
        chosen, known = self.selection, self.measurements
        self.point = PointControls(chosen, known.scenarios)
        self.knobs = ScheduleKnobs(known.schedule_or_best(chosen), known.profile_of(chosen.scenario))
        self.fastest = controls.button("Fastest recorded", "take the fastest schedule recorded at this point")
        self.default = controls.button("Default", "take what the package runs untuned")
        self.keep = controls.button("Compare with this one", "make the schedule at hand the one to compare with")
        self.compile = controls.button("Compile now", "registers, shared memory and spills from an offline compilation")
        self.legality = controls.text()
        self.table = controls.text()
        self.compiled: dict[Any, Any] = {}  # (schedule, problem) -> compile facts, or the reason why there are none
        self.ranking: LiveFigure | None = None
        known.fit_ahead()
        self.knobs.observe(self._turned, "schedule")
        self.fastest.on_click(lambda _button: self._choose(next(iter(known.schedules_at(chosen)), None)))
        self.default.on_click(lambda _button: self._choose(known.default_at(chosen)))
        self.keep.on_click(self._keep)
        self.compile.on_click(self._compile)
        self.follow("scenario", "projection", "num_tokens", "draw", "seed", "schedule", "rival")

    def draw(self) -> None:
        """Draw the point with both schedules."""
        chosen, known = self.selection, self.measurements
        ours = known.schedule_or_best(chosen)
        rival = chosen.rival or known.default_at(chosen)
        facts = [self.facts(schedule) for schedule in (ours, rival)]
        ranking = figures.draw_point(self.recorded_point(), ours=facts[0], rival=facts[1])
        roofline = figures.draw_roofline_of(self.roofline(), ours=facts[0])
        if self.ranking is None:
            self.ranking, self.roof = LiveFigure(ranking), LiveFigure(roofline)
            self.ranking.on_click(self._pick)
            buttons = controls.row(self.fastest, self.default, self.keep, self.compile)
            shown = ipywidgets.VBox([self.ranking.widget, self.roof.widget])
            self.arrange(self.point, self.knobs, buttons, self.legality, self.table, shown)
        else:
            self.ranking.show(ranking)
            self.roof.show(roofline)
        self._show_knobs(ours)
        self.legality.value = self.why_illegal(ours)
        rows = known.schedules_at(chosen)
        self.table.value = facts_table.render(
            facts,
            rival_info(rows.get(ours), rows.get(rival)),
            [self.compiled_facts(s) for s in (ours, rival)],
            known.device,
        )

    def recorded_point(self) -> PointInfo | None:
        """All that was timed here; None where nothing was."""
        rows = self.measurements.at(self.selection)
        return self.measurements.once(("point", *self._here()), lambda: _or_none(point_info, rows))

    def roofline(self) -> Any:
        """The best of each implementation along the scenario's token counts."""
        chosen, known = self.selection, self.measurements
        frame, _note = known.alike(chosen.scenario)
        draw = chosen.draw if chosen.draw in known.draws(chosen.scenario) else None
        return known.once(
            ("roofline", chosen.scenario, chosen.projection, draw),
            lambda: _or_none(
                analysis.roofline_info, frame, scenario=chosen.scenario, projection=chosen.projection, draw=draw
            ),
        )

    def facts(self, schedule: Schedule) -> ScheduleFacts:
        """Recorded where it was timed; else predicted, and it says so."""
        chosen, known = self.selection, self.measurements
        row = known.schedules_at(chosen).get(schedule)
        predicted = None if row is not None else known.predict(chosen, schedule)
        return schedule_facts(
            as_read(chosen.problem, known.profile_of(chosen.scenario)),
            schedule,
            chosen.tok_e(),
            known.card,
            row=row,
            predicted_us=predicted,
            source=self._source(row is not None, predicted),
        )

    def _source(self, recorded: bool, predicted: float | None) -> str:
        if recorded:
            return self.measurements.source(self.measurements.at(self.selection))
        return "no time: it may not run" if predicted is None else "predicted by the cost model"

    def why_illegal(self, schedule: Schedule) -> str:
        """One line: the rule that the schedule breaks, or that it may run."""
        broken = self.measurements.broken(self.selection, schedule)
        if broken is None:
            profile = self.measurements.profile_of(self.selection.scenario)
            return f"{facts_table.OK} may run under profile {profile} on {self.measurements.device.slug}"
        return f"{facts_table.BAD} <b>{broken.rule}</b>: {broken.reason}"

    def compiled_facts(self, schedule: Schedule) -> Any:
        """What `_compile` found, None before."""
        return self.compiled.get((schedule, self.selection.problem))

    def _here(self) -> tuple[Any, ...]:
        chosen = self.selection
        return (chosen.scenario, chosen.projection, chosen.routed_m, chosen.draw, chosen.seed)

    def _show_knobs(self, schedule: Schedule) -> None:
        profile = self.measurements.profile_of(self.selection.scenario)
        if self.knobs.schedule != schedule or self.knobs.profile != profile:
            self.knobs.show(schedule, profile)

    def _turned(self, change: Any) -> None:
        if change.new != self.measurements.schedule_or_best(self.selection):
            self._choose(change.new)

    def _choose(self, schedule: Schedule | None) -> None:
        self.selection.schedule = schedule

    def _keep(self, _button: Any) -> None:
        self.selection.rival = self.measurements.schedule_or_best(self.selection)

    def _pick(self, _trace: str, _x: Any, label: Any) -> None:
        """A click on a timed schedule takes it."""
        info = self.recorded_point()
        label = label[0] if isinstance(label, (list, tuple)) else label
        if info is not None and label in info.label:
            self._choose(info.schedule[info.label.index(label)])

    def _compile(self, _button: Any) -> None:
        """Compile both schedules offline; about a second each the first time."""
        self.compile.disabled = True
        self.compile.description = "Compiling ..."
        try:
            for schedule in (self.knobs.schedule, self.selection.rival or self.measurements.default_at(self.selection)):
                self.compiled[schedule, self.selection.problem] = facts_table.compile_offline(
                    schedule, self.selection.problem, self.measurements.device
                )
        finally:
            self.compile.disabled = False
            self.compile.description = "Compile now"
        self.redraw()


def _or_none(compute: Any, *arguments: Any, **named: Any) -> Any:
    """`compute(...)`, None where records have nothing to say."""
    try:
        return compute(*arguments, **named)
    except ValueError:
        return None

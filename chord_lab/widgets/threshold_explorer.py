"""ThresholdExplorer: move the threshold of the block_m model and see which rows change and what that costs."""

from __future__ import annotations

from typing import Any

from chord_lab import analysis
from chord_lab.errors import UserError
from chord_lab.export import panel_figures as figures
from chord_lab.export.figures import span
from chord_lab.widgets import controls
from chord_lab.widgets.live_figure import LiveFigure
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.panel import Panel
from chord_lab.widgets.point_controls import PointControls
from chord_lab.widgets.selection import Selection

HIGHEST = 400  # tokens per expert: beyond the last measured point every threshold chooses alike


class ThresholdExplorer(Panel):
    """The model's choice at each measured point, judged by measured times."""

    title = "Threshold: where should block_m change its rule?"

    def __init__(self, selection: Selection | None = None, measurements: Measurements | None = None):
        super().__init__(selection, measurements)
        self.point = PointControls(self.selection, self.measurements.scenarios)
        self.point.tokens.layout.display = "none"  # the figures show every token count
        self.threshold = controls.whole(
            "Threshold", 8, HIGHEST, round(self.selection.threshold), "tokens per expert at which the rule changes"
        )
        self.best = controls.button("Set to the best", "the middle of the thresholds with the least mean regret")
        self.usual = controls.button("Set to the default", "the package's default threshold")
        self.times: LiveFigure | None = None
        self.summary = controls.text()
        self.threshold.observe(self._set_threshold, "value")
        self.best.on_click(self._set_best)
        self.usual.on_click(lambda _button: self._choose(analysis.crossover.DEFAULT_THRESHOLD))
        self.follow("scenario", "projection", "draw", "threshold")

    def draw(self) -> None:
        """Draw times, choices and the regret of every threshold."""
        info, turn = self.crossover()
        judged = analysis.threshold_info(info, self.selection.threshold)
        drawn = [figures.draw_threshold(judged), figures.draw_turn(turn, judged)]
        if self.times is None:
            self.times, self.regret = map(LiveFigure, drawn)
            self.times.on_click(self._pick)
            buttons = controls.row(self.threshold, self.best, self.usual)
            self.arrange(self.point, buttons, self.times.widget, self.summary, self.regret.widget)
        else:
            self.times.show(drawn[0])
            self.regret.show(drawn[1])
        self.threshold.value = round(self.selection.threshold)
        self.summary.value = self.describe(judged, turn)

    def crossover(self) -> tuple[analysis.CrossoverInfo, analysis.TurnInfo]:
        """Measured times of the chosen scenario, and the regret of every threshold; computed once each."""
        chosen, known = self.selection, self.measurements
        draws = known.draws(chosen.scenario)
        if chosen.draw not in draws:
            raise UserError(
                f"no measurement of {chosen.scenario} under draw {chosen.draw}; measured: {', '.join(draws) or 'none'}"
            )
        info = known.crossover(chosen.scenario, chosen.projection, chosen.draw)
        key = ("turn", chosen.scenario, chosen.projection, chosen.draw)
        return info, known.once(key, lambda: analysis.turn_info(info))

    @staticmethod
    def describe(judged: analysis.ThresholdInfo, turn: analysis.TurnInfo) -> str:
        """What the threshold does, in words."""
        changed = sum(judged.changed)
        cost = f"{judged.against_default:+.1%} time against the default of {judged.default_threshold:g}"
        return (
            f"Threshold {judged.threshold:g}: {changed} of {len(judged.changed)} rows choose another block_m ({cost}); "
            f"mean regret {judged.mean_regret:.1%}, worst {judged.worst_regret:.1%}. "
            f"Least regret, {turn.best_regret:.1%}, with a threshold {span(turn.best_low, turn.best_high)} tokens per "
            f"expert. {judged.source}"
        )

    def _set_threshold(self, change: Any) -> None:
        if round(self.selection.threshold) != change.new:
            self._choose(change.new)

    def _choose(self, value: float) -> None:
        self.selection.threshold = float(value)

    def _set_best(self, _button: Any) -> None:
        _, turn = self.crossover()
        self._choose(round((turn.best_low + min(turn.best_high, HIGHEST)) / 2))

    def _pick(self, _trace: str, _x: Any, picked: Any) -> None:
        """A click on a point moves every panel there."""
        if picked is None:
            return
        tokens_per_expert = picked[0]
        layer = self.selection.layer
        num_experts = self.selection.problem.num_experts
        nearest = min(layer.points, key=lambda p: abs(p.tokens_per_expert(num_experts) - float(tokens_per_expert)))
        self.selection.num_tokens = nearest.num_tokens

"""The controls that choose a point: scenario, projection, tokens, draw, skew, seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets

from chord_lab.routing import parse_draw
from chord_lab.scenarios import PROJECTIONS, Scenario, scenario_names
from chord_lab.widgets import controls
from chord_lab.widgets.selection import Selection

DEFAULT_SKEW = 1.0  # the exponent S of zipf:S


class PointControls(ipywidgets.VBox):
    """Two-way between a `Selection` and its controls."""

    def __init__(self, selection: Selection, scenarios: Sequence[str], *, seed: bool = False):
        self.selection = selection
        self._busy = False
        self.scenario = controls.choice(
            "Scenario", scenario_options(scenarios, selection.scenario), selection.scenario, "model / shard / phase"
        )
        self.projection = controls.choice("Projection", PROJECTIONS, selection.projection, "which GEMM of the layer")
        self.tokens = controls.steps(
            "Tokens", token_options(selection.layer), selection.num_tokens, "tokens, as the scenario counts them"
        )
        self.kind = controls.choice(
            "Routing draw",
            ("uniform", "balanced", "zipf", "file"),
            parse_draw(selection.draw).kind,
            "who gets the rows",
        )
        self.skew = controls.real(
            "Skew S", 0.0, 3.0, DEFAULT_SKEW, "zipf: expert r is asked for in proportion to 1 / r^S", 0.1
        )
        self.file = ipywidgets.Text(
            description="File", placeholder="topk_ids or counts: json, csv, npy, parquet", style=controls.LABEL,
            layout=controls.WIDE, continuous_update=False,
        )  # fmt: skip
        self.seed = controls.whole("Seed", 0, 20, selection.seed, "another routing of the same kind")
        self.meaning, self.problem = controls.text(), controls.text()
        left = ipywidgets.VBox([self.scenario, self.projection, self.tokens])
        right = ipywidgets.VBox([self.kind, self.skew, self.file, *([self.seed] if seed else [])])
        super().__init__([ipywidgets.HBox([left, right], layout={"flex_flow": "row wrap"}), self.meaning, self.problem])
        self._show()
        self.scenario.observe(lambda change: self._set(scenario=change.new), "value")
        self.projection.observe(lambda change: self._set(projection=change.new), "value")
        self.tokens.observe(lambda change: self._set(num_tokens=change.new), "value")
        self.seed.observe(lambda change: self._set(seed=change.new), "value")
        for control in (self.kind, self.skew, self.file):
            control.observe(self._set_draw, "value")
        selection.observe(self._show, ["scenario", "projection", "num_tokens", "draw", "seed"])

    def _set(self, **values: Any) -> None:
        if self._busy:
            return
        for name, value in values.items():
            setattr(self.selection, name, value)

    def _set_draw(self, _change: Any) -> None:
        if self._busy:
            return
        self._show_draw_controls()
        kind = self.kind.value
        if kind == "file" and not self.file.value.strip():
            return  # nothing to read yet
        text = {"zipf": f"zipf:{self.skew.value:g}", "file": f"file:{self.file.value.strip()}"}.get(kind, kind)
        try:
            self.selection.draw = text
        except ValueError as error:
            self.problem.value = f"<b>{error}</b>"
        else:
            self.problem.value = ""

    def _show(self, _change: Any = None) -> None:
        """Make the controls say what the selection says."""
        self._busy = True
        try:
            self._copy(self.selection)
        finally:
            self._busy = False

    def _copy(self, chosen: Selection) -> None:
        if chosen.scenario not in [name for _label, name in self.scenario.options]:
            self.scenario.options = [*self.scenario.options, (chosen.scenario, chosen.scenario)]
        self.scenario.value = chosen.scenario
        self.projection.value = chosen.projection
        options = token_options(chosen.layer, chosen.num_tokens)
        if tuple(self.tokens.options) != tuple(options):
            controls.set_options(self.tokens, options, chosen.num_tokens)
        self.tokens.value = chosen.num_tokens
        self.seed.value = chosen.seed
        draw = parse_draw(chosen.draw)
        self.kind.value = draw.kind
        if draw.kind == "zipf":
            self.skew.value = draw.skew
        self._show_draw_controls()
        layer, problem = chosen.layer, chosen.problem
        point = layer.point(chosen.num_tokens)
        self.meaning.value = (
            f"{point.num_tokens:,} {layer.token_unit}: {point.routed_m:,} routed rows here, "
            f"{point.tokens_per_expert(problem.num_experts):.1f} per expert; {chosen.projection} has "
            f"E={problem.num_experts}, N={problem.N}, K={problem.K}"
        )

    def _show_draw_controls(self) -> None:
        self.skew.layout.display = "" if self.kind.value == "zipf" else "none"
        self.file.layout.display = "" if self.kind.value == "file" else "none"


def scenario_options(recorded: Sequence[str], chosen: str) -> list[tuple[str, str]]:
    """(label, name): recorded scenarios first, then those for which times are predicted."""
    others = [name for name in (*scenario_names(), chosen) if name not in recorded]
    return [(name, name) for name in recorded] + [(f"{name} (predicted)", name) for name in dict.fromkeys(others)]


def token_options(scenario: Scenario, include: int | None = None) -> list[tuple[str, int]]:
    """(label, num_tokens) of each point of a scenario, ascending."""
    points = {point.num_tokens: point for point in scenario.points}
    if include is not None and include not in points:
        points[include] = scenario.point(include)
    ordered = sorted(points.values(), key=lambda point: point.routed_m)
    return [(f"{p.num_tokens:,}", p.num_tokens) for p in ordered]

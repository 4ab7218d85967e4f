"""What is being looked at: one object that all panels of a notebook share, so that a choice in one moves the others."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import traitlets
from w4a16_moe.block_m import DEFAULT_THRESHOLD
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.routing import draw_tok_e, parse_draw
from chord_lab.scenarios import PROJECTIONS, Scenario, get_scenario


@functools.lru_cache(maxsize=256)
def drawn(draw: str, num_tokens: int, num_experts: int, top_k: int, seed: int) -> npt.NDArray[np.int64]:
    """`draw_tok_e`, remembered: panels ask for one routing many times. Read-only."""
    tok_e = draw_tok_e(draw, num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, seed=seed)
    tok_e.flags.writeable = False
    return tok_e


class Selection(traitlets.HasTraits):
    """The point under the microscope."""

    scenario = traitlets.Unicode("kimi-k2/ep8/prefill", help="model/shard/phase")
    projection = traitlets.Enum(PROJECTIONS, "gate_up", help="which GEMM of the layer")
    num_tokens = traitlets.Int(4096, help="in the scenario's unit")
    draw = traitlets.Unicode("uniform", help="uniform, balanced, zipf:S or file:PATH")
    seed = traitlets.Int(0, help="of the draw")
    threshold = traitlets.Float(DEFAULT_THRESHOLD, help="tokens per expert where the block_m model changes its rule")
    schedule = traitlets.Instance(Schedule, allow_none=True, help="the schedule at hand; None: the fastest known")
    rival = traitlets.Instance(Schedule, allow_none=True, help="what it is compared with; None: the default")

    def __init__(self, **values: Any):
        super().__init__(**values)
        # A scenario brings a point of its own when it is changed; here what was asked for stays.
        for name in ("num_tokens", "draw", "schedule", "rival"):
            if name in values:
                setattr(self, name, values[name])

    @property
    def layer(self) -> Scenario:
        """The scenario as data."""
        return get_scenario(self.scenario)

    @property
    def problem(self) -> MoeProblem:
        """What one GPU computes of the chosen projection."""
        return self.layer.problem(self.projection)

    @property
    def routed_m(self) -> int:
        """Routed rows that reach one GPU."""
        return self.layer.point(self.num_tokens).routed_m

    @property
    def tokens_per_expert(self) -> float:
        """Mean rows of a local expert."""
        return self.routed_m / self.problem.num_experts

    def tok_e(self) -> npt.NDArray[np.int64]:
        """``[num_experts]`` rows of each local expert under the chosen draw: the same draw that sweeps measure."""
        layer = self.layer
        drawn_tokens = layer.point(self.num_tokens).drawn_tokens
        return drawn(self.draw, drawn_tokens, self.problem.num_experts, layer.top_k, self.seed)

    @traitlets.validate("scenario")
    def _known_scenario(self, proposal: Any) -> str:
        return get_scenario(proposal["value"]).name

    @traitlets.validate("draw")
    def _known_draw(self, proposal: Any) -> str:
        return str(parse_draw(proposal["value"]))

    @traitlets.observe("scenario")
    def _keep_a_legal_point(self, _change: Any) -> None:
        """Another scenario counts tokens differently: go to its point with the nearest tokens per expert."""
        points = self.layer.points
        if self.num_tokens not in [point.num_tokens for point in points]:
            published = [point for point in points if point.published] or list(points)
            self.num_tokens = published[len(published) // 2].num_tokens
        if self.draw in ("uniform", "balanced"):  # a draw of the person's own choice stays
            self.draw = self.layer.draw
        self.schedule = self.rival = None

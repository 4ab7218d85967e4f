"""The points of recorded or drawn traffic that the exercises look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chord_lab.routing import draw_tok_e
from chord_lab.scenarios import get_scenario


@dataclass(frozen=True)
class LoadPoint:
    """One routing: which scenario, how many tokens, who gets them."""

    scenario: str
    num_tokens: int  # in the scenario's unit
    draw: str
    seed: int = 0

    def tok_e(self) -> npt.NDArray[np.int64]:
        """``[num_experts]`` rows of each local expert."""
        scenario = get_scenario(self.scenario)
        return draw_tok_e(
            self.draw,
            num_tokens=scenario.point(self.num_tokens).drawn_tokens,
            num_experts=scenario.problem("gate_up").num_experts,
            top_k=scenario.top_k,
            seed=self.seed,
        )


# Exercise 1: a decode step of 40 tokens on each of eight GPUs.
READ_LOAD = LoadPoint("kimi-k2/ep8/decode", 40, "uniform")
# Exercise 2: the same step under skewed traffic.
CHOOSE_BLOCK = LoadPoint("kimi-k2/ep8/decode", 40, "zipf:0.6")
# Exercise 3: where block_m turns.
TURN_SCENARIO, TURN_PROJECTION, TURN_DRAW = "kimi-k2/ep8/prefill", "gate_up", "uniform"
# Exercise 4: token slicing along a decode sweep.
SLICING_SCENARIO, SLICING_PROJECTION, SLICING_DRAW = "kimi-k2/ep8/decode", "gate_up", "uniform"
# Exercise 5: how a launch fills 132 SMs.
FILL_CARD = LoadPoint("kimi-k2/ep8/prefill", 2048, "uniform")
# Exercise 6: traffic that the shipped table was not tuned for: routed rows -> share of all steps.
BEAT_SCENARIO = "kimi-k2/ep8/decode"
TRAFFIC = {160: 0.1, 240: 0.2, 320: 0.3, 400: 0.4}

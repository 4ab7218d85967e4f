"""Tokens to experts: draws that are the same on every machine, recorded routings, blocks and padding. Numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chord_lab.routing.blocks import (
    BALANCEDNESS_DEFINITION,
    Blocks,
    LocalLoad,
    PaddingRow,
    align_to_blocks,
    balancedness,
    local_load,
    m_indices,
    num_blocks,
    padding,
    smaller_block,
)
from chord_lab.routing.draws import GENERATOR, Draw, draw_topk_ids, ids_from_counts, parse_draw
from chord_lab.routing.files import (
    ExpertLoad,
    ExpertPlacement,
    Recorded,
    read_expert_load,
    read_expert_placement,
    read_recorded,
)


def draw_tok_e(
    draw: str | Draw, *, num_tokens: int, num_experts: int, top_k: int, seed: int = 0
) -> npt.NDArray[np.int64]:
    """``tok_e [num_experts]`` of that draw."""
    ids = draw_topk_ids(draw, num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, seed=seed)
    return local_load(ids, num_experts).tok_e


__all__ = [
    "BALANCEDNESS_DEFINITION",
    "GENERATOR",
    "Blocks",
    "Draw",
    "ExpertLoad",
    "ExpertPlacement",
    "LocalLoad",
    "PaddingRow",
    "Recorded",
    "align_to_blocks",
    "balancedness",
    "draw_tok_e",
    "draw_topk_ids",
    "ids_from_counts",
    "local_load",
    "m_indices",
    "num_blocks",
    "padding",
    "parse_draw",
    "read_expert_load",
    "read_expert_placement",
    "read_recorded",
    "smaller_block",
]

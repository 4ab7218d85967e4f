"""Exercises 1 and 2: read a load histogram; choose a block for it."""

from __future__ import annotations

from typing import Any

from chord_lab.routing import num_blocks, padding
from chord_lab.workshop.points import CHOOSE_BLOCK, READ_LOAD
from chord_lab.workshop.verdict import Verdict, is_near, judge, missing_parts

BLOCKS = tuple(range(8, 257, 8))


def check_load(answer: Any) -> Verdict:
    """answer: dict(tokens_per_expert, active_experts, busiest_rows, busiest_over_mean) of `READ_LOAD`."""
    names = ("tokens_per_expert", "active_experts", "busiest_rows", "busiest_over_mean")
    problems = missing_parts(answer, names)
    if problems:
        return judge(problems, "")
    tok_e = READ_LOAD.tok_e()
    mean, busiest = float(tok_e.mean()), int(tok_e.max())
    if not is_near(answer["tokens_per_expert"], mean, absolute=0.05):
        problems.append("tokens_per_expert: divide all routed rows by the local experts, those without a row included")
    if not is_near(answer["active_experts"], int((tok_e > 0).sum())):
        problems.append("active_experts: count the experts with at least one row; only their weights are read")
    if not is_near(answer["busiest_rows"], busiest):
        problems.append("busiest_rows: the height of the tallest bar, in routed rows")
    if not is_near(answer["busiest_over_mean"], busiest / mean, absolute=0.02):
        problems.append(
            "busiest_over_mean: rows of the busiest expert over the mean, to two decimals; 1 would be perfect balance"
        )
    return judge(
        problems,
        f"the busiest expert has {busiest / mean:.2f} times the mean: a tile sized for the mean is too small for it",
    )


def check_block(answer: Any) -> Verdict:
    """answer: dict(block_m, num_m_blocks, padding_share) for `CHOOSE_BLOCK`.

    block_m is the smallest multiple of 8 at which no expert needs a second block.
    """
    problems = missing_parts(answer, ("block_m", "num_m_blocks", "padding_share"))
    if problems:
        return judge(problems, "")
    tok_e = CHOOSE_BLOCK.tok_e()
    active = int((tok_e > 0).sum())
    right = next(size for size in BLOCKS if num_blocks(tok_e, size) == active)
    truth = padding(tok_e, right)
    block_m = answer["block_m"]
    if not is_near(block_m, right):
        problems.append(_what_is_off(block_m, right))
    if not is_near(answer["num_m_blocks"], truth.num_m_blocks):
        problems.append("num_m_blocks: with one block for each expert that has rows, count those experts")
    if not is_near(answer["padding_share"], truth.padding_share, absolute=0.005):
        problems.append(
            "padding_share: the share of all padded rows (blocks times block_m) that hold no routed row (0.25 for 25 %)"
        )
    return judge(
        problems,
        f"one pass over the weights costs {truth.padding_share:.0%} padding here: with skew, one block_m cannot suit "
        "every expert",
    )


def _what_is_off(block_m: Any, right: int) -> str:
    if isinstance(block_m, bool) or not isinstance(block_m, int) or block_m not in BLOCKS:
        return "block_m: expected a multiple of 8 from 8 to 256"
    if block_m < right:
        return f"block_m: at {block_m} some expert still needs a second block and its weights are read again"
    return f"block_m: {block_m} holds every expert in one block, but a smaller multiple of 8 does so too"

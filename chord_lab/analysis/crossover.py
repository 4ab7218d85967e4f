"""Where does block_m turn along tokens per expert, and is it where the threshold says?"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from w4a16_moe.block_m import DEFAULT_THRESHOLD, BlockMModel

from chord_lab.analysis.selection import (
    candidates,
    fastest,
    require_one_setting,
    rows_of,
    schedule_of_row,
    select,
    source_line,
    spread_us,
)
from chord_lab.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

# A difference smaller than this share is taken for noise when repeats are too few to tell (drift between repeats of
# one schedule was 1-3 % on the recorded card).
NOISE = 0.02


PACKAGE_MODEL = BlockMModel()  # what the kernel package goes by where no table knows better


class CrossoverInfo(NamedTuple):
    """Best time of each block_m at each point; lists over points unless said otherwise."""

    tokens_per_expert: list[float]
    routed_m: list[int]
    block_m: list[int]  # every block_m that was measured somewhere
    time_us: list[list[float | None]]  # [block_m][point], best over the other knobs; None: not measured there
    low_us: list[list[float | None]]  # quartiles of the repeats
    high_us: list[list[float | None]]
    schedule: list[list[str | None]]  # label of the schedule behind each time
    best_block_m: list[int]
    best_us: list[float]
    alike: list[list[int]]  # block_m values that the noise cannot tell from the best one
    changes: list[Change]
    num_experts: int
    projection: str
    scenario: str
    draw: str
    source: str


class Change(NamedTuple):
    """Between two neighbouring points the best block_m changed, beyond the noise."""

    after: float  # tokens per expert of the last point where `old` was as good as the best
    before: float  # ... of the first point where only `new` was
    old: int
    new: int


def crossover_info(
    frame: pd.DataFrame,
    *,
    projection: str,
    scenario: str | None = None,
    draw: str | None = None,
    profile: str | None = None,
) -> CrossoverInfo:
    """Time against block_m for each number of tokens per expert.

    Raises:
        UserError: no candidate there, several scenarios' problems, or unlike environments.
    """
    rows = candidates(select(frame, projection=projection, scenario=scenario, draw=draw, profile=profile))
    if not len(rows):
        raise UserError(f"no timed candidate of {projection}" + (f" in {scenario}" if scenario else ""))
    rows = require_one_setting(rows)
    best = fastest(rows, ["routed_m", "block_m"])
    routed = sorted(int(m) for m in best["routed_m"].unique())
    blocks = sorted(int(b) for b in best["block_m"].unique())
    table = _Grid(best, routed, blocks)
    winners = [table.fastest_at(j) for j in range(len(routed))]
    best_block_m, alike = [blocks[i] for i in winners], [table.alike(j, i) for j, i in enumerate(winners)]
    num_experts = int(rows["num_experts"].iloc[0])
    tokens = [m / num_experts for m in routed]
    return CrossoverInfo(
        tokens_per_expert=tokens,
        routed_m=routed,
        block_m=blocks,
        time_us=table.time,
        low_us=table.low,
        high_us=table.high,
        schedule=table.label,
        best_block_m=best_block_m,
        best_us=[cast("float", table.time[i][j]) for j, i in enumerate(winners)],
        alike=alike,
        changes=_changes(tokens, best_block_m, alike),
        num_experts=num_experts,
        projection=projection,
        scenario=str(rows["scenario"].iloc[0]),
        draw=str(rows["draw"].iloc[0]),
        source=source_line(rows),
    )


class _Grid:
    """The fastest row of each (block_m, routed_m), as lists."""

    def __init__(self, best: pd.DataFrame, routed: list[int], blocks: list[int]):
        self.blocks = blocks
        shape = [[None] * len(routed) for _ in blocks]
        self.time: list[list[float | None]] = [list(r) for r in shape]
        self.low: list[list[float | None]] = [list(r) for r in shape]
        self.high: list[list[float | None]] = [list(r) for r in shape]
        self.label: list[list[str | None]] = [list(r) for r in shape]
        for row in rows_of(best):
            i, j = blocks.index(int(row["block_m"])), routed.index(int(row["routed_m"]))
            self.time[i][j] = float(row["time_us"])
            self.low[i][j], self.high[i][j] = spread_us(row)
            schedule = schedule_of_row(row)
            self.label[i][j] = schedule.label() if schedule else None

    def fastest_at(self, column: int) -> int:
        """Index of the block_m with the least time at a point; the smaller block on a tie."""
        times = [row[column] for row in self.time]
        return min((t, i) for i, t in enumerate(times) if t is not None)[1]

    def alike(self, column: int, winner: int) -> list[int]:
        """Blocks whose time lies within the noise of the winner: repeats overlap, or they differ by less than NOISE."""
        best_time, best_high = self.time[winner][column], self.high[winner][column]
        assert best_time is not None
        assert best_high is not None
        found = []
        for i, block in enumerate(self.blocks):
            time, low = self.time[i][column], self.low[i][column]
            if time is not None and low is not None and (low <= best_high or time <= best_time * (1 + NOISE)):
                found.append(block)
        return found


def _changes(tokens: list[float], best: list[int], alike: list[list[int]]) -> list[Change]:
    """Walk along the points; a block_m is kept as long as the noise allows, as a table would."""
    changes = []
    current, since = best[0], 0
    for j in range(1, len(tokens)):
        if current in alike[j]:
            since = j
            continue
        changes.append(Change(after=tokens[since], before=tokens[j], old=current, new=best[j]))
        current, since = best[j], j
    return changes


class ThresholdInfo(NamedTuple):
    """The block_m model at one threshold, judged by measured times; lists over points."""

    threshold: float  # tokens per expert
    tokens_per_expert: list[float]
    rule: list[str]  # packing (below the threshold) or covering
    block_m: list[int]  # what the model chooses among the measured ones
    time_us: list[float]
    best_block_m: list[int]
    best_us: list[float]
    regret: list[float]  # time / best - 1
    mean_regret: float
    worst_regret: float
    changed: list[bool]  # chooses another block_m than at the default threshold
    against_default: float  # mean of time / time at the default threshold - 1 over all points
    default_threshold: float
    source: str


def threshold_info(
    info: CrossoverInfo, threshold: float = DEFAULT_THRESHOLD, *, model: BlockMModel = PACKAGE_MODEL
) -> ThresholdInfo:
    """What a threshold would choose at each measured point, and what that costs against the best block_m.

    model: the other parameters of the rule; the kernel package's own when not given.
    """
    chosen = _model_choice(info, replace(model, threshold=threshold))
    usual = _model_choice(info, replace(model, threshold=DEFAULT_THRESHOLD))
    times = [_time(info, block, j) for j, block in enumerate(chosen)]
    default_times = [_time(info, block, j) for j, block in enumerate(usual)]
    regret = [time / best - 1 for time, best in zip(times, info.best_us, strict=True)]
    return ThresholdInfo(
        threshold=threshold,
        tokens_per_expert=info.tokens_per_expert,
        rule=["packing" if t < threshold else "covering" for t in info.tokens_per_expert],
        block_m=chosen,
        time_us=times,
        best_block_m=info.best_block_m,
        best_us=info.best_us,
        regret=regret,
        mean_regret=float(np.mean(regret)),
        worst_regret=max(regret),
        changed=[a != b for a, b in zip(chosen, usual, strict=True)],
        against_default=float(np.mean([a / b for a, b in zip(times, default_times, strict=True)])) - 1,
        default_threshold=DEFAULT_THRESHOLD,
        source=info.source,
    )


class TurnInfo(NamedTuple):
    """Mean regret of the block_m model against its threshold: where should it be?"""

    threshold: list[float]
    mean_regret: list[float]
    best_low: float  # thresholds from best_low to best_high have the least regret, as far as the noise can tell
    best_high: float
    best_regret: float
    default_threshold: float
    default_regret: float
    default_is_best: bool
    both_sides: bool  # whether points lie on both sides of the default: else nothing here judges it
    source: str


def changes_in_words(info: CrossoverInfo) -> str:
    """``32 to 64 between 21.3 and 40; 64 to 128 between 42.7 and 60``, empty where one block_m serves every point."""
    return "; ".join(f"{c.old} to {c.new} between {c.after:.3g} and {c.before:.3g}" for c in info.changes)


def turn_info(info: CrossoverInfo, *, model: BlockMModel = PACKAGE_MODEL) -> TurnInfo:
    """Regret for every threshold that the measured points can tell apart.

    Between two neighbouring points all thresholds choose alike, so the answer is an interval, never one number.
    """
    tokens = sorted(set(info.tokens_per_expert))
    # A threshold t packs the points below it; one value from each gap between points stands for the whole gap.
    edges = [0.0, *tokens, tokens[-1] * 2]
    inside = [tokens[0] / 2, *((a + b) / 2 for a, b in pairwise(tokens)), tokens[-1] * 1.5]
    regrets = [threshold_info(info, t, model=model).mean_regret for t in inside]
    least = min(regrets)
    good = [i for i, r in enumerate(regrets) if r <= least + NOISE / len(info.tokens_per_expert)]
    first = regrets.index(least)
    low = high = first
    while low - 1 in good:
        low -= 1
    while high + 1 in good:
        high += 1
    default_regret = threshold_info(info, DEFAULT_THRESHOLD, model=model).mean_regret
    best_low, best_high = edges[low], edges[high + 1]
    return TurnInfo(
        threshold=inside,
        mean_regret=regrets,
        best_low=best_low,
        best_high=float("inf") if high + 1 == len(edges) - 1 else best_high,
        best_regret=least,
        default_threshold=DEFAULT_THRESHOLD,
        default_regret=default_regret,
        default_is_best=default_regret <= least + NOISE / len(info.tokens_per_expert),
        both_sides=tokens[0] < DEFAULT_THRESHOLD <= tokens[-1],
        source=info.source,
    )


def _model_choice(info: CrossoverInfo, model: BlockMModel) -> list[int]:
    chosen = []
    for j, routed_m in enumerate(info.routed_m):
        measured = [b for i, b in enumerate(info.block_m) if info.time_us[i][j] is not None]
        chosen.append(model.choose(info.num_experts, routed_m, measured))
    return chosen


def _time(info: CrossoverInfo, block_m: int, column: int) -> float:
    time = info.time_us[info.block_m.index(block_m)][column]
    assert time is not None  # the model chooses among measured blocks only
    return time

"""How often each candidate is timed: interleaved rounds, more for close contenders, fewer for clear losers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from chord_lab.records.intervals import Ratio, paired_ratio

Medians = Mapping[str, Mapping[int, float]]  # candidate key -> round -> median time of that repeat

# Half widths assumed where a candidate has too few repeats to tell: a clock dip is 4 to 18 %.
_ONE_REPEAT = 0.20
_TWO_REPEATS = 0.10
_CAP = 0.15


@dataclass(frozen=True, kw_only=True)
class RoundsPolicy:
    """When a candidate may leave, and when a point is settled."""

    min_rounds: int = 1  # repeats of every candidate, clear losers included
    confirm_rounds: int = 3  # least repeats of whoever stays, of the default and of the peers
    max_rounds: int = 8
    heat: int = 12  # candidates between two repeats of the reference: drift within a heat cancels
    margin: float = 0.01  # a difference below this does not matter
    keep: tuple[int, ...] = (48, 24, 16, 12, 8)  # contenders left at most after the first, second, ... round
    rep_ms: float = 20.0
    warmup_ms: float = 2.0

    def survivors(self, alive: Sequence[str], medians: Medians, reference: str, num_rounds: int) -> list[str]:
        """Who is timed again after `num_rounds` rounds, best first; the reference always is."""
        ranked = rank(alive, medians, reference)
        if num_rounds < self.min_rounds:
            return [*(key for key, _ in ranked), *(k for k in alive if k not in dict(ranked))]
        best_high = min((bounds(ratio)[1] for _, ratio in ranked), default=math.inf)
        close = [key for key, ratio in ranked if bounds(ratio)[0] <= best_high]
        kept = close[: self.keep[min(num_rounds, len(self.keep)) - 1]]
        judged = dict(ranked)
        kept += [key for key in alive if key not in judged]  # the reference died: nobody met the new one yet
        return kept if reference in kept or reference not in alive else [*kept, reference]

    def settled(self, alive: Sequence[str], medians: Medians, reference: str, num_rounds: int) -> bool:
        """No further round would change who wins: the leader stands clear, or differences are below the margin."""
        if num_rounds >= self.max_rounds:
            return True
        if num_rounds < max(self.min_rounds, self.confirm_rounds):
            return False
        others = [key for key in alive if key != reference]
        ratios = [ratio for _, ratio in rank(others, medians, reference)]
        clear = [r for r in ratios if r.high < 1 - self.margin or r.low > 1 or r.half_width <= self.margin]
        return (len(others) <= 1 and len(clear) == len(ratios)) or all(r.half_width <= self.margin for r in ratios)


def rank(keys: Iterable[str], medians: Medians, reference: str) -> list[tuple[str, Ratio]]:
    """Candidates by time over the reference's time in the same rounds, fastest first."""
    ratios = [(key, paired_ratio(medians.get(key, {}), medians.get(reference, {}))) for key in keys]
    return sorted(((key, ratio) for key, ratio in ratios if ratio), key=lambda pair: (pair[1].estimate, pair[0]))


def bounds(ratio: Ratio) -> tuple[float, float]:
    """An interval that is never wider than what the machine's noise allows, nor certain after one repeat."""
    half = {1: _ONE_REPEAT, 2: _TWO_REPEATS}.get(ratio.num_pairs, _CAP)
    if ratio.num_pairs >= 3:
        half = min(half, ratio.half_width)
    return ratio.estimate * (1 - half), ratio.estimate * (1 + half)


def heats(keys: Sequence[str], reference: str, size: int, turn: int) -> list[list[str]]:
    """`keys` in groups of `size`, each with the reference at a place that moves, the order rotated by `turn`."""
    others = [key for key in keys if key != reference]
    if not others:
        return [[reference]]
    shift = (turn * 7) % len(others)  # 7: neighbours change from round to round too
    rotated = others[shift:] + others[:shift]
    if turn % 2:
        rotated.reverse()
    count = math.ceil(len(rotated) / size)
    groups = [rotated[i::count] for i in range(count)]
    for number, group in enumerate(groups):
        group.insert((turn + number) % (len(group) + 1), reference)
    return groups

"""How sure a ratio of two times is: paired repeats, so that drift of the machine cancels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Student's t, 97.5 %, for 1..29 degrees of freedom: two-sided 95 % intervals.
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
CONFIDENCE = 0.95


class Ratio(NamedTuple):
    """A time over a reference's time, from the rounds that both were measured in."""

    estimate: float  # median of the paired ratios
    low: float  # 95 % interval; 0 and inf where fewer than two rounds pair
    high: float
    num_pairs: int

    @property
    def half_width(self) -> float:
        """Relative half width of the interval."""
        return (self.high - self.low) / 2 / self.estimate if math.isfinite(self.high) else math.inf


def paired_ratio(times: Mapping[int, float], reference: Mapping[int, float]) -> Ratio | None:
    """`times` and `reference` map a round to a median time. None where no round has both."""
    rounds = sorted(r for r in times if reference.get(r, 0) > 0 and times[r] > 0)
    if not rounds:
        return None
    return interval(np.array([times[r] / reference[r] for r in rounds]))


def interval(ratios: np.ndarray) -> Ratio:
    """95 % interval of the median ratio.

    Two to five pairs: Student's t on the logarithms. Six and more: order statistics, which one odd repeat (a clock dip)
    cannot widen. One pair says nothing of its own noise.
    """
    ratios = np.sort(ratios)
    n = len(ratios)
    estimate = float(np.median(ratios))
    if n == 1:
        return Ratio(estimate, 0.0, math.inf, 1)
    if n >= 6:
        skip = _order_skip(n)
        return Ratio(estimate, float(ratios[skip]), float(ratios[n - 1 - skip]), n)
    logs = np.log(ratios)
    half = _T975[n - 2] * float(logs.std(ddof=1)) / math.sqrt(n)
    middle = float(logs.mean())
    low, high = math.exp(middle - half), math.exp(middle + half)
    return Ratio(estimate, min(low, estimate), max(high, estimate), n)


def _order_skip(n: int) -> int:
    """Values to leave out at each end so that the rest covers the median with at least 95 %."""
    tail, skip = 0.0, -1
    while True:
        tail += math.comb(n, skip + 1) / 2**n
        if 2 * tail > 1 - CONFIDENCE:
            return max(skip, 0)
        skip += 1

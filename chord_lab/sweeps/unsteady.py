"""A default whose own repeats jump while the others' do not: pairing with it would add its noise to everyone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from chord_lab.sweeps.flags import DRIFT

if TYPE_CHECKING:
    from chord_lab.sweeps.timed import Timed

LEAST_ROUNDS = 3
WORSE = 2.0  # times the spread of the others' own times: ratios that spread more say more of the default than of them
STEADIEST = 4  # one in so many of the others: who was steady shows that the machine was
LOOKED_AT = 64  # candidates; a few dozen tell


def is_unsteady(default: int | None, tried: npt.NDArray[np.int64], timed: Timed) -> bool:
    """Whether the default's repeats jump by themselves.

    A clock dip slows everyone in the same rounds: then ratios spread less than times, and pairing helps. Here the
    steadiest of those who were timed beside slow and fast repeats of the default hardly spread, and their ratios do.
    """
    if default is None or not _jumps(timed.medians_of(default)):
        return False
    spreads = []
    for row in tried[tried != default][:LOOKED_AT]:
        times, ratios = timed.pairs_of(int(row))
        if _jumps(times / ratios):
            spreads.append((np.log(times).std(), np.log(ratios).std()))
    if not spreads:
        return False
    of_times, of_ratios = np.mean(sorted(spreads)[: -(-len(spreads) // STEADIEST)], axis=0)
    return bool(of_ratios > WORSE * of_times and of_ratios > DRIFT / 2)


def _jumps(times: npt.NDArray[np.float64]) -> bool:
    return len(times) >= LEAST_ROUNDS and bool(np.ptp(times) > DRIFT * np.median(times))


def whole_range(mine: npt.NDArray[np.float64], default: npt.NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Least and largest ratio of any repeat of one to any of the other; nothing to say with too few of either."""
    if min(len(mine), len(default)) < LEAST_ROUNDS:
        return None, None
    low, high = float(mine.min() / default.max()), float(mine.max() / default.min())
    return (low, high) if math.isfinite(high) else (None, None)

"""A timeline as a picture of fixed size, so that ten tiles and a hundred thousand cost a browser the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chord_lab.analysis.timeline import TimelineInfo

NUM_BINS = 200
MOST_SLOTS = 132  # one for each SM of the recorded card; more are thinned evenly
IDLE = -1


class RasterInfo(NamedTuple):
    """Which expert each slot works for in each stretch of time."""

    expert: npt.NDArray[np.int16]  # [slots shown, bins]; IDLE where the slot has no tile
    slot: list[int]  # slots shown
    time_us: npt.NDArray[np.float64]  # [bins] middle of each stretch
    num_slots: int  # in all


def raster_info(info: TimelineInfo, *, num_bins: int = NUM_BINS, most_slots: int = MOST_SLOTS) -> RasterInfo:
    """Sample a timeline at the middle of equal stretches of time."""
    end = max(info.end_us, default=0.0)
    edges = np.linspace(0, end, num_bins + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    shown = np.unique(np.linspace(0, info.num_slots - 1, min(most_slots, info.num_slots)).round().astype(np.int64))
    row_of_slot = np.full(info.num_slots, -1)
    row_of_slot[shown] = np.arange(shown.size)
    row = row_of_slot[np.asarray(info.slot, dtype=np.int64)] if info.slot else np.empty(0, dtype=np.int64)
    first = np.searchsorted(middle, info.start_us)
    last = np.searchsorted(middle, info.end_us)
    picture = np.full((shown.size, num_bins), IDLE, dtype=np.int16)
    length = np.where(row >= 0, last - first, 0)
    starts = np.cumsum(length) - length
    bins = np.arange(int(length.sum())) - np.repeat(starts - first, length)
    picture[np.repeat(row, length), bins] = np.repeat(np.asarray(info.expert, dtype=np.int16), length)
    return RasterInfo(picture, shown.tolist(), middle, info.num_slots)

"""Every record's repeats, and its time relative to the default's in the same rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from chord_lab.records.frames import round_medians, segment_medians

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Timed:
    """Every row's repeats and its time relative to the default's in the same rounds."""

    row: npt.NDArray[np.int64]  # of each repeat
    round: npt.NDArray[np.int64]
    median: npt.NDArray[np.float64]
    ratio: npt.NDArray[np.float64]  # to the default in that round; NaN where they do not pair
    estimate: npt.NDArray[np.float64]  # by row: median ratio, or median time where nothing pairs
    pairs: npt.NDArray[np.int64]  # by row
    time: npt.NDArray[np.float64]  # by row: median repeat's median, NaN unless ok

    def medians_of(self, row: int) -> npt.NDArray[np.float64]:
        """A row's repeats; rows of repeats ascend."""
        start, stop = np.searchsorted(self.row, (row, row + 1))
        return self.median[start:stop]

    def pairs_of(self, row: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """A row's repeats and their ratios to the default, of the rounds that pair."""
        start, stop = np.searchsorted(self.row, (row, row + 1))
        paired = ~np.isnan(self.ratio[start:stop])
        return self.median[start:stop][paired], self.ratio[start:stop][paired]


def timed_rows(table: pa.Table, columns: dict[str, Any], contest: npt.NDArray[np.int64]) -> Timed:
    """The repeats of a table whose rows belong to `contest` (-1: none), paired with the default of each."""
    ok = columns["status"] == "ok"
    rows, medians = round_medians(table["times_us"].combine_chunks())
    count = np.bincount(rows, minlength=len(table))
    rounds = _round_numbers(table, count)
    usable = ok[rows] & (medians > 0) & np.isfinite(medians)
    rows, medians, rounds = rows[usable], medians[usable], rounds[usable]
    time = np.full(len(table), np.nan)
    per_row = np.bincount(rows, minlength=len(table))
    time[per_row > 0] = segment_medians(medians, per_row)[per_row > 0]
    reference = columns["default"] & (columns["kind"] == "candidate")
    ratio = medians / _reference_medians(rows, rounds, medians, reference, contest)
    paired = ~np.isnan(ratio)
    pairs = np.bincount(rows[paired], minlength=len(table))
    estimate = segment_medians(ratio[paired], pairs)
    return Timed(rows, rounds, medians, ratio, estimate, pairs, time)


def _round_numbers(table: pa.Table, count: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The round of each repeat; a record that does not say it for each counts its repeats from 0."""
    array = table["rounds"].combine_chunks()
    array = array.fill_null([]) if array.null_count else array
    lengths = np.diff(array.offsets.to_numpy())
    starts = np.cumsum(count) - count
    rounds = np.arange(count.sum()) - np.repeat(starts, count)
    said = lengths == count
    stored = array.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    rounds[np.repeat(said, count)] = stored[np.repeat(said, lengths)]
    return rounds


def _reference_medians(
    rows: npt.NDArray[np.int64],
    rounds: npt.NDArray[np.int64],
    medians: npt.NDArray[np.float64],
    reference: npt.NDArray[np.bool_],
    contest: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """For each repeat, the default's median in the same contest and round; NaN where it was not measured."""
    width = int(rounds.max(initial=0)) + 1
    place = contest[rows] * width + rounds
    of_default = reference[rows]
    keys, index = np.unique(place[of_default], return_index=True)
    values = medians[of_default][index]
    if not len(keys):
        return np.full(len(rows), np.nan)
    at = np.minimum(np.searchsorted(keys, place), len(keys) - 1)
    return np.where(keys[at] == place, values[at], np.nan)

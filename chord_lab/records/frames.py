"""Records as a DataFrame with the derived columns that everything above works on."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from chord_lab.records.parquet import read_tables, to_table
from chord_lab.records.record import Record
from chord_lab.records.statistics import GROUPED_PROFILES

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def to_frame(records: pa.Table | Iterable[Record]) -> pd.DataFrame:
    """One row a record, columns of `arrow_schema`, and derived:

    time_us (median repeat's median launch, NaN unless status is ok and the timer could tell), num_rounds, num_samples,
    active_experts, num_bytes, num_flops, bandwidth_gbps, tflops.
    """
    import pyarrow as pa

    table = records if isinstance(records, pa.Table) else to_table(records)
    lists = [name for name in ("times_us", "tok_e") if name in table.column_names]
    frame = table.drop_columns(lists).to_pandas(types_mapper=None)
    if "times_us" in lists:
        _add_times(frame, table.column("times_us").combine_chunks())
        frame["times_us"] = table.column("times_us").to_pandas()
    if "tok_e" in lists:
        tok_e = table.column("tok_e").combine_chunks()
        frame["active_experts"] = _count_active(tok_e)
        frame["tok_e"] = table.column("tok_e").to_pandas()
    if {"time_us", "active_experts", "N"} <= set(frame.columns):
        _add_rates(frame)
    return frame


def read_frame(
    paths: Sequence[pathlib.Path] | pathlib.Path, columns: Sequence[str] | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """All records under `paths` as by `to_frame`, and a notice for each file or line that was skipped."""
    table, notices = read_tables(paths, columns)
    return to_frame(table), notices


def round_medians(times: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Of a list<list<float>> array: the row of each repeat and the median of each repeat, microseconds."""
    times = times.fill_null([]) if times.null_count else times
    row_offsets = times.offsets.to_numpy()
    repeats = times.values.slice(row_offsets[0], row_offsets[-1] - row_offsets[0])
    rows = np.repeat(np.arange(len(times)), np.diff(row_offsets))
    offsets = repeats.offsets.to_numpy()
    values = repeats.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]].astype(np.float64)
    lengths = np.diff(offsets)
    return rows, segment_medians(values, lengths)


def segment_medians(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The median of each consecutive run of `lengths` values; NaN for an empty run."""
    out = np.full(len(lengths), np.nan)
    if not len(values):
        return out
    segment = np.repeat(np.arange(len(lengths)), lengths)
    ordered = values[np.lexsort((values, segment))]
    starts = np.cumsum(lengths) - lengths
    some = lengths > 0
    low = ordered[(starts + (lengths - 1) // 2)[some]]
    high = ordered[(starts + lengths // 2)[some]]
    out[some] = (low + high) / 2
    return out


def _add_times(frame: pd.DataFrame, times: pa.Array) -> None:
    rows, medians = round_medians(times)
    num_rounds = np.bincount(rows, minlength=len(frame))
    middle = segment_medians(medians, num_rounds)
    ok = (frame["status"] == "ok").to_numpy() if "status" in frame else np.ones(len(frame), dtype=bool)
    known = ok & (middle > 0) & np.isfinite(middle)  # zero: too short to time, so unknown
    frame["time_us"] = np.where(known, middle, np.nan)
    frame["num_rounds"] = num_rounds


def _count_active(tok_e: pa.Array) -> np.ndarray:
    tok_e = tok_e.fill_null([]) if tok_e.null_count else tok_e
    offsets = tok_e.offsets.to_numpy()
    active = tok_e.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]] > 0
    total = np.concatenate([[0], np.cumsum(active)])
    return total[offsets[1:] - offsets[0]] - total[offsets[:-1] - offsets[0]]


def _add_rates(frame: pd.DataFrame) -> None:
    N, K = frame["N"].astype(float), frame["K"].astype(float)
    rows = frame["routed_m"].astype(float)
    weights = N * K / 2 + N * (K / frame["group_size"].astype(float)) * 2
    shared = frame["top_k"].astype(float)
    if "profile" in frame:  # rows laid out by expert have each an x row of their own
        shared = shared.where(~frame["profile"].isin(GROUPED_PROFILES), 1.0)
    x_rows = np.ceil(rows / shared)
    num_bytes = frame["active_experts"] * weights + (x_rows * K + rows * N) * 2
    num_flops = 2 * rows * N * K
    frame["num_bytes"] = num_bytes.fillna(frame["work_bytes"]) if "work_bytes" in frame else num_bytes
    frame["num_flops"] = num_flops.fillna(frame["work_flops"]) if "work_flops" in frame else num_flops
    frame["bandwidth_gbps"] = frame["num_bytes"] / frame["time_us"] / 1e3
    frame["tflops"] = frame["num_flops"] / frame["time_us"] / 1e6

"""From a table of records back to points and candidates, each built once however many rows share it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from w4a16_moe.problem import MoeProblem

from chord_lab.records.attempt import Candidate, Point
from chord_lab.records.rows import PROBLEM_COLUMNS, ROUTING_COLUMNS, SCHEDULE_COLUMNS, routing_of, schedule_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# Scalar columns that tell points apart; the counts are compared through `tok_e_id`.
POINT_COLUMNS = (
    "scenario",
    "projection",
    "profile",
    *PROBLEM_COLUMNS,
    "num_tokens",
    "routed_m",
    *(column for column in ROUTING_COLUMNS.values() if column != "tok_e"),
)
CANDIDATE_COLUMNS = ("kind", "implementation", "config", *SCHEDULE_COLUMNS)


Ids = npt.NDArray[np.int64]


class Decoded(NamedTuple):
    """Row by row: which point, which candidate; -1 where the row has none (a ceiling)."""

    points: list[Point]
    point_of_row: Ids
    candidates: list[Candidate]  # without their default flag: it is the row's
    candidate_of_row: Ids


def decode(table: pa.Table) -> Decoded:
    """Points and candidates of a records table."""
    import pyarrow.compute as pc

    is_gemm = pc.is_valid(table["N"]).combine_chunks().to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(is_gemm)
    gemms = table.take(rows)
    point_ids, point_rows = group(gemms.select(list(POINT_COLUMNS)), tok_e_ids(gemms))
    candidate_ids, candidate_rows = group(gemms.select(list(CANDIDATE_COLUMNS)))
    point_of_row = np.full(len(table), -1, dtype=np.int64)
    candidate_of_row = np.full(len(table), -1, dtype=np.int64)
    point_of_row[rows], candidate_of_row[rows] = point_ids, candidate_ids
    points = [_point(row) for row in gemms.take(point_rows).to_pylist()]
    candidates = [_candidate(row) for row in gemms.take(candidate_rows).to_pylist()]
    return Decoded(points, point_of_row, candidates, candidate_of_row)


def group(table: pa.Table, extra: Ids | None = None) -> tuple[Ids, Ids]:
    """The group number of each row (rows of equal values share one), and the first row of each group."""
    codes = np.zeros(len(table), dtype=np.int64) if extra is None else extra
    codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    for name in table.column_names:
        values = _codes(table[name])
        pairs = codes * (int(values.max(initial=0)) + 1) + values
        codes = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
    first = np.unique(codes, return_index=True)[1]
    return codes, first


def _codes(column: pa.ChunkedArray) -> Ids:
    import pyarrow as pa

    array = column.combine_chunks()
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    return array.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) + 1


def tok_e_ids(table: pa.Table) -> Ids:
    """A number for each row's per-expert counts: equal counts share it."""
    array = table["tok_e"].combine_chunks()
    array = array.fill_null([]) if array.null_count else array
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy(zero_copy_only=False).astype(np.int64)
    known: dict[bytes, int] = {}
    return np.array(
        [known.setdefault(values[a:b].tobytes(), len(known)) for a, b in itertools.pairwise(offsets)],
        dtype=np.int64,
    )


def _point(row: dict[str, Any]) -> Point:
    routing = routing_of(row)
    if routing is None:
        raise ValueError(f"record of {row['scenario']} {row['projection']} has no routing")
    return Point(
        scenario=row["scenario"] or "",
        projection=row["projection"] or "",
        problem=MoeProblem(**{name: row[name] for name in PROBLEM_COLUMNS}),
        profile=row["profile"] or "",
        num_tokens=row["num_tokens"],
        routing=routing,
    )


def _candidate(row: dict[str, Any]) -> Candidate:
    return Candidate(
        schedule=schedule_of(row), kind=row["kind"], implementation=row["implementation"], config=row["config"] or ""
    )


def same_attempt(candidate: Candidate) -> Candidate:
    """The candidate without its default flag: what `Decoded.candidates` holds."""
    return replace(candidate, default=False)


def frame_of(table: pa.Table, columns: list[str]) -> pd.DataFrame:
    """Scalar columns as a DataFrame; words stay categorical."""
    return table.select(columns).to_pandas()

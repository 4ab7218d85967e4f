"""From a table of records back to points and candidates, each built once however many rows share it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from w4a16_moe.problem import MoeProblem

from chord_lab.errors import UserError
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
_ROWS_AT_ONCE = 1 << 16


class Decoded(NamedTuple):
    """Row by row: which point, which candidate; -1 where the row has none (a ceiling)."""

    points: list[Point]
    point_of_row: Ids
    candidates: list[Candidate]  # without their default flag: it is the row's
    candidate_of_row: Ids


_decoded: dict[int, tuple[weakref.ref[Any], Decoded]] = {}  # by id of a living table


def decode(table: pa.Table) -> Decoded:
    """Points and candidates of a records table; remembered while the table lives, since several steps ask.

    Raises:
        UserError: a value that no record can have.
    """
    known = _decoded.get(id(table))
    if known is not None and known[0]() is table:
        return known[1]
    try:
        made = _decode(table)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise UserError(f"these records are damaged: {' '.join(str(error).split())[:200]}") from None
    key = id(table)
    _decoded[key] = (weakref.ref(table, lambda _: _decoded.pop(key, None)), made)
    return made


def _decode(table: pa.Table) -> Decoded:
    import pyarrow.compute as pc

    point_ids, point_rows = group(table.select(list(POINT_COLUMNS)), tok_e_ids(table))
    candidate_ids, candidate_rows = group(table.select(list(CANDIDATE_COLUMNS)))
    is_gemm = pc.is_valid(table["N"]).to_numpy()
    points: list[Point] = []
    of_group = np.full(len(point_rows), -1)
    for number, row in enumerate(table.select([*POINT_COLUMNS, "tok_e"]).take(point_rows).to_pylist()):
        if row["N"] is not None:
            of_group[number] = len(points)
            points.append(_point(row))
    candidates = [_candidate(row) for row in table.select(list(CANDIDATE_COLUMNS)).take(candidate_rows).to_pylist()]
    return Decoded(points, of_group[point_ids], candidates, np.where(is_gemm, candidate_ids, -1))


def group(table: pa.Table, extra: Ids | None = None) -> tuple[Ids, Ids]:
    """The group number of each row (rows of equal values share one), and the first row of each group."""
    import pandas as pd

    codes = np.zeros(len(table), dtype=np.int64) if extra is None else extra
    width = int(codes.max(initial=0)) + 1
    for name in table.column_names:
        values, count = _codes(table[name])
        if count < 2:
            continue
        if width * count > 2**40:  # renumber before the product could overflow
            codes = pd.factorize(codes)[0].astype(np.int64)
            width = int(codes.max(initial=0)) + 1
        codes = codes * count + values
        width *= count
    codes, _ = pd.factorize(codes)
    first = np.full(int(codes.max(initial=-1)) + 1, len(codes), dtype=np.int64)
    np.minimum.at(first, codes, np.arange(len(codes)))
    return codes.astype(np.int64), first


def _codes(column: pa.ChunkedArray) -> tuple[Ids, int]:
    """A small whole number for each value, null included, and how many there may be."""
    import pyarrow as pa

    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    indices = array.indices.fill_null(-1) if array.indices.null_count else array.indices
    return indices.to_numpy(zero_copy_only=False).astype(np.int64) + 1, len(array.dictionary) + 1


def tok_e_ids(table: pa.Table) -> Ids:
    """A number for each row's per-expert counts: equal counts share it."""
    import pandas as pd

    column = table["tok_e"]
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    array = array.fill_null([]) if array.null_count else array
    offsets = array.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    longest = int(lengths.max(initial=0))
    mixing = np.random.default_rng(0).integers(1, 2**62, longest + 1, dtype=np.int64)
    hashes = np.empty(len(array), dtype=np.int64)
    values = array.values
    for start in range(0, len(array), _ROWS_AT_ONCE):  # products of a slice at a time: the counts are long
        stop = min(start + _ROWS_AT_ONCE, len(array))
        counts = values.slice(offsets[start], offsets[stop] - offsets[start]).to_numpy(zero_copy_only=False)
        inside = np.arange(len(counts)) - np.repeat(offsets[start:stop] - offsets[start], lengths[start:stop])
        with np.errstate(over="ignore"):  # sums modulo 2^64
            sums = np.concatenate([[0], np.cumsum((counts.astype(np.int64) + 1) * mixing[inside])])
            hashes[start:stop] = (
                sums[offsets[start + 1 : stop + 1] - offsets[start]] - sums[offsets[start:stop] - offsets[start]]
            )
    return pd.factorize(hashes)[0].astype(np.int64)


def _point(row: dict[str, Any]) -> Point:
    routing = routing_of(row)
    if routing is None:
        raise ValueError(f"a record of {row['scenario']} {row['projection']} has no routing")
    lacking = [
        name for name in ("scenario", "projection", "profile", "num_tokens", "routed_m") if row[name] in (None, "")
    ]
    if lacking:
        raise ValueError(f"a record has no {', '.join(lacking)}")
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

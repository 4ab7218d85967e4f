"""Tiles of a launch: how many, how full, in how many waves over the SMs, and what token slicing can skip."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule, TokenSlicing

from chord_lab.analysis.roofline import ceilings
from chord_lab.analysis.selection import (
    candidates,
    other_knobs,
    require_one_environment,
    require_one_setting,
    rows_of,
    schedule_of_row,
    select,
    source_line,
    spread_us,
)
from chord_lab.errors import UserError
from chord_lab.records.statistics import as_read
from chord_lab.routing import num_blocks

if TYPE_CHECKING:
    import pandas as pd

SLICE = 8  # tokens of a token slice: the MMA's N when operands are swapped


class Waves(NamedTuple):
    """How one launch fills the card."""

    num_tiles: int  # CTAs' worth of work, splits of K counted
    slots: int  # tiles that run at once: num_sms * ctas_per_sm
    waves: float  # tiles / slots
    last_wave: float  # share of slots that the last wave fills; 1 when it is full
    idle_share: float  # slot-time without work if all tiles take equally long


def waves_of(problem: MoeProblem, schedule: Schedule, tok_e: npt.ArrayLike, num_sms: int) -> Waves:
    """Waves of a launch over `num_sms` SMs; stream-K shares its work evenly and leaves no tail."""
    tiles = num_blocks(tok_e, schedule.block_m) * math.ceil(problem.N / schedule.block_n) * schedule.split_k
    slots = num_sms * schedule.ctas_per_sm
    waves = tiles / slots
    if not tiles:
        return Waves(0, slots, 0.0, 0.0, 0.0)
    if schedule.stream_k:
        return Waves(tiles, slots, waves, 1.0, 0.0)
    last = waves - math.floor(waves) or 1.0
    return Waves(tiles, slots, waves, last, 1 - waves / math.ceil(waves))


def slices_of(tok_e: npt.ArrayLike, block_m: int) -> tuple[int, int]:
    """(8-token slices that hold a row, slices in all) of the blocks of one routing."""
    counts = np.asarray(tok_e, dtype=np.int64)
    full, rest = counts // block_m, counts % block_m
    per_block = math.ceil(block_m / SLICE)
    populated = int((full * per_block + -(-rest // SLICE)).sum())
    return populated, num_blocks(counts, block_m) * per_block


class WavesInfo(NamedTuple):
    """Waves and time of schedules; lists run in parallel, one entry a record."""

    label: list[str]
    projection: list[str]
    routed_m: list[int]
    ctas_per_sm: list[int]
    stream_k: list[bool]
    num_tiles: list[int]
    waves: list[float]
    idle_share: list[float]
    time_us: list[float]
    share_of_floor: list[float | None]  # memory or matmul floor over the time
    num_sms: int
    source: str


def waves_info(
    frame: pd.DataFrame,
    *,
    projection: str,
    scenario: str | None = None,
    draw: str | None = None,
    routed_m: int | None = None,
) -> WavesInfo:
    """How grid fill and time go together.

    Raises:
        UserError: no candidate with counts, or unlike environments.
    """
    rows = candidates(select(frame, projection=projection, scenario=scenario, draw=draw, routed_m=routed_m))
    rows = require_one_environment(rows[rows["tok_e"].notna()])
    if not len(rows):
        raise UserError(f"no timed candidate of {projection} with per-expert counts")
    num_sms = int(rows["num_sms"].iloc[0])
    if not num_sms:
        raise UserError("records do not say how many SMs their card has")
    top = ceilings(frame)
    lists: dict[str, list] = {name: [] for name in WavesInfo._fields[:-2]}
    for row in rows_of(rows.sort_values(["routed_m", "time_us"])):
        schedule, problem = schedule_of_row(row), problem_of_row(row)
        assert schedule is not None
        waves = waves_of(problem, schedule, row["tok_e"], num_sms)
        floors = [row["num_bytes"] / top.copy_gbps / 1e3] if top.copy_gbps else []
        floors += [row["num_flops"] / top.dense_tflops / 1e6] if top.dense_tflops else []
        values = (
            schedule.label(), str(row["projection"]), int(row["routed_m"]), schedule.ctas_per_sm, schedule.stream_k,
            waves.num_tiles, waves.waves, waves.idle_share, float(row["time_us"]),
            max(floors) / row["time_us"] if floors else None,
        )  # fmt: skip
        for name, value in zip(lists, values, strict=True):
            lists[name].append(value)
    return WavesInfo(**lists, num_sms=num_sms, source=source_line(rows))


def problem_of_row(row: dict) -> MoeProblem:
    """The problem of one row of a frame, as the row's profile reads it."""
    problem = MoeProblem(**{name: int(row[name]) for name in ("num_experts", "N", "K", "group_size", "top_k")})
    return as_read(problem, str(row.get("profile", "")))


class SlicingInfo(NamedTuple):
    """Time of each token slicing along tokens per expert, all other knobs equal within a point."""

    tokens_per_expert: list[float]
    routed_m: list[int]
    slicing: list[str]
    time_us: list[list[float | None]]  # [slicing][point]
    low_us: list[list[float | None]]
    high_us: list[list[float | None]]
    schedule: list[str]  # per point: the schedule that the slicings share
    block_m: list[int]  # per point
    slices_per_tile: list[float]  # per point: 8-token slices of a tile that hold a row, on average
    slices_in_tile: list[int]  # per point: slices that a tile has
    projection: str
    source: str


def slicing_info(
    frame: pd.DataFrame,
    *,
    projection: str,
    scenario: str | None = None,
    draw: str | None = None,
    block_m: int | None = None,
) -> SlicingInfo:
    """Compare slicings on schedules that differ in nothing else: per point, the family measured with most of them
    (then the fastest family).

    Raises:
        UserError: no family of schedules was measured with two slicings.
    """
    rows = candidates(select(frame, projection=projection, scenario=scenario, draw=draw, block_m=block_m))
    found = _families(require_one_setting(rows))
    if not found:
        raise UserError(f"no schedule of {projection} was measured with two token slicings")
    names = [s for s in get_args(TokenSlicing) if any((family["token_slicing"] == s).any() for family in found)]
    lists: dict[str, list[list]] = {"time_us": [], "low_us": [], "high_us": []}
    for name in names:
        cells = [_fastest_of(family[family["token_slicing"] == name]) for family in found]
        for column, values in zip(lists, zip(*cells, strict=True), strict=True):
            lists[column].append(list(values))
    per_point = [_slices_of_family(family) for family in found]
    return SlicingInfo(
        tokens_per_expert=[float(family["tokens_per_expert"].iloc[0]) for family in found],
        routed_m=[int(family["routed_m"].iloc[0]) for family in found],
        slicing=names,
        **lists,
        schedule=[p[0] for p in per_point],
        block_m=[p[1] for p in per_point],
        slices_per_tile=[p[2] for p in per_point],
        slices_in_tile=[p[3] for p in per_point],
        projection=projection,
        source=source_line(rows),
    )


def _families(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Per point, rows that differ in token slicing alone: most slicings first, then the fastest; none with only one."""
    knobs = ["routed_m", *other_knobs("token_slicing")]
    family = rows.groupby(knobs, observed=True, dropna=False, sort=False).ngroup()
    of_family = rows.groupby(family)
    facts = of_family.agg(
        routed_m=("routed_m", "first"), slicings=("token_slicing", "nunique"), least=("time_us", "min")
    )
    facts = facts[facts["slicings"] > 1].sort_values(["slicings", "least"], ascending=[False, True])
    best = facts.drop_duplicates("routed_m").sort_values("routed_m")
    return [rows[family == number] for number in best.index]


def _fastest_of(rows: pd.DataFrame) -> tuple[float | None, float | None, float | None]:
    if not len(rows):
        return None, None, None
    row = min(rows_of(rows), key=lambda row: row["time_us"])
    return float(row["time_us"]), *spread_us(row)


def _slices_of_family(family: pd.DataFrame) -> tuple[str, int, float, int]:
    row = rows_of(family.iloc[:1])[0]
    schedule = schedule_of_row(row | {"token_slicing": "static"})
    assert schedule is not None
    populated, total = slices_of(row["tok_e"], schedule.block_m)
    in_tile = math.ceil(schedule.block_m / SLICE)
    tiles = total // in_tile
    return schedule.label(), schedule.block_m, populated / tiles if tiles else 0.0, in_tile

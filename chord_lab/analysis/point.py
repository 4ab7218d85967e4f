"""One point under the microscope: every schedule that was timed there, and all that is known of one schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.analysis.comparison import ratio_of
from chord_lab.analysis.selection import (
    candidates,
    is_missing,
    require_one_environment,
    schedule_of_row,
    source_line,
    spread_us,
)
from chord_lab.analysis.tiles import slices_of, waves_of
from chord_lab.analysis.timeline import Card
from chord_lab.errors import UserError
from chord_lab.routing import padding

if TYPE_CHECKING:
    import pandas as pd


class PointInfo(NamedTuple):
    """Timed candidates of one point, fastest first; lists run in parallel."""

    schedule: list[Schedule]
    label: list[str]
    block_m: list[int]
    time_us: list[float]
    low_us: list[float]  # quartiles of the repeats
    high_us: list[float]
    is_default: list[bool]
    num_failed: int  # tried there without a time
    projection: str
    routed_m: int
    tokens_per_expert: float
    draw: str
    source: str


def point_info(rows: pd.DataFrame) -> PointInfo:
    """rows: records of one point (one scenario, projection, routed_m and draw).

    Raises:
        UserError: no timed candidate, several points, or unlike environments.
    """
    mine = candidates(rows)
    if not len(mine):
        raise UserError("no timed candidate at this point")
    for column in ("scenario", "projection", "routed_m", "draw", "seed"):
        if mine[column].nunique() > 1:
            raise UserError(f"several values of {column}: choose one point")
    mine = require_one_environment(mine)
    lists: dict[str, list] = {name: [] for name in PointInfo._fields[:7]}
    for row in mine.sort_values("time_us", kind="stable").to_dict("records"):
        schedule = schedule_of_row(row)
        if schedule is None or schedule in lists["schedule"]:
            continue
        low, high = spread_us(row)
        is_default = bool(row["default"]) if not is_missing(row["default"]) else False
        values = (schedule, schedule.label(), schedule.block_m, float(row["time_us"]), low, high, is_default)
        for name, value in zip(lists, values, strict=True):
            lists[name].append(value)
    failed = rows[(rows["kind"] == "candidate") & (rows["status"] != "ok")]
    first = mine.iloc[0]
    return PointInfo(
        **lists,
        num_failed=len(failed),
        projection=str(first["projection"]),
        routed_m=int(first["routed_m"]),
        tokens_per_expert=float(first["tokens_per_expert"]),
        draw=str(first["draw"]),
        source=source_line(mine),
    )


class ScheduleFacts(NamedTuple):
    """What is known of one schedule at one point."""

    schedule: Schedule
    time_us: float | None
    low_us: float | None
    high_us: float | None
    source: str  # of the time
    num_m_blocks: int
    padding_share: float
    num_tiles: int
    waves: float
    idle_share: float
    slices_filled: float  # share of 8-token slices that hold a row
    bandwidth_gbps: float | None
    tflops: float | None
    floor_us: float | None
    share_of_floor: float | None  # floor / time: 1 is the ceiling
    bound: str  # memory | compute
    registers: int | None  # per thread
    smem_bytes: int | None  # per CTA
    spill_bytes: int | None


def schedule_facts(
    problem: MoeProblem,
    schedule: Schedule,
    tok_e: npt.ArrayLike,
    card: Card,
    *,
    row: dict | None = None,
    predicted_us: float | None = None,
    source: str = "",
) -> ScheduleFacts:
    """Everything of a schedule at a point: from its record's `row` where there is one, else around `predicted_us`.

    ``problem`` as the profile's kernels read it (`records.statistics.as_read`).
    """
    counts = np.asarray(tok_e, dtype=np.int64)
    routed_m, active = int(counts.sum()), int((counts > 0).sum())
    pad = padding(counts, schedule.block_m)
    waves = waves_of(problem, schedule, counts, card.num_sms)
    filled, slices = slices_of(counts, schedule.block_m)
    num_bytes, flops = problem.num_bytes(routed_m, active), problem.flops(routed_m)
    memory_us, compute_us = num_bytes / card.copy_gbps / 1e3, flops / card.dense_tflops / 1e6
    floor = max(memory_us, compute_us)
    time = float(row["time_us"]) if row is not None else predicted_us
    low, high = spread_us(row) if row is not None else (None, None)
    known = row or {}
    return ScheduleFacts(
        schedule=schedule,
        time_us=time,
        low_us=low,
        high_us=high,
        source=source,
        num_m_blocks=pad.num_m_blocks,
        padding_share=pad.padding_share,
        num_tiles=waves.num_tiles,
        waves=waves.waves,
        idle_share=waves.idle_share,
        slices_filled=filled / slices if slices else 0.0,
        bandwidth_gbps=num_bytes / time / 1e3 if time else None,
        tflops=flops / time / 1e6 if time else None,
        floor_us=floor,
        share_of_floor=floor / time if time else None,
        bound="memory" if memory_us >= compute_us else "compute",
        registers=_count(known.get("registers")),
        smem_bytes=_count(known.get("smem_bytes")),
        spill_bytes=_count(known.get("spill_bytes")),
    )


def _count(value: object) -> int | None:
    return None if value is None or is_missing(value) else int(value)  # type: ignore[call-overload]


class RivalInfo(NamedTuple):
    """Two schedules at one point: rival's time over ours."""

    ratio: float  # above 1 where ours is faster
    low: float | None  # 95 % interval from paired repeats; None where they cannot be paired
    high: float | None
    verdict: str  # win | tie | loss | unknown


def rival_info(ours: dict | None, rival: dict | None) -> RivalInfo | None:
    """Compare two recorded rows of one point; None where one of them has no record."""
    if ours is None or rival is None:
        return None
    paired = ratio_of(rival, ours)
    plain = float(rival["time_us"]) / float(ours["time_us"])
    if paired is None or paired.num_pairs < 2:
        return RivalInfo(plain, None, None, "unknown")
    verdict = "win" if paired.low > 1 else "loss" if paired.high < 1 else "tie"
    return RivalInfo(paired.estimate, paired.low, paired.high, verdict)

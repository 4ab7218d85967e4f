"""Tiles of each expert placed on SM slots over time: simulated from per-expert counts, checked against a recorded time.

The simulation knows three numbers of the card: copy bandwidth, dense matmul rate, and what a launch costs before its
first byte. A slot (one CTA's place on an SM) gets an equal share of both rates; a tile takes the longer of its bytes
and its multiplications at that share, padding rows included, because the kernel multiplies them. What this leaves out
(cache misses, ramp, instruction issue) shows as the error against the recorded time, which is always reported.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.analysis.roofline import ceilings
from chord_lab.analysis.selection import (
    candidates,
    rows_of,
    schedule_of_row,
    source_line,
)
from chord_lab.analysis.tiles import SLICE, problem_of_row
from chord_lab.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

LAUNCH_US = 3.8  # an empty launch under the same timer, measured on the recorded H200


class Card(NamedTuple):
    """What the simulation knows of a card."""

    num_sms: int
    copy_gbps: float
    dense_tflops: float
    launch_us: float = LAUNCH_US


class TimelineInfo(NamedTuple):
    """Tiles in the order in which they start; lists run in parallel, one entry a tile (or a stream-K piece of one)."""

    slot: list[int]
    start_us: list[float]
    end_us: list[float]
    expert: list[int]
    block: list[int]  # index of the token block in the routing
    column: list[int]  # index of the block of output columns
    valid_rows: list[int]  # routed rows in the block, without padding
    num_slots: int
    num_tiles: int
    simulated_us: float  # launch included
    busy_share: float  # slot-time with a tile on it, from the first start to the last end
    recorded_us: float | None
    error: float | None  # simulated / recorded - 1
    schedule: str
    source: str


def timeline_info(
    problem: MoeProblem,
    schedule: Schedule,
    tok_e: npt.ArrayLike,
    card: Card,
    *,
    recorded_us: float | None = None,
    source: str = "simulated",
) -> TimelineInfo:
    """Place every tile of one launch.

    tok_e ``[num_experts]``. Persistent static grids take tiles by stride; queues and plain grids give the next tile to
    the slot that is free first; stream-K cuts the whole of (tile, K) into equal runs.
    """
    expert, valid = _blocks(np.asarray(tok_e, dtype=np.int64), schedule.block_m)
    order = _order(len(expert), math.ceil(problem.N / schedule.block_n), schedule.group_m)
    num_tiles = len(order)
    slots = min(card.num_sms * schedule.ctas_per_sm, max(1, num_tiles * schedule.split_k))
    cost = _tile_us(problem, schedule, (expert, valid), card, slots)
    durations = cost[order[:, 0]] if num_tiles else np.empty(0)
    if schedule.split_k > 1:
        order = np.repeat(order, schedule.split_k, axis=0)
        durations = np.repeat(durations / schedule.split_k, schedule.split_k)
    which, slot, start, end = _place(schedule, durations, slots)
    tiles = order[which]
    block, column = tiles[:, 0], tiles[:, 1]
    span = float(end.max(initial=0.0))
    simulated = span + card.launch_us
    return TimelineInfo(
        slot=slot.tolist(),
        start_us=(start + card.launch_us).tolist(),
        end_us=(end + card.launch_us).tolist(),
        expert=expert[block].tolist(),
        block=block.tolist(),
        column=column.tolist(),
        valid_rows=valid[block].tolist(),
        num_slots=slots,
        num_tiles=num_tiles,
        simulated_us=simulated,
        busy_share=min(1.0, float((end - start).sum() / (span * slots))) if span else 0.0,
        recorded_us=recorded_us,
        error=simulated / recorded_us - 1 if recorded_us else None,
        schedule=schedule.label(),
        source=source,
    )


def _place(schedule: Schedule, durations: np.ndarray, slots: int) -> tuple[np.ndarray, ...]:
    """Index of the tile, slot, start and end of each piece of work, by the schedule's own way of handing out tiles."""
    if schedule.stream_k:
        return _stream_k(durations, slots)
    if schedule.persistent and schedule.tile_order == "static":
        return _by_stride(durations, slots)
    return _first_free(durations, slots)


def _blocks(tok_e: np.ndarray, block_m: int) -> tuple[np.ndarray, np.ndarray]:
    """Expert and valid rows of each token block, in the routing's order."""
    per_expert = -(-tok_e // block_m)
    expert = np.repeat(np.arange(tok_e.size), per_expert)
    first = np.cumsum(per_expert) - per_expert
    rank = np.arange(expert.size) - first[expert]
    return expert, np.minimum(tok_e[expert] - rank * block_m, block_m)


def _order(blocks: int, columns: int, group_m: int) -> np.ndarray:
    """``[tiles, 2]`` (block, column) in launch order: columns fastest, `group_m` blocks sharing a sweep over them."""
    block, column = np.meshgrid(np.arange(blocks), np.arange(columns), indexing="ij")
    key = np.lexsort((block.ravel(), column.ravel(), block.ravel() // group_m))
    return np.stack([block.ravel()[key], column.ravel()[key]], axis=1)


def _tile_us(
    problem: MoeProblem, schedule: Schedule, blocks: tuple[np.ndarray, np.ndarray], card: Card, slots: int
) -> np.ndarray:
    """Microseconds of a tile of each block (expert, valid rows) when `slots` share the card."""
    expert, valid = blocks
    width = min(schedule.block_n, problem.N)
    weights = width * problem.K // 2 + width * problem.num_groups * 2
    blocks_of_expert = np.bincount(expert)[expert] if len(expert) else expert
    # An expert's weights come from memory once: its further blocks find them in L2, as later columns find x.
    read = weights / np.maximum(blocks_of_expert, 1)
    columns = math.ceil(problem.N / schedule.block_n)
    moved = read + valid * (problem.K / columns / problem.top_k + width) * 2
    rows = np.full(len(valid), schedule.block_m)
    if schedule.token_slicing != "static":
        rows = -(-valid // SLICE) * SLICE
    flops = 2.0 * rows * width * problem.K
    return np.maximum(moved / (card.copy_gbps / slots) / 1e3, flops / (card.dense_tflops / slots) / 1e6)


def _first_free(durations: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Each tile in turn goes to the slot that is free first (lowest number on ties)."""
    free = [(0.0, s) for s in range(slots)]
    slot, start = np.empty(len(durations), dtype=np.int64), np.empty(len(durations))
    for i, duration in enumerate(durations.tolist()):
        time, s = free[0]
        slot[i], start[i] = s, time
        heapq.heapreplace(free, (time + duration, s))
    return np.arange(len(durations)), slot, start, start + durations


def _by_stride(durations: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tile i goes to slot i % slots."""
    slot = np.arange(len(durations)) % slots
    rounds = -(-len(durations) // slots)
    padded = np.zeros(rounds * slots)
    padded[: len(durations)] = durations
    ends = np.cumsum(padded.reshape(rounds, slots), axis=0).ravel()[: len(durations)] if rounds else padded
    return np.arange(len(durations)), slot, ends - durations, ends


def _stream_k(durations: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The tiles in a row, cut into `slots` equal runs; a tile that spans a cut is two pieces."""
    total = float(durations.sum())
    if not total:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty, np.empty(0), np.empty(0)
    ends = np.cumsum(durations)
    cuts = total * np.arange(1, slots) / slots
    bounds = np.unique(np.concatenate([[0.0], ends, cuts]))
    bounds = bounds[np.concatenate([[True], np.diff(bounds) > total * 1e-12])]
    middle = (bounds[:-1] + bounds[1:]) / 2
    which = np.minimum(np.searchsorted(ends, middle), len(durations) - 1)
    slot = np.minimum((middle / total * slots).astype(np.int64), slots - 1)
    origin = total * slot / slots
    return which, slot, bounds[:-1] - origin, bounds[1:] - origin


def card_of(frame: pd.DataFrame) -> Card:
    """The card of a frame's records, from the ceilings measured beside them.

    Raises:
        UserError: a ceiling or the number of SMs is missing.
    """
    top = ceilings(frame)
    num_sms = int(frame["num_sms"].max()) if len(frame) else 0
    if not (top.copy_gbps and top.dense_tflops and num_sms):
        raise UserError(
            "the timeline needs measured ceilings (copy, dense bf16) and the number of SMs; records lack them"
        )
    return Card(num_sms, top.copy_gbps, top.dense_tflops)


def timeline_of_row(row: dict, card: Card, source: str = "") -> TimelineInfo:
    """The timeline of one recorded candidate, with its error against the recorded time."""
    schedule = schedule_of_row(row)
    if schedule is None or row.get("tok_e") is None:
        raise UserError("a timeline needs a schedule and the per-expert counts of its routing")
    return timeline_info(
        problem_of_row(row), schedule, row["tok_e"], card, recorded_us=float(row["time_us"]), source=source
    )


class TimelineErrorInfo(NamedTuple):
    """How far the simulation is off on recorded candidates."""

    num_records: int
    median_absolute_error: float
    p90_absolute_error: float
    bias: float  # median of simulated / recorded - 1
    source: str


def timeline_error_info(frame: pd.DataFrame, *, most: int = 200) -> TimelineErrorInfo:
    """Errors over at most `most` candidates, spread evenly over the frame.

    Raises:
        UserError: nothing to check against.
    """
    rows = candidates(frame)
    rows = rows[rows["tok_e"].notna()]
    if not len(rows):
        raise UserError("no timed candidate with per-expert counts")
    card = card_of(frame)
    picked = rows.iloc[np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))]
    errors = np.array([timeline_of_row(row, card).error for row in rows_of(picked)], dtype=float)
    return TimelineErrorInfo(
        num_records=len(errors),
        median_absolute_error=float(np.median(np.abs(errors))),
        p90_absolute_error=float(np.percentile(np.abs(errors), 90)),
        bias=float(np.median(errors)),
        source=source_line(picked),
    )

"""How near to the measured ceilings? GB/s of what must move, TFLOPS of real rows, and times that cannot be true."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from chord_lab.analysis.comparison import name_tiles
from chord_lab.analysis.selection import (
    OURS,
    fastest,
    point_columns,
    require_one_environment,
    rows_of,
    schedule_of_row,
    select,
    source_line,
    timed,
)
from chord_lab.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

# A read-mostly kernel moves up to 1.4 % more than the copy that sets the ceiling; 5 % more than it is not believed.
BANDWIDTH_TOLERANCE = 1.05
# The matmul ceiling is a sustained one at the power cap; the same multiplication runs 17 % faster before the cap bites.
MATMUL_TOLERANCE = 1.2

COUNTING = (
    "GB/s counts active experts' codes and scales once, activations once and outputs once; "
    "TFLOPS counts real routed rows, not padding"
)


class Ceilings(NamedTuple):
    """What the same card did at best in the same run; None where it was not measured."""

    copy_gbps: float | None
    dense_tflops: float | None


class RooflineInfo(NamedTuple):
    """One entry a record; lists run in parallel."""

    label: list[str]
    implementation: list[str]
    projection: list[str]
    routed_m: list[int]
    tokens_per_expert: list[float]
    draw: list[str]
    time_us: list[float]
    intensity: list[float]  # FLOPs per byte that must move
    bandwidth_gbps: list[float]
    tflops: list[float]
    floor_us: list[float | None]  # larger of bytes / copy bandwidth and FLOPs / matmul rate
    share_of_floor: list[float | None]  # floor / time: 1 is the ceiling
    bandwidth_share: list[float | None]
    matmul_share: list[float | None]
    bound: list[str]  # memory | compute: which ceiling sets the floor; "" without ceilings
    impossible: list[str]  # "" or why the time cannot be true
    copy_gbps: float | None
    dense_tflops: float | None
    ridge: float | None  # intensity at which the two ceilings meet
    counting: str
    source: str


def ceilings(frame: pd.DataFrame) -> Ceilings:
    """The best measured copy bandwidth and dense bf16 matmul rate."""
    rows = timed(frame[frame["kind"] == "ceiling"])

    def best(implementation: str, column: str) -> float | None:
        values = rows.loc[rows["implementation"] == implementation, column].dropna()
        return float(values.max()) if len(values) else None

    return Ceilings(best("copy", "bandwidth_gbps"), best("dense_bf16", "tflops"))


def impossible(bandwidth_gbps: float, tflops: float, top: Ceilings) -> str:
    """Why a measurement cannot be true; "" if it can."""
    if top.copy_gbps and bandwidth_gbps > top.copy_gbps * BANDWIDTH_TOLERANCE:
        return f"{bandwidth_gbps:.0f} GB/s is more than the measured copy bandwidth of {top.copy_gbps:.0f}"
    if top.dense_tflops and tflops > top.dense_tflops * MATMUL_TOLERANCE:
        return f"{tflops:.0f} TFLOPS is more than the measured dense rate of {top.dense_tflops:.0f}"
    return ""


def roofline_info(
    frame: pd.DataFrame,
    *,
    scenario: str | None = None,
    projection: str | None = None,
    draw: str | None = None,
    best_only: bool = True,
) -> RooflineInfo:
    """Candidates, peers and baselines against the ceilings of their own run.

    best_only: the fastest record of each implementation at each point (of a peer also with its best tile), else all.

    Raises:
        UserError: nothing is left, or unlike environments.
    """
    top = ceilings(frame)
    rows = timed(select(frame[frame["kind"] != "ceiling"], scenario=scenario, projection=projection, draw=draw))
    rows = rows[rows["num_bytes"].notna() & (rows["num_flops"] > 0)]
    if not len(rows):
        raise UserError("no timed GEMM to place under the roofline")
    rows = require_one_environment(rows)
    if best_only:
        rows = name_tiles(rows)
        rows = fastest(rows, ["implementation", *point_columns(rows)])
    rows = rows.sort_values(["projection", "routed_m", "time_us"], kind="stable")
    found = [_place(row, top) for row in rows_of(rows)]
    columns = {name: [entry[name] for entry in found] for name in found[0]}
    ridge = top.dense_tflops * 1e3 / top.copy_gbps if top.copy_gbps and top.dense_tflops else None
    return RooflineInfo(
        **columns,
        copy_gbps=top.copy_gbps,
        dense_tflops=top.dense_tflops,
        ridge=ridge,
        counting=COUNTING,
        source=source_line(rows),
    )


def _place(row: dict, top: Ceilings) -> dict:
    time, num_bytes, num_flops = float(row["time_us"]), float(row["num_bytes"]), float(row["num_flops"])
    bandwidth, rate = num_bytes / time / 1e3, num_flops / time / 1e6
    memory_us = num_bytes / top.copy_gbps / 1e3 if top.copy_gbps else None
    compute_us = num_flops / top.dense_tflops / 1e6 if top.dense_tflops else None
    floors = [f for f in (memory_us, compute_us) if f is not None]
    floor = max(floors, default=None)
    schedule = schedule_of_row(row) if row["implementation"] == OURS else None
    both = memory_us is not None and compute_us is not None
    return {
        "label": schedule.label() if schedule else str(row["implementation"]),
        "implementation": str(row["implementation"]),
        "projection": str(row["projection"]),
        "routed_m": int(row["routed_m"]),
        "tokens_per_expert": float(row["routed_m"] / row["num_experts"]),
        "draw": str(row["draw"]),
        "time_us": time,
        "intensity": num_flops / num_bytes,
        "bandwidth_gbps": bandwidth,
        "tflops": rate,
        "floor_us": floor,
        "share_of_floor": floor / time if floor is not None else None,
        "bandwidth_share": bandwidth / top.copy_gbps if top.copy_gbps else None,
        "matmul_share": rate / top.dense_tflops if top.dense_tflops else None,
        "bound": "" if not both else "memory" if memory_us >= compute_us else "compute",  # type: ignore[operator]
        "impossible": impossible(bandwidth, rate, top),
    }

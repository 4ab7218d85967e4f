"""Why a point's numbers should be read with care."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from chord_lab.records.attempt import Point

DRIFT = 0.05  # the default's repeats differ by more: the machine changed while it measured
THROTTLED = 0.85  # of the highest SM clock: the card ran below it all the time
COPY_SLACK = 1.05  # a GEMM may not move bytes faster than a copy of 2 GiB, but for rounding of the model
DENSE_SLACK = 1.30  # short GEMMs run at a higher clock than the long dense product that sets the ceiling


def point_flags(
    point: Point,
    rows: npt.NDArray[np.int64],
    best: int,
    *,
    columns: dict[str, Any],
    timed: Any,
    ceilings: dict[str, float],
) -> tuple[str, ...]:
    """Short sentences; none is the good case."""
    flags = ["predicted, not measured"] if columns["source"][best] == "predicted" else []
    default = [r for r in rows if columns["default"][r]]
    medians = timed.median[np.isin(timed.row, default)] if default else np.empty(0)
    if len(medians) > 1 and np.ptp(medians) > DRIFT * np.median(medians):
        flags.append(f"drift: the default's repeats differ by {np.ptp(medians) / np.median(medians):.0%}")
    clocks = _clocks(columns, rows)
    highest = float(np.nanmax(columns["max_sm_mhz"][rows].astype(float), initial=0))
    if len(clocks) and highest and clocks.max() < THROTTLED * highest:
        flags.append(f"throttled: SM clock at most {clocks.max():.0f} of {highest:.0f} MHz")
    if timed.pairs[best] == 0 and default:
        flags.append("unpaired: the default was not measured in the same rounds")
    return (*flags, *_impossible(point, float(timed.time[best]), ceilings))


def _clocks(columns: dict[str, Any], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    values = columns["sm_mhz"].take(rows).flatten().to_numpy(zero_copy_only=False)
    return values[values > 0]


def _impossible(point: Point, time_us: float, ceilings: dict[str, float]) -> list[str]:
    """Times that imply more than the device can do."""
    gbps, tflops = point.num_bytes / time_us / 1e3, point.flops / time_us / 1e6
    found = []
    if "copy" in ceilings and gbps > COPY_SLACK * ceilings["copy"]:
        found.append(f"impossible: {gbps:.0f} GB/s, a copy reaches {ceilings['copy']:.0f}")
    if "dense_bf16" in ceilings and tflops > DENSE_SLACK * ceilings["dense_bf16"]:
        found.append(f"impossible: {tflops:.0f} TFLOPS, a dense product reaches {ceilings['dense_bf16']:.0f}")
    return found

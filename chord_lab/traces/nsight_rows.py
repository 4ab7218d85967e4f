"""Figures that `nsight-python` gave in the profiled process, as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chord_lab.traces.identity import KEY_PREFIX
from chord_lab.traces.numerals import base_unit
from chord_lab.traces.table import Trace, kernel_frame, metric_frame, nvtx_frame

TIME = "gpu__time_duration.sum"


def trace_of_rows(result: dict[str, Any], path: Path, tool: str) -> Trace:
    """A trace from the result of `measurement.profiled`: a row a job, because the tool sums a job's kernels."""
    names, times, paths = [], [], []
    metrics: list[tuple[int, str, float, str, str | None]] = []
    devices: dict[str, None] = {}
    for index, job in enumerate(result["done"]):
        figures = {}
        for row in job["rows"]:
            unit, factor = base_unit(row["unit"])
            figures[row["metric"]] = row["value"] * factor
            metrics.append((index, row["metric"], row["value"] * factor, unit, None))
            devices[row["device"]] = None
        names.append(job["rows"][0]["kernel"] if job["rows"] else job.get("ran_kernel", ""))
        times.append(figures.get(TIME, float("nan")) / 1e3)
        paths.append(KEY_PREFIX + job["key"])
    return Trace(
        kind=f"{tool}-rows",
        path=path,
        device=", ".join(devices) or None,
        kernels=kernel_frame({"name": names, "time_us": times, "nvtx": paths}),
        nvtx=nvtx_frame(),
        metrics=metric_frame(metrics),
        notes=(
            "no grid, registers or shared memory: nsight-python gives the metrics that were asked for",
            "kernels of one launch are summed",
        ),
        facts={"tool": "nsight-python", "backend": tool},
    )

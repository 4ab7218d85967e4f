"""Humming-style rows ``[min_m, max_m, config]`` and Kernel Tuner's T4 results."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4a16_moe.schedule import Schedule
from w4a16_moe.tables import ProblemTable, TuningFile

from chord_lab.analysis.selection import is_missing, round_medians, rows_of, schedule_of_row
from chord_lab.export.tables.kernels import KernelTables
from chord_lab.export.tables.triton_moe import write_json

if TYPE_CHECKING:
    import pandas as pd

OPEN_END = 1 << 30  # the row format has no open end: this many rows stand for it
T4_VERSION = "1.0.0"

# Our status -> T4's word for why a result does not count.
_INVALIDITY = {
    "ok": "correct",
    "invalid": "constraints",
    "does_not_fit": "constraints",
    "compile_error": "compile",
    "wrong_result": "correctness",
    "timeout": "timeout",
    "out_of_resources": "runtime",
    "launch_error": "runtime",
    "crashed": "runtime",
}


def humming_config(schedule: Schedule) -> dict[str, Any]:
    """A schedule in the words of Humming's tuning rows; warps divide the columns of a tile."""
    return {
        "block_shape": [schedule.block_m, schedule.block_n, schedule.block_k],
        "warp_shape": [schedule.block_m, max(1, schedule.block_n // schedule.num_warps), schedule.block_k],
        "num_stages": schedule.num_stages,
        "num_ctas_per_sm": schedule.ctas_per_sm,
        "use_stream_k": schedule.stream_k,
        "swap_ab": schedule.swap_ab,
    }


def humming_rows(table: ProblemTable) -> list[list[Any]]:
    """``[[min_m, max_m, config], ...]`` with min_m < rows <= max_m, from 0 to 2^30."""
    return [
        [row.min_m, OPEN_END if row.max_m is None else row.max_m, humming_config(row.schedule)] for row in table.rows
    ]


def write_humming(file: TuningFile, tables: KernelTables, folder: Path) -> list[Path]:
    """One file of rows per problem, and beside it what it was made from (the row format has no header)."""
    written = []
    projections = {p.problem: p.projection for p in tables.points}
    for table in file.tables:
        if table.problem not in projections:
            continue
        p = table.problem
        stem = f"{file.device}-{file.profile.name}-{projections[p]}-E{p.num_experts}-N{p.N}-K{p.K}"
        written.append(write_json(folder / f"{stem}.json", humming_rows(table)))
        about = {
            "target": "kernels of w4a16_moe, in Humming's row form; Humming's own kernels may refuse a tile",
            "profile": file.profile.name,
            "problem": p.to_dict(),
            "schedules": [row.schedule.to_dict() for row in table.rows],
            "provenance": tables.provenance,
        }
        written.append(write_json(folder / f"{stem}.provenance.json", about))
    return written


def write_t4(frame: pd.DataFrame, folder: Path) -> list[Path]:
    """Every candidate, peers and failures included, as T4 results and metadata."""
    rows = frame[frame["kind"] != "ceiling"]
    results = {"schema_version": T4_VERSION, "results": [t4_result(row) for row in rows_of(rows)]}
    devices = sorted({str(d) for d in rows["device_name"].dropna().unique()})
    names = ("driver", "cuda", "torch", "triton", "ptxas")
    seen = {n: sorted({str(v) for v in rows[n].dropna().unique()} - {""}) for n in names if n in rows}
    metadata = {
        "schema_version": T4_VERSION,
        "metadata": {
            "hardware": {"hardware_description": devices, "operating_system": sys.platform},
            "environment": {
                "device_query": {"device_name": devices},
                "requirements": [f"{name}=={version}" for name, versions in seen.items() for version in versions],
            },
        },
    }
    return [write_json(folder / "results.json", results), write_json(folder / "metadata.json", metadata)]


def t4_result(row: dict[str, Any]) -> dict[str, Any]:
    """One record: configuration (problem, point and schedule), times in milliseconds, validity."""
    schedule = schedule_of_row(row)
    configuration: dict[str, Any] = {
        name: _plain(row[name])
        for name in ("implementation", "scenario", "projection", "num_experts", "N", "K", "routed_m", "draw", "seed")
        if not is_missing(row.get(name))
    }
    configuration |= schedule.to_dict() if schedule else {"config": _plain(row.get("config"))}
    status = str(row["status"])
    measurements = []
    if not is_missing(row.get("time_us")):
        measurements.append({"name": "time", "value": float(row["time_us"]), "unit": "us"})
    for name, unit in (("bandwidth_gbps", "GB/s"), ("tflops", "TFLOPS"), ("rel_error", "")):
        if not is_missing(row.get(name)):
            measurements.append({"name": name, "value": float(row[name]), "unit": unit})
    return {
        "timestamp": str(row["date"]),
        "configuration": configuration,
        "objectives": ["time"],
        "times": {"runtimes": [time / 1e3 for time in round_medians(row.get("times_us")) if math.isfinite(time)]},
        "invalidity": _INVALIDITY.get(status, "runtime"),
        "correctness": 1 if status == "ok" else 0,
        "measurements": measurements,
    }


def _plain(value: Any) -> Any:
    if is_missing(value):
        return ""
    return value.item() if hasattr(value, "item") else value

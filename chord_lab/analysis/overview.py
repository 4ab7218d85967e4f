"""What a run holds: what was tried, what failed and why, where, and how steady the card was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from chord_lab.analysis.roofline import BANDWIDTH_TOLERANCE, MATMUL_TOLERANCE, Ceilings, ceilings, impossible
from chord_lab.analysis.selection import (
    environments,
    is_missing,
    round_medians,
    rows_of,
    schedule_of_row,
    source_line,
    timed,
)

if TYPE_CHECKING:
    import pandas as pd

DRIFT = 0.08  # repeats of one schedule that differ more than this: the clock moved, or something else ran


class Failure(NamedTuple):
    """One way in which candidates failed."""

    status: str
    rule: str
    num_candidates: int
    example: str  # a schedule that failed this way
    reason: str  # its reason


class FailureInfo(NamedTuple):
    """Failures of a run, most frequent first."""

    tried: int
    ok: int
    failures: list[Failure]
    source: str


def failure_info(frame: pd.DataFrame) -> FailureInfo:
    """Everything that has no time, by kind and rule."""
    tried = frame[frame["kind"] != "ceiling"]
    bad = tried[tried["status"] != "ok"]
    rules = bad["rule"].astype(object).where(bad["rule"].notna(), "")
    failures = []
    for (status, rule), part in bad.assign(rule=rules).groupby(["status", "rule"], observed=True, sort=False):
        row = part.iloc[0].to_dict()
        schedule = schedule_of_row(row)
        label = schedule.label() if schedule else str(row["implementation"])
        reason = "" if is_missing(row.get("reason")) else str(row["reason"])
        failures.append(Failure(str(status), str(rule), len(part), label, reason))
    failures.sort(key=lambda f: -f.num_candidates)
    return FailureInfo(len(tried), int((tried["status"] == "ok").sum()), failures, source_line(frame))


class EnvironmentInfo(NamedTuple):
    """Where and how the records were measured; one entry per like environment, most records first."""

    records: list[int]
    fields: list[list[tuple[str, str]]]  # (name, value) in reading order
    source: str


_SHOWN = (
    ("device_name", "device"),
    ("num_sms", "SMs"),
    ("driver", "driver"),
    ("cuda", "CUDA"),
    ("torch", "torch"),
    ("triton", "triton"),
    ("ptxas", "ptxas"),
    ("python", "Python"),
    ("power_limit_w", "power limit, W"),
    ("max_sm_mhz", "highest SM clock, MHz"),
    ("kernels", "kernel sources"),
    ("peers", "peers"),
    ("timer", "timer"),
    ("l2", "L2 before a launch"),
    ("timed", "inside the timed region"),
    ("warmup_ms", "discarded before a repeat, ms"),
    ("rep_ms", "length of a repeat, ms"),
    ("load_s", "discarded load before the first repeat, s"),
)


def environment_info(frame: pd.DataFrame) -> EnvironmentInfo:
    """The environments that a frame mixes, each with its method."""
    parts = environments(frame)
    described = []
    for part in parts:
        values = []
        for column, name in _SHOWN:
            if column not in part:
                continue
            seen = [v for v in part[column].unique() if not is_missing(v) and str(v) not in ("", "0", "0.0")]
            if seen:
                values.append((name, ", ".join(_short(v) for v in seen[:4])))
        dates = sorted(str(d) for d in part["date"].dropna())
        if dates:
            values.append(("measured", " to ".join(d[:16].replace("T", " ") for d in (dates[0], dates[-1])) + " UTC"))
        described.append(values)
    return EnvironmentInfo([len(part) for part in parts], described, source_line(frame))


def _short(value: object) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:g}"
    return str(value)


class DoubtInfo(NamedTuple):
    """Times that should not be trusted as they stand; lists run in parallel."""

    label: list[str]
    projection: list[str]
    routed_m: list[int]
    time_us: list[float]
    doubt: list[str]
    source: str


def doubt_info(frame: pd.DataFrame) -> DoubtInfo:
    """Times beyond the ceilings, repeats that disagree, runs too short for the timer."""
    top = ceilings(frame)
    lists: dict[str, list] = {n: [] for n in DoubtInfo._fields[:-1]}
    rows = frame[(frame["kind"] != "ceiling") & (frame["status"] == "ok")]
    medians = [round_medians(times) for times in rows["times_us"]]
    unsteady = [len(m) > 1 and max(m) > min(m) * (1 + DRIFT) for m in medians]
    untimed = rows["time_us"].isna() & (rows["num_rounds"] > 0)
    beyond = np.zeros(len(rows), dtype=bool)
    if top.copy_gbps:
        beyond |= (rows["bandwidth_gbps"] > top.copy_gbps * BANDWIDTH_TOLERANCE).to_numpy()
    if top.dense_tflops:
        beyond |= (rows["tflops"] > top.dense_tflops * MATMUL_TOLERANCE).to_numpy()
    doubtful = np.array(unsteady, dtype=bool) | untimed.to_numpy() | beyond
    for row in rows_of(rows[doubtful]):
        schedule = schedule_of_row(row)
        label = schedule.label() if schedule else str(row["implementation"])
        time = float("nan") if is_missing(row["time_us"]) else float(row["time_us"])
        values = (label, str(row["projection"]), int(row["routed_m"]), time, "; ".join(_doubts(row, top)))
        for name, value in zip(lists, values, strict=True):
            lists[name].append(value)
    return DoubtInfo(**lists, source=source_line(timed(frame)))


def _doubts(row: dict[str, Any], top: Ceilings) -> list[str]:
    if is_missing(row["time_us"]):
        return ["too short to time"]
    beyond = impossible(float(row["bandwidth_gbps"]), float(row["tflops"]), top)
    doubts = [beyond] if beyond else []
    medians = round_medians(row["times_us"])
    if len(medians) > 1 and max(medians) > min(medians) * (1 + DRIFT):
        doubts.append(f"repeats differ by {max(medians) / min(medians) - 1:.0%} (drift or throttling)")
    return doubts

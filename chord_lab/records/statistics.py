"""What is derived from a record's raw times."""

from __future__ import annotations

import statistics
from dataclasses import replace

from w4a16_moe.problem import MoeProblem
from w4a16_moe.profiles import PROFILES

from chord_lab.records.record import Record

GROUPED_PROFILES = frozenset(name for name, profile in PROFILES.items() if profile.interface != "indexed")


def round_medians_us(record: Record) -> tuple[float, ...]:
    """The median launch of each interleaved repeat."""
    return tuple(statistics.median(times) for times in record.times_us if times)


def median_us(record: Record) -> float | None:
    """The median repeat's median launch; None where nothing was timed, or the timer gave nothing but zero."""
    medians = round_medians_us(record)
    if not medians:
        return None
    return statistics.median(medians) or None


def is_too_short(record: Record) -> bool:
    """Timed, but shorter than the timer can tell: the time is not zero, it is unknown."""
    return record.status == "ok" and bool(record.times_us) and median_us(record) is None


def spread(record: Record) -> float | None:
    """(slowest - fastest repeat) / median repeat; None with fewer than two repeats."""
    medians = round_medians_us(record)
    middle = median_us(record)
    if len(medians) < 2 or middle is None:
        return None
    return (max(medians) - min(medians)) / middle


def as_read(problem: MoeProblem, profile: str) -> MoeProblem:
    """The problem as the profile's kernels read it: rows laid out by expert have each an x row of their own."""
    return replace(problem, top_k=1) if profile in GROUPED_PROFILES else problem


def num_bytes(record: Record) -> int:
    """Bytes that must move: active experts' codes and scales, each x row once, each y row once."""
    if record.problem is None or record.routing is None:
        return record.work_bytes
    problem = as_read(record.problem, record.profile)
    return problem.num_bytes(record.routed_m, record.routing.active_experts)


def flops(record: Record) -> int:
    """Operations of the real routed rows; padding does not count."""
    return record.problem.flops(record.routed_m) if record.problem else record.work_flops


def bandwidth_gbps(record: Record) -> float | None:
    """`num_bytes` over the median time; None where the time is unknown."""
    time = median_us(record)
    return num_bytes(record) / time / 1e3 if time else None


def tflops(record: Record) -> float | None:
    """`flops` over the median time; None where the time is unknown."""
    time = median_us(record)
    return flops(record) / time / 1e6 if time else None

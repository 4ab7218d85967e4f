"""How many cores this process may use: what the machine has is not what a container was given."""

from __future__ import annotations

import math
import os
import pathlib

MOST_COMPILERS = 48  # each holds a Triton of its own, about half a gigabyte


def usable_cores() -> int:
    """The least of the machine's cores, this process's affinity and its control group's quota."""
    counts = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    quota = cgroup_cores(pathlib.Path("/sys/fs/cgroup"))
    if quota is not None:
        counts.append(quota)
    return max(1, min(counts))


def cgroup_cores(root: pathlib.Path) -> int | None:
    """Cores that the control group's quota amounts to; None without a quota."""
    try:
        quota, period = (root / "cpu.max").read_text(encoding="ascii").split()[:2]
    except (OSError, ValueError):
        try:  # version 1
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max", or -1 in version 1
        return None
    return max(1, math.ceil(int(quota) / int(period)))


def compilers(wanted: int | None = None, share: int = 1) -> int:
    """Compiling processes: as wanted, else the cores divided by `share`, less one for the measuring process."""
    return wanted or max(1, min(MOST_COMPILERS, usable_cores() // share - 1))

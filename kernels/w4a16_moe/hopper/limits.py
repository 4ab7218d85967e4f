"""Registers per thread that leave room for the CTAs per SM a schedule asks for; SMs of a device."""

from __future__ import annotations

from functools import cache

from ..schedule import Schedule

REGISTERS_PER_SM = 65536  # compute capability 9.0 and 10.x
MAX_REGISTERS = 255


def register_cap(schedule: Schedule, copy_warps: int = 0) -> int | None:
    """The compiler's limit (maxnreg), or None where one CTA has all it can use. Registers are given out by eights."""
    threads = 32 * -(-(schedule.num_warps + copy_warps) // 4) * 4
    cap = REGISTERS_PER_SM // (threads * schedule.ctas_per_sm) // 8 * 8
    return None if schedule.ctas_per_sm == 1 or cap >= MAX_REGISTERS else cap


@cache
def _sm_count(index: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def sm_count(device) -> int:  # type: ignore[no-untyped-def]
    """Multiprocessors of a torch device, asked once."""
    import torch

    return _sm_count(torch.cuda.current_device() if device.index is None else device.index)

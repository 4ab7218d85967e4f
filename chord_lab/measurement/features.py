"""What a cost model sees of a candidate at a point: waves, padding, bytes, FLOPs, occupancy and the knobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from w4a16_moe.devices import Device
from w4a16_moe.schedule import Schedule

from chord_lab.records.attempt import Point
from chord_lab.records.record import CompileFacts

COPY_GBPS = 4200.0  # scales of the floor: only their ratio shapes the model, the fit takes the rest
DENSE_TFLOPS = 700.0
LAUNCH_US = 4.0
ASSUMED_REGISTERS = 128  # of a kernel that was never compiled here

CONTINUOUS = (
    "log_rows_per_expert", "log_busiest", "log_block_m", "log_block_n", "log_block_k", "log_warps", "log_stages",
    "log_waves", "tail", "log_padding", "log_weight_passes", "log_x_passes", "log_occupancy", "log_ctas", "log_split",
    "log_group_m", "compute_share", "log_tiles", "log_accumulators",
)  # fmt: skip
FLAGS = (
    "swap_ab", "stream_k", "persistent", "queue", "semi_static", "dynamic", "branched", "exponent", "mma_sync", "wgmma",
)  # fmt: skip


class Load(NamedTuple):
    """Of a point, per block_m: computed once for all its candidates."""

    num_m_blocks: int
    active: int
    busiest: int


@lru_cache(maxsize=100_000)
def _load(point: Point, block_m: int) -> Load:
    counts = np.array(point.routing.tok_e)
    return Load(int((-(-counts // block_m)).sum()), int((counts > 0).sum()), int(counts.max(initial=0)))


def floor_us(point: Point) -> float:
    """Bytes at copy bandwidth or FLOPs at the dense rate, whichever is longer, and an empty launch."""
    memory, compute = point.num_bytes / COPY_GBPS / 1e3, point.flops / DENSE_TFLOPS / 1e6
    return LAUNCH_US + math.hypot(memory, compute)  # a smooth maximum


def least_us(point: Point) -> float:
    """What no schedule can beat: a copy of the bytes, or the dense rate before the power cap bites (a fifth more)."""
    return max(point.num_bytes / COPY_GBPS / 1e3 / 1.03, point.flops / DENSE_TFLOPS / 1e6 / 1.2)


def occupancy(schedule: Schedule, facts: CompileFacts | None, device: Device) -> int:
    """CTAs that one SM holds, by registers, shared memory and threads."""
    registers = (facts.registers if facts else None) or ASSUMED_REGISTERS
    per_cta = -(-registers * 32 // 256) * 256 * -(-schedule.num_warps // 4) * 4
    limits = [device.registers_per_sm // per_cta, device.threads_per_sm // (32 * schedule.num_warps)]
    if facts and facts.smem_bytes:
        limits.append(device.smem_per_sm // (facts.smem_bytes + 1024))
    return max(1, min(limits))


def features(point: Point, schedule: Schedule, facts: CompileFacts | None, device: Device) -> Mapping[str, float]:
    """Named features of one candidate."""
    load = _load(point, schedule.block_m)
    rows = point.routed_m / max(1, load.active)
    n_tiles = max(1, point.problem.N // schedule.block_n)
    tiles = load.num_m_blocks * n_tiles * schedule.split_k
    held = occupancy(schedule, facts, device)
    slots = device.num_sms * held
    waves = math.ceil(tiles / slots) if not schedule.stream_k else max(1.0, tiles / slots)
    memory, compute = point.num_bytes / COPY_GBPS / 1e3, point.flops / DENSE_TFLOPS / 1e6
    return {
        "log_rows_per_expert": math.log2(max(1, rows)),
        "log_busiest": math.log2(max(1, load.busiest) / max(1, rows)),
        "log_block_m": math.log2(schedule.block_m),
        "log_block_n": math.log2(schedule.block_n),
        "log_block_k": math.log2(schedule.block_k),
        "log_warps": math.log2(schedule.num_warps),
        "log_stages": math.log2(schedule.num_stages),
        "log_waves": math.log2(waves),
        "tail": tiles / (waves * slots),
        "log_padding": math.log2(max(1, load.num_m_blocks * schedule.block_m) / max(1, point.routed_m)),
        "log_weight_passes": math.log2(max(1, load.num_m_blocks) / max(1, load.active)),
        "log_x_passes": math.log2(n_tiles),
        "log_occupancy": math.log2(held),
        "log_ctas": math.log2(schedule.ctas_per_sm),
        "log_split": math.log2(schedule.split_k),
        "log_group_m": math.log2(schedule.group_m),
        "compute_share": compute / (compute + memory),
        "log_tiles": math.log2(max(1, tiles)),
        "log_accumulators": math.log2(max(1.0, schedule.block_m * schedule.block_n / (32 * schedule.num_warps))),
        "swap_ab": schedule.swap_ab,
        "stream_k": schedule.stream_k,
        "persistent": schedule.persistent,
        "queue": schedule.tile_order == "dynamic",
        "semi_static": schedule.token_slicing == "semi_static",
        "dynamic": schedule.token_slicing == "dynamic",
        "branched": schedule.token_slicing == "branched",
        "exponent": schedule.dequant == "exponent",
        "mma_sync": schedule.kernel == "mma_sync",
        "wgmma": schedule.kernel == "wgmma",
    }


def matrix(rows: list[Mapping[str, float]]) -> npt.NDArray[np.float64]:
    """Features as numbers, a row a candidate: continuous ones first, then flags."""
    names = (*CONTINUOUS, *FLAGS)
    return np.array([[float(row[name]) for name in names] for row in rows]).reshape(len(rows), len(names))

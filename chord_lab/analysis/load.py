"""How tokens fall on experts: load, padding, imbalance of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chord_lab.errors import UserError
from chord_lab.routing import BALANCEDNESS_DEFINITION, balancedness, padding
from chord_lab.routing.files import ExpertLoad

BLOCK_MS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)


class LoadInfo(NamedTuple):
    """Rows per expert of one routing."""

    expert: list[int]
    tok_e: list[int]
    mean: float  # rows per local expert
    busiest: int
    active_experts: int
    routed_m: int
    balancedness: float | None  # None: nothing is routed
    definition: str
    source: str  # the draw or the file


def load_info(tok_e: npt.ArrayLike, *, source: str = "") -> LoadInfo:
    """tok_e ``[num_experts]`` whole numbers."""
    counts = np.asarray(tok_e, dtype=np.int64)
    return LoadInfo(
        expert=list(range(counts.size)),
        tok_e=counts.tolist(),
        mean=float(counts.mean()) if counts.size else 0.0,
        busiest=int(counts.max(initial=0)),
        active_experts=int((counts > 0).sum()),
        routed_m=int(counts.sum()),
        balancedness=balancedness(counts),
        definition=BALANCEDNESS_DEFINITION,
        source=source,
    )


class LayersInfo(NamedTuple):
    """Load of many layers, each on its own: layers of unlike size are never averaged together."""

    layer: list[int]
    num_experts: list[int]
    tok_e: list[list[int]]
    balancedness: list[float | None]
    busiest_share: list[float | None]  # busiest expert's rows / mean rows
    median_balancedness: float | None  # of the layers with a value
    num_empty: int  # layers without a routed row: no value
    definition: str
    source: str


def layers_info(load: ExpertLoad) -> LayersInfo:
    """Load of each layer of a recorded file."""
    values = [balancedness(layer) for layer in load.layers]
    some = [v for v in values if v is not None]
    return LayersInfo(
        layer=list(range(len(load.layers))),
        num_experts=[int(layer.size) for layer in load.layers],
        tok_e=[layer.tolist() for layer in load.layers],
        balancedness=values,
        busiest_share=[None if v is None else 1 / v for v in values],
        median_balancedness=float(np.median(some)) if some else None,
        num_empty=values.count(None),
        definition=BALANCEDNESS_DEFINITION,
        source=load.path,
    )


class PaddingInfo(NamedTuple):
    """What each block_m costs in padding and in passes over the weights."""

    block_m: list[int]
    num_m_blocks: list[int]
    num_tokens_padded: list[int]
    padding_share: list[float]
    weight_passes: list[float | None]  # blocks per active expert: how often an expert's weights are read
    tokens_per_expert: float
    routed_m: int
    source: str


def padding_info(tok_e: npt.ArrayLike, block_ms: Sequence[int] = BLOCK_MS, *, source: str = "") -> PaddingInfo:
    """Padding of one routing under each block_m."""
    counts = np.asarray(tok_e, dtype=np.int64)
    rows = [padding(counts, block_m) for block_m in block_ms]
    active = int((counts > 0).sum())
    return PaddingInfo(
        block_m=[row.block_m for row in rows],
        num_m_blocks=[row.num_m_blocks for row in rows],
        num_tokens_padded=[row.num_tokens_padded for row in rows],
        padding_share=[row.padding_share for row in rows],
        weight_passes=[row.num_m_blocks / active if active else None for row in rows],
        tokens_per_expert=float(counts.mean()) if counts.size else 0.0,
        routed_m=int(counts.sum()),
        source=source,
    )


class GpuLoadInfo(NamedTuple):
    """Rows per GPU under expert parallelism: the busiest GPU holds the others up."""

    gpu: list[int]
    rows: list[int]
    active_experts: list[int]
    busiest_over_mean: float | None
    placement: str
    source: str


def gpu_load_info(
    tok_e: npt.ArrayLike, ep: int, *, devices: Sequence[Sequence[int]] | None = None, source: str = ""
) -> GpuLoadInfo:
    """tok_e ``[num_experts]`` of the whole system; experts lie in equal runs, or as `devices` lists them.

    An expert with several copies shares its rows evenly among them.
    """
    counts = np.asarray(tok_e, dtype=np.int64)
    if devices is None:
        if ep < 1 or counts.size % ep:
            raise UserError(f"ep={ep} does not divide {counts.size} experts")
        per_gpu = counts.reshape(ep, -1)
        rows, active = per_gpu.sum(axis=1), (per_gpu > 0).sum(axis=1)
        placement = "experts in equal runs"
    else:
        flat = [e for device in devices for e in device]
        if sorted(set(flat)) != list(range(counts.size)):
            raise UserError(f"the placement does not cover experts 0 to {counts.size - 1}")
        share = counts / np.bincount(flat, minlength=counts.size)
        rows = np.array([round(float(share[list(device)].sum())) for device in devices])
        active = np.array([int((counts[list(device)] > 0).sum()) for device in devices])
        placement = "experts as placed, copies share evenly"
    mean = float(rows.mean()) if rows.size else 0.0
    return GpuLoadInfo(
        gpu=list(range(len(rows))),
        rows=rows.tolist(),
        active_experts=active.tolist(),
        busiest_over_mean=float(rows.max() / mean) if mean else None,
        placement=placement,
        source=source,
    )

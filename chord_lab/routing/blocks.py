"""Blocks and padding: how a routing is laid out for a kernel and what that costs; numpy twins of the kernel package."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chord_lab.errors import UserError

Counts = npt.NDArray[np.int64]


class LocalLoad(NamedTuple):
    """Rows per local expert; routes to experts elsewhere are counted apart, never as some local expert's."""

    tok_e: Counts  # [num_experts] int64
    num_foreign: int


class Blocks(NamedTuple):
    """The indexed interface's layout."""

    sorted_ids: npt.NDArray[np.int32]  # [num_tokens_padded], pad id = num_tokens * top_k
    expert_ids: npt.NDArray[np.int32]  # [num_m_blocks]
    num_tokens_padded: int


class PaddingRow(NamedTuple):
    """What one block_m costs in padding."""

    block_m: int
    num_m_blocks: int
    num_tokens_padded: int
    padding_share: float  # share of padded rows that hold no route; 0 when nothing is routed


def local_load(topk_ids: npt.ArrayLike, num_experts: int, expert_map: npt.ArrayLike | None = None) -> LocalLoad:
    """Rows per local expert.

    topk_ids: whole numbers, any shape. expert_map: ``[num_global_experts]`` local index or -1; without
    it every id must be a local expert.

    Raises:
        UserError: an id out of range, or a map that names a local expert that is not there.
    """
    local = _local_ids(topk_ids, num_experts, expert_map)
    return LocalLoad(np.bincount(local[local >= 0], minlength=num_experts).astype(np.int64), int((local < 0).sum()))


def _local_ids(topk_ids: npt.ArrayLike, num_experts: int, expert_map: npt.ArrayLike | None) -> npt.NDArray[np.int64]:
    """Flat local ids, -1 for a route to an expert elsewhere."""
    ids = np.asarray(topk_ids)
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"topk_ids must be whole numbers, not {ids.dtype}")
    flat = ids.astype(np.int64).ravel()
    if expert_map is None:
        bad = flat[(flat < 0) | (flat >= num_experts)]
        if bad.size:
            raise UserError(f"topk_ids holds {bad[0]}; legal without an expert_map: 0 to {num_experts - 1}")
        return flat
    mapping = np.asarray(expert_map, dtype=np.int64)
    if mapping.size and (mapping.max() >= num_experts or mapping.min() < -1):
        worst = mapping.max() if mapping.max() >= num_experts else mapping.min()
        raise UserError(f"expert_map holds {worst}; legal: -1 to {num_experts - 1}")
    bad = flat[(flat < 0) | (flat >= mapping.size)]
    if bad.size:
        raise UserError(f"topk_ids holds {bad[0]}; legal with this expert_map: 0 to {mapping.size - 1}")
    return mapping[flat]


def num_blocks(tok_e: npt.ArrayLike, block_m: int) -> int:
    """Blocks of block_m rows when each expert is padded on its own."""
    if block_m < 1:
        raise UserError(f"block_m must be at least 1, not {block_m}")
    return int((-(-np.asarray(tok_e, dtype=np.int64) // block_m)).sum())


def align_to_blocks(
    topk_ids: npt.ArrayLike, num_experts: int, block_m: int, expert_map: npt.ArrayLike | None = None
) -> Blocks:
    """Routed row ids grouped by expert, each expert padded to whole blocks: twin of ``w4a16_moe.align_to_blocks``."""
    local = _local_ids(topk_ids, num_experts, expert_map)
    tok_e = np.bincount(local[local >= 0], minlength=num_experts)
    padded = num_blocks(tok_e, block_m) * block_m
    per_expert = -(-tok_e // block_m)
    sorted_ids = np.full(padded, local.size, dtype=np.int32)
    rows = np.flatnonzero(local >= 0)
    rows = rows[np.argsort(local[rows], kind="stable")]
    first_slot = (np.cumsum(per_expert) - per_expert) * block_m
    rank = np.arange(rows.size) - np.repeat(np.cumsum(tok_e) - tok_e, tok_e)
    sorted_ids[np.repeat(first_slot, tok_e) + rank] = rows
    return Blocks(sorted_ids, np.repeat(np.arange(num_experts, dtype=np.int32), per_expert), padded)


def padding(tok_e: npt.ArrayLike, block_m: int) -> PaddingRow:
    """Blocks, padded rows and the share of them that is padding."""
    blocks = num_blocks(tok_e, block_m)
    padded = blocks * block_m
    routed_m = int(np.asarray(tok_e, dtype=np.int64).sum())
    return PaddingRow(block_m, blocks, padded, 1 - routed_m / padded if padded else 0.0)


def smaller_block(
    tok_e: npt.ArrayLike, block_m: int, candidates: tuple[int, ...] = (8, 16, 32, 64, 128)
) -> PaddingRow | None:
    """A smaller block_m that needs no more blocks (no more weight reads), if most rows are padding; else None."""
    now = padding(tok_e, block_m)
    if now.padding_share <= 0.5:
        return None
    better = [row for m in candidates if m < block_m and (row := padding(tok_e, m)).num_m_blocks <= now.num_m_blocks]
    return min(better, key=lambda row: row.num_tokens_padded, default=None)


def m_indices(tok_e: npt.ArrayLike, alignment: int) -> npt.NDArray[np.int32]:
    """grouped_contiguous: expert of each row, -1 for padding, every expert's group a multiple of `alignment` rows."""
    counts = np.asarray(tok_e, dtype=np.int64)
    parts = []
    for expert, count in enumerate(counts):
        parts += [np.full(count, expert, dtype=np.int32), np.full(-count % alignment, -1, dtype=np.int32)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def balancedness(tok_e: npt.ArrayLike) -> float | None:
    """Mean load / greatest load: 1 is even, 1/len is everything on one; None when nothing is routed."""
    counts = np.asarray(tok_e, dtype=np.float64)
    return float(counts.mean() / counts.max()) if counts.size and counts.max() > 0 else None


BALANCEDNESS_DEFINITION = "balancedness = mean rows per expert / rows of the busiest expert (1 is even)"

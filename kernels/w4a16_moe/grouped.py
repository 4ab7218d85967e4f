"""Row layouts of the grouped interfaces, and the checks that make a wrong one loud.

grouped_contiguous: rows sorted by expert, each expert's rows padded to a multiple of 128; ``m_indices[row]`` is the
row's expert, or -1 for padding. A block of 128 rows belongs to one expert, or is all padding and skipped.

grouped_masked: activations ``[num_experts, max_m, K]``; the first ``masked_m[e]`` rows of expert e are valid, the
rest are neither read nor written. max_m is capacity: it needs no alignment and never chooses a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

GROUP_ROWS = 128  # rows that the grouped_contiguous kernels give to one expert at a time


def build_m_indices(
    tok_e: Sequence[int] | torch.Tensor, alignment: int = GROUP_ROWS, device: torch.device | str | None = None
) -> torch.Tensor:
    """``m_indices`` int32 of groups with ``tok_e[e]`` rows, each padded with -1 to a multiple of ``alignment``."""
    counts = torch.as_tensor(tok_e, dtype=torch.int64)
    if counts.dim() != 1 or bool((counts < 0).any()):
        raise ValueError(f"tok_e must be a list of row counts of at least 0, not {counts.tolist()}")
    padded = (counts + alignment - 1) // alignment * alignment
    experts = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), padded)
    inside = torch.arange(experts.numel(), device=counts.device) - (torch.cumsum(padded, 0) - padded)[experts]
    m_indices = torch.where(inside < counts[experts], experts, -1).to(torch.int32)
    return m_indices.to(device) if device is not None else m_indices


def check_m_indices(m_indices: torch.Tensor, num_experts: int, alignment: int = GROUP_ROWS) -> None:
    """Refuse an ``m_indices`` that a kernel working in blocks of ``alignment`` rows would get wrong.

    Reads the values: call it when a layout is built, not on the hot path.
    """
    if m_indices.dtype != torch.int32 or m_indices.dim() != 1:
        raise ValueError(f"m_indices must be int32 [rows], not {m_indices.dtype} {list(m_indices.shape)}")
    if m_indices.numel() % alignment:
        raise ValueError(f"m_indices has {m_indices.numel()} rows; grouped_contiguous needs a multiple of {alignment}")
    outside = m_indices[(m_indices < -1) | (m_indices >= num_experts)]
    if outside.numel():
        raise ValueError(f"m_indices holds expert {int(outside[0])}; legal are -1 and 0 to {num_experts - 1}")
    blocks = m_indices.view(-1, alignment)
    largest = blocks.max(dim=1, keepdim=True).values
    mixed = (blocks != largest) & (blocks != -1)
    if bool(mixed.any()):
        block, row = (int(i) for i in torch.nonzero(mixed)[0])
        start = block * alignment
        names = sorted({int(e) for e in blocks[block].tolist() if e >= 0})
        raise ValueError(
            f"rows {start} to {start + alignment - 1} hold experts {', '.join(map(str, names))} (row {start + row}): "
            f"each group must start at a multiple of {alignment}"
        )
    padding_first = (blocks[:, :-1] == -1) & (blocks[:, 1:] != -1)
    if bool(padding_first.any()):
        block = int(torch.nonzero(padding_first)[0][0])
        raise ValueError(
            f"padding comes before valid rows in rows {block * alignment} to {(block + 1) * alignment - 1}"
        )


def check_masked(masked_m: torch.Tensor, num_experts: int, max_m: int) -> None:
    """Refuse a ``masked_m`` that does not fit ``[num_experts, max_m, K]``. Reads the values, so not on the hot path."""
    if masked_m.dtype != torch.int32 or tuple(masked_m.shape) != (num_experts,):
        raise ValueError(f"masked_m must be int32 [{num_experts}], not {masked_m.dtype} {list(masked_m.shape)}")
    outside = torch.nonzero((masked_m < 0) | (masked_m > max_m)).reshape(-1)
    if outside.numel():
        expert = int(outside[0])
        raise ValueError(f"masked_m[{expert}] is {int(masked_m[expert])}; legal are 0 to max_m={max_m}")

"""Scratch that kernels leave as they found it, one per device and stream."""

from __future__ import annotations

import torch

# (device index, stream) -> counters: stream-K flags and tile counters, zero between launches on that stream
_counters: dict[tuple[int, int], torch.Tensor] = {}


def counters(num: int, device: torch.device) -> torch.Tensor:
    """``num`` int32 zeros that the kernel puts back to zero.

    Launches of one stream run one after the other, so they share; another stream has its own. Under graph capture they
    are the graph's own, set to zero by each replay.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(num, dtype=torch.int32, device=device)
    key = (
        torch.cuda.current_device() if device.index is None else device.index,
        torch.cuda.current_stream(device).cuda_stream,
    )
    known = _counters.get(key)
    if known is None or known.numel() < num:
        known = _counters[key] = torch.zeros(max(num, 2048), dtype=torch.int32, device=device)
    return known

"""Scratch that kernels leave as they found it: zeros for stream-K flags and tile counters."""

from __future__ import annotations

import threading

import torch

SPARE = 1 << 18  # zeros kept ready for captures, 1 MiB: about 500 captured stream-K launches, 65 000 of wgmma
ALIGNED = 4  # launches state that the pointer is a multiple of 16 bytes

_lock = threading.Lock()
# (device index, stream) -> zeros that the launches of that stream share: they run one after the other
_of_stream: dict[tuple[int, int], torch.Tensor] = {}
# device index -> zeros that no graph has yet, and those given to graphs: these live as long as the process
_spare: dict[int, torch.Tensor] = {}
_given: list[torch.Tensor] = []


def counters(num: int, device: torch.device) -> torch.Tensor:
    """``num`` int32 zeros that the kernel puts back to zero.

    A captured launch gets its own, which no other graph or stream touches, from a stock that launches outside of a
    capture keep filled: a graph need not set them to zero at each replay (2 us each time). With the stock empty it does.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if torch.cuda.is_current_stream_capturing():
            return _take(index, num, device)
        _refill(index, device)
        key = (index, torch.cuda.current_stream(device).cuda_stream)
        known = _of_stream.get(key)
        if known is None or known.numel() < num:
            known = _of_stream[key] = torch.zeros(max(num, 2048), dtype=torch.int32, device=device)
        return known


def _take(index: int, num: int, device: torch.device) -> torch.Tensor:
    spare = _spare.get(index)
    size = -(-num // ALIGNED) * ALIGNED
    if spare is None or spare.numel() < size:
        return torch.zeros(num, dtype=torch.int32, device=device)
    _spare[index] = spare[size:]
    return spare[:num]


def _refill(index: int, device: torch.device) -> None:
    """Outside of a capture: the first launch on a device, and the first after captures took half of the stock."""
    spare = _spare.get(index)
    if spare is not None and spare.numel() >= SPARE // 2:
        return
    _spare[index] = torch.zeros(SPARE, dtype=torch.int32, device=device)
    _given.append(_spare[index])
    torch.cuda.current_stream(device).synchronize()  # zero for every stream from here on

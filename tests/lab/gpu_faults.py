"""Launchers for GPU tests: a candidate with 8 stages writes through a wild pointer, the rest is the product's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chord_lab.measurement.launch import Launch
from chord_lab.measurement.launchers import launcher_of


@triton.jit
def wild_store(pointer):
    tl.store(pointer + (tl.program_id(0).to(tl.int64) + 1) * (1 << 40), 1.0)


def launchers(candidate):
    if candidate.schedule is None or candidate.schedule.num_stages != 8:
        return launcher_of(candidate)

    def launch(tensors, candidate):
        scratch = torch.zeros(1, device=tensors.device)
        return Launch(lambda: wild_store[(64,)](scratch), "wild_store", "indexed", 0)

    return launch

"""Every kernel of the package once, on small shapes, compared with the reference: what `compute-sanitizer` watches.

    compute-sanitizer --tool racecheck python tests/w4a16/small_launches.py

Not collected by name; `test_sanitizer_gpu.py` runs it in a child process.
"""

from __future__ import annotations

from dataclasses import replace

import portable_checks as portable
import test_hopper_gpu as hopper
import torch
from conftest import Layer, ids_of_counts
from w4a16_moe import MoeProblem, align_to_blocks, get_profile, pack

PROBLEM = MoeProblem(num_experts=3, N=256, K=512)
TOK_E = [19, 0, 70]
MMA = replace(hopper.DECODE, block_m=24, ctas_per_sm=2)
INDEXED = [
    hopper.DECODE,
    *(replace(MMA, token_slicing=slicing) for slicing in ("static", "semi_static", "dynamic", "branched")),
    replace(MMA, dequant="exponent"),
    hopper.STREAM_K,
    replace(hopper.STREAM_K, block_m=24, token_slicing="dynamic", ctas_per_sm=2),
    hopper.PREFILL,
    replace(hopper.PREFILL, token_slicing="static", num_stages=4, tile_order="static"),
    replace(hopper.PREFILL, block_m=64, dequant="exponent"),
    replace(hopper.PREFILL, block_m=32, ctas_per_sm=2, token_slicing="static"),
    replace(hopper.PREFILL, block_m=192, block_n=128, num_stages=5),
]
PORTABLE = [replace(s, block_n=max(64, s.block_n)) for s in portable.SCHEDULES]
MASKED = [hopper.STREAM_K, hopper.PREFILL]


def layer(profile: str) -> Layer:
    """Random weights on the GPU, packed for a profile."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (PROBLEM.num_experts, PROBLEM.N, PROBLEM.K)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator, device="cuda")
    scales = torch.rand((*shape[:2], PROBLEM.num_groups), generator=generator, device="cuda") * 0.02 + 0.002
    scales = scales.to(torch.bfloat16)
    return Layer(PROBLEM, codes, scales, pack(codes, scales, PROBLEM, get_profile(profile)), generator)


def alignments() -> int:
    """The GPU alignment, with and without foreign experts; `Layer.check` has it for each schedule too."""
    ids = ids_of_counts(TOK_E, "cuda")
    expert_map = torch.tensor([-1, 0, 1], dtype=torch.int32, device="cuda")
    for block_m in (8, 64):
        align_to_blocks(ids, 3, block_m).check()
        align_to_blocks(ids, 2, block_m, expert_map).check()
    return 4


def main() -> None:
    """Run all; any wrong result raises."""
    count = alignments()
    ids = ids_of_counts(TOK_E, "cuda")
    for profile, schedules in (("portable", PORTABLE), ("h200_decode_ep8", INDEXED)):
        made = layer(profile)
        for schedule in schedules:
            made.check(schedule, ids)
            count += 1
    for schedule in hopper.CONTIGUOUS:
        hopper.test_grouped_contiguous(schedule, [130, 0, 1, *[0] * 8, 128])
        count += 1
    for schedule in MASKED:
        hopper.test_grouped_masked(schedule, 32)
        count += 1
    torch.cuda.synchronize()
    print(f"{count} launches compared with the reference")


if __name__ == "__main__":
    main()

"""Layout fragment64: where each code lies, exact round trips, shapes that do not fit."""

from __future__ import annotations

import pytest
import torch
from w4a16_moe import MoeProblem, get_profile, pack, unpack
from w4a16_moe.layout import fragment64

PROFILES = ["h200_decode_ep8", "h200_prefill_ep8", "h200_tp8", "h200_grouped_prefill", "h200_grouped_decode"]


def random_layer(problem: MoeProblem) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(problem.N + problem.K)
    size = (problem.num_experts, problem.N, problem.K)
    codes = torch.randint(0, 16, size, dtype=torch.uint8, generator=generator)
    scales = torch.randn((*size[:2], problem.num_groups), generator=generator) * 0.02
    return codes, scales.to(torch.bfloat16)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("N", "K"), [(64, 64), (128, 192), (320, 64), (64, 7168)])
def test_round_trip_is_exact(N, K, profile):
    problem = MoeProblem(num_experts=3, N=N, K=K)
    codes, scales = random_layer(problem)
    got_codes, got_scales = unpack(pack(codes, scales, problem, get_profile(profile)))
    assert torch.equal(got_codes, codes)
    assert torch.equal(got_scales, scales)


def test_every_code_lies_where_the_docstring_says():
    """Byte 16 * thread + 2 * i: one thread's share of a 64 x 64 block, for all 4096 codes of a block."""
    codes = torch.randint(0, 16, (64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed, _ = fragment64.pack_expert(codes, torch.ones(64, 2, dtype=torch.bfloat16))
    words = packed.reshape(128, 8).to(torch.int32) & 0xFFFF
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for i in range(8):
            n = 16 * warp + g + 8 * (i >> 1 & 1)
            kk = 2 * t + (i & 1) + 8 * (i >> 2 & 1)
            for shift, k in ((0, kk), (4, kk + 32), (8, kk + 16), (12, kk + 48)):
                assert int(words[thread, i]) >> shift & 15 == int(codes[n, k])


def test_scales_lie_in_row_pairs_and_carry_their_power_of_two():
    scales = (torch.arange(128, dtype=torch.float32).view(64, 2) / 64 + 0.5).to(torch.bfloat16)
    _, packed = fragment64.pack_expert(torch.zeros(64, 64, dtype=torch.uint8), scales)
    halves = packed.view(torch.bfloat16).view(64, 2).float()
    for position in range(64):
        warp, g, h = position // 16, position % 16 // 2, position % 2
        n = 16 * warp + g + 8 * h
        assert halves[position, 0] == scales[n, 0].float() * 2.0**113
        assert halves[position, 1] == scales[n, 1].float() * 2.0**109


@pytest.mark.parametrize("scale", [0.0, 2.0**-105, -(2.0**-105), 2.0**14, -(2.0**14), 1.0])
def test_scales_at_the_ends_of_the_range_survive(scale):
    problem = MoeProblem(num_experts=1, N=64, K=64)
    codes, scales = random_layer(problem)
    scales[:] = scale
    assert torch.equal(unpack(pack(codes, scales, problem, get_profile("h200_tp8")))[1], scales)


@pytest.mark.parametrize(("N", "K", "what"), [(80, 64, "N=80"), (64, 96, "K=96"), (32, 64, "N=32")])
def test_a_shape_that_is_no_multiple_of_64_is_refused_with_the_nearest(N, K, what):
    problem = MoeProblem(num_experts=1, N=N, K=K)
    codes, scales = random_layer(problem)
    with pytest.raises(ValueError, match=rf"multiple of 64.*{what}") as error:
        pack(codes, scales, problem, get_profile("h200_decode_ep8"))
    assert "\n" not in str(error.value)


def test_one_copy_serves_both_phases_and_no_other_layout():
    """Profiles of one layout share the tensors; another layout's is refused with both names."""
    problem = MoeProblem(num_experts=2, N=128, K=128)
    decode = pack(*random_layer(problem), problem, get_profile("h200_decode_ep8"))
    prefill = decode.for_profile("h200_prefill_ep8")
    assert prefill.codes is decode.codes
    assert prefill.scales is decode.scales
    with pytest.raises(ValueError, match=r"h200_decode_ep8.*portable"):
        decode.for_profile("portable")

"""The reference itself: against arithmetic done by hand, with its precision stated and kept."""

from __future__ import annotations

import pytest
import torch
from w4a16_moe import MoeProblem, gemm_reference, get_profile, pack, relative_error
from w4a16_moe.reference import TOLERANCE, dequantize


def test_dequantize_by_hand():
    codes = torch.tensor([[0, 8, 15, 7] + [8] * 60], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 3.0]], dtype=torch.bfloat16)
    w = dequantize(codes, scales)
    assert w.dtype == torch.bfloat16
    assert w[0, :4].tolist() == [-4.0, 0.0, 3.5, -0.5]
    assert w[0, 4:].eq(0).all()


def test_dequantize_rounds_once_to_bf16():
    scale = torch.tensor([[0.0123]], dtype=torch.bfloat16)
    codes = torch.full((1, 32), 13, dtype=torch.uint8)
    exact = 5 * scale.double()
    assert torch.equal(dequantize(codes, scale)[0, :1], exact.to(torch.bfloat16)[0])


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_gemm_by_a_double_loop(top_k):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (3, 5, 64), dtype=torch.uint8, generator=generator)
    scales = (torch.rand((3, 5, 2), generator=generator) + 0.1).to(torch.bfloat16)
    x = torch.randn((4, 64), generator=generator).to(torch.bfloat16)
    experts = torch.tensor([0, 2, -1, 1, 1, 1, 0, 2][: 4 * top_k])
    y = gemm_reference(x, (codes, scales), experts, top_k=top_k)
    for row, expert in enumerate(experts.tolist()):
        if expert < 0:
            assert torch.isnan(y[row]).all()
            continue
        for n in range(5):
            w = [
                float(torch.tensor((int(c) - 8) * float(scales[expert, n, k // 32])).to(torch.bfloat16))
                for k, c in enumerate(codes[expert, n])
            ]
            exact = sum(float(a) * b for a, b in zip(x[row // top_k], w, strict=True))
            assert float(y[row, n]) == pytest.approx(exact, rel=1e-5, abs=1e-5)
    packed = pack(codes, scales, MoeProblem(num_experts=3, N=5, K=64), get_profile("portable"))
    assert torch.equal(gemm_reference(x, packed, experts, top_k=top_k).nan_to_num(), y.nan_to_num())


def test_relative_error_sees_nan_scale_and_foreign_rows():
    reference = torch.tensor([[3.0, 4.0], [float("nan"), float("nan")]])
    assert relative_error(torch.tensor([[3.0, 4.0], [9.0, 9.0]]), reference) == 0
    assert relative_error(torch.tensor([[3.0, 4.5], [0.0, 0.0]]), reference) == pytest.approx(0.1)
    assert not relative_error(torch.tensor([[3.0, float("nan")], [0.0, 0.0]]), reference) <= 1e9
    assert relative_error(torch.ones((1, 2)), torch.zeros((1, 2))) > 1


def test_the_tolerance_fits_a_bf16_output_and_catches_one_wrong_scale():
    """Rounding the output costs about 1.7e-3; one scale of 64 off by 10 % must not hide below the tolerance (B69)."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (1, 32, 256), dtype=torch.uint8, generator=generator)
    scales = (torch.rand((1, 32, 8), generator=generator) * 0.02 + 0.002).to(torch.bfloat16)
    x = torch.randn((16, 256), generator=generator).to(torch.bfloat16)
    experts = torch.zeros(16, dtype=torch.int64)
    reference = gemm_reference(x, (codes, scales), experts, top_k=1)
    assert relative_error(reference.to(torch.bfloat16), reference) < TOLERANCE
    wrong = scales.clone()
    wrong[0, :8, 3] *= 1.1
    assert relative_error(gemm_reference(x, (codes, wrong), experts, top_k=1), reference) > TOLERANCE


@pytest.mark.gpu
def test_the_reference_does_not_use_tf32():
    """TF32 keeps 10 bits: with it an fp32 reference is wrong by 1e-3 and blames the kernel (B69)."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (1, 256, 1024), dtype=torch.uint8, generator=generator)
    scales = (torch.rand((1, 256, 32), generator=generator) * 0.02 + 0.002).to(torch.bfloat16)
    x = torch.randn((64, 1024), generator=generator).to(torch.bfloat16)
    experts = torch.zeros(64, dtype=torch.int64)
    exact = x.double() @ dequantize(codes, scales)[0].double().t()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        y = gemm_reference(x.cuda(), (codes.cuda(), scales.cuda()), experts.cuda(), top_k=1)
        assert torch.backends.cuda.matmul.allow_tf32, "the caller's setting is put back"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert relative_error(y.cpu(), exact) < 1e-5

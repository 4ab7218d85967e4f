from __future__ import annotations

import pytest
import torch
from w4a16_moe.problem import MoeProblem

from chord_lab.measurement.grouped import contiguous_rows, masked_rows
from chord_lab.measurement.tensors import Layer, PointTensors
from chord_lab.records.attempt import Point
from chord_lab.sweeps.points import routing_ref, scenario_points


@pytest.fixture
def tensors():
    problem = MoeProblem(num_experts=6, N=64, K=128, top_k=2)
    routing = routing_ref("zipf:1.0", num_tokens=9, num_experts=6, top_k=2, seed=1)
    name = {"scenario": "toy/ep1/grouped_decode", "projection": "gate_up", "profile": "h200_grouped_decode"}
    point = Point(**name, problem=problem, num_tokens=9, routing=routing, capacity=16)
    return PointTensors(point, Layer(problem, "cpu"), "cpu")


def multiply(rows, experts, tensors):
    """The grouped GEMM in plain torch: every row by its expert's weights; padding rows give garbage."""
    from w4a16_moe.reference import dequantize

    for row, expert in enumerate(experts.tolist()):
        if expert >= 0:
            weights = dequantize(*tensors.layer.expert(expert)).float()
            rows.out[row] = (rows.x[row].float() @ weights.t()).to(torch.bfloat16)


@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_contiguous_rows_hold_what_the_indexed_interface_computes(tensors, alignment):
    rows, m_indices = contiguous_rows(tensors, alignment)
    assert len(rows.x) == len(m_indices) and len(rows.x) % alignment == 0
    rows.poison()
    assert tensors.error() != tensors.error()  # NaN
    multiply(rows, m_indices, tensors)
    rows.collect()
    assert tensors.error() < 3e-3


def test_masked_rows_hold_what_the_indexed_interface_computes(tensors):
    rows, masked_m = masked_rows(tensors, 16)
    assert masked_m.tolist() == list(tensors.point.routing.tok_e)
    experts = torch.full((6 * 16,), -1)
    for expert, count in enumerate(masked_m.tolist()):
        experts[expert * 16 : expert * 16 + count] = expert
    rows.poison()
    multiply(rows, experts, tensors)
    rows.collect()
    assert tensors.error() < 3e-3


def test_a_load_above_the_capacity_is_refused(tensors):
    with pytest.raises(ValueError, match="the capacity is 2"):
        masked_rows(tensors, 2)


def test_a_skewed_draw_gets_the_capacity_that_its_fullest_expert_needs():
    name = "kimi-k2/ep8/grouped_decode"
    even = scenario_points(name, tokens=[64])
    skewed = scenario_points(name, tokens=[8, 64], draws=["zipf:1.0"])
    assert {point.capacity for point in even} == {128}
    assert {point.num_tokens: point.capacity for point in skewed} == {8: 128, 64: 384}
    assert all(max(point.routing.tok_e) <= point.capacity for point in skewed)

"""The choice of block_m by tokens per expert, and its threshold as a parameter."""

from __future__ import annotations

import itertools

import pytest
from w4a16_moe import BlockMModel
from w4a16_moe.block_m import DEFAULT_THRESHOLD, expected_blocks

STEPS = range(8, 177, 8)


def test_expected_blocks_against_every_outcome():
    """Three experts, five rows, all 243 draws counted by hand."""
    for block_m in (1, 2, 4, 8):
        total = 0
        for draw in itertools.product(range(3), repeat=5):
            total += sum(-(-draw.count(e) // block_m) for e in range(3))
        assert expected_blocks(3, 5, block_m) == pytest.approx(total / 3**5, rel=1e-9)


@pytest.mark.parametrize("num_experts, routed_m", [(1, 7), (48, 1), (48, 100_000), (1025, 3_000_000)])
def test_expected_blocks_stays_within_its_bounds(num_experts, routed_m):
    blocks = expected_blocks(num_experts, routed_m, 16)
    assert routed_m / 16 - 1e-6 <= blocks * (1 + 1e-9)
    assert blocks <= min(num_experts, routed_m) + routed_m / 16


def test_few_tokens_take_the_smallest_block_that_holds_an_experts_rows():
    model = BlockMModel()
    chosen = [model.choose(48, routed_m, STEPS) for routed_m in (8, 160, 400, 800, 1600)]
    assert chosen == sorted(chosen)
    assert chosen[0] == 8
    for routed_m, block_m in zip((8, 160, 400, 800, 1600), chosen, strict=True):
        fewest = min(expected_blocks(48, routed_m, size) for size in STEPS)
        assert expected_blocks(48, routed_m, block_m) <= fewest * 1.02
        smaller = [size for size in STEPS if size < block_m]
        assert all(expected_blocks(48, routed_m, size) > fewest * 1.02 for size in smaller)


def test_many_tokens_are_covered_by_the_fewest_blocks_under_the_ceiling():
    model = BlockMModel(ceiling=176)
    assert model.choose(48, 48 * 80, STEPS) == 88  # 1.1 * 80 in one block
    assert model.choose(48, 48 * 150, STEPS) == 168  # 165 rows, one block
    assert model.choose(48, 48 * 170, STEPS) == 96  # 187 rows, two blocks
    assert model.choose(48, 48 * 1000, STEPS) == 160  # 1100 rows, seven blocks


def test_the_threshold_decides_which_rule_applies_and_can_be_swept():
    rows = 48 * 60
    packing, covering = BlockMModel(threshold=80), BlockMModel(threshold=40)
    assert DEFAULT_THRESHOLD == BlockMModel().threshold == 80
    assert packing.choose(48, rows, STEPS) != covering.choose(48, rows, STEPS) == 72
    at, above = BlockMModel(threshold=60), BlockMModel(threshold=60.01)
    assert at.choose(48, rows, STEPS) == covering.choose(48, rows, STEPS)
    assert above.choose(48, rows, STEPS) == packing.choose(48, rows, STEPS)


def test_only_legal_sizes_are_chosen_even_above_the_ceiling():
    model = BlockMModel(ceiling=64)
    for routed_m in (1, 100, 10_000):
        assert model.choose(8, routed_m, (128, 256)) in (128, 256)
        assert model.choose(8, routed_m, (32,)) == 32


@pytest.mark.parametrize("arguments", [(0, 5, (8,)), (8, 0, (8,)), (8, 5, ()), (8, 5, (0, 8))])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="at least"):
        BlockMModel().choose(*arguments)
    with pytest.raises(ValueError, match="threshold=-1"):
        BlockMModel(threshold=-1)

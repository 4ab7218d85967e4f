"""Alignment of routes to blocks, and the row layouts of the grouped interfaces."""

from __future__ import annotations

import pytest
import torch
from w4a16_moe import align_to_blocks
from w4a16_moe.grouped import build_m_indices, check_m_indices, check_masked
from w4a16_moe.routing_blocks import allocate, max_num_blocks


def ids_of(tok_e: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(tok_e)), torch.tensor(tok_e)).unsqueeze(1)


def rows_by_expert(routing) -> dict[int, list[int]]:
    """Valid routes of each expert, and the checks that hold for every alignment."""
    used = int(routing.num_tokens_padded)
    assert used % routing.block_m == 0
    blocks = routing.sorted_ids[:used].view(-1, routing.block_m).tolist()
    experts = routing.expert_ids[: used // routing.block_m].tolist()
    assert experts == sorted(experts)
    assert all(e == -1 for e in routing.expert_ids[used // routing.block_m :].tolist())
    assert all(i == routing.routed_m for i in routing.sorted_ids[used:].tolist())
    found: dict[int, list[int]] = {}
    for expert, block in zip(experts, blocks, strict=True):
        valid = [i for i in block if i != routing.routed_m]
        assert block[: len(valid)] == valid, "padding comes last in its block"
        assert valid, "a block holds at least one route"
        found.setdefault(expert, []).extend(valid)
    for rows in found.values():
        assert rows == sorted(rows), "routes keep their order within an expert"
    return found


def test_counts_2_3_0_6_8_in_blocks_of_4():
    """Six blocks, not seven; five experts, not expert 5 (B34)."""
    routing = align_to_blocks(ids_of([2, 3, 0, 6, 8]), 5, 4)
    assert int(routing.num_tokens_padded) == 24
    assert routing.expert_ids[:6].tolist() == [0, 1, 3, 3, 4, 4]
    assert set(routing.expert_ids[6:].tolist()) <= {-1}
    found = rows_by_expert(routing)
    assert {e: len(rows) for e, rows in found.items()} == {0: 2, 1: 3, 3: 6, 4: 8}


@pytest.mark.parametrize("num_experts", [1, 48, 60, 257, 385, 1025])
@pytest.mark.parametrize("block_m", [8, 128])
def test_any_number_of_experts(num_experts, block_m):
    """No power of two, no multiple of 32 (B38)."""
    generator = torch.Generator().manual_seed(num_experts)
    topk_ids = torch.randint(0, num_experts, (37, 8), generator=generator)
    routing = align_to_blocks(topk_ids, num_experts, block_m)
    found = rows_by_expert(routing)
    flat = topk_ids.reshape(-1)
    for expert in range(num_experts):
        assert found.get(expert, []) == torch.nonzero(flat == expert).reshape(-1).tolist()


def test_a_fused_shared_expert_is_computed_when_counted_and_refused_when_not():
    """Ids up to 8 with nine weight rows: 134 of 512 outputs must not vanish (B36)."""
    generator = torch.Generator().manual_seed(0)
    topk_ids = torch.cat((torch.randint(0, 8, (256, 1), generator=generator), torch.full((256, 1), 8)), dim=1)
    assert len(rows_by_expert(align_to_blocks(topk_ids, 9, 16))[8]) == 256
    with pytest.raises(ValueError, match=r"topk_ids holds expert 8 \(256 such routes\); legal are 0 to 7"):
        align_to_blocks(topk_ids, 8, 16)


def test_negative_ids_are_refused():
    with pytest.raises(ValueError, match="topk_ids holds expert -1"):
        align_to_blocks(torch.tensor([[0], [-1]]), 2, 8)


def test_no_tokens_and_no_local_route():
    empty = align_to_blocks(torch.empty((0, 8), dtype=torch.int64), 4, 16)
    assert (empty.sorted_ids.numel(), empty.expert_ids.numel(), int(empty.num_tokens_padded)) == (0, 0, 0)
    expert_map = torch.tensor([0, 1, -1, -1], dtype=torch.int32)
    foreign = align_to_blocks(torch.tensor([[2, 3], [3, 2]]), 2, 16, expert_map)
    assert int(foreign.num_tokens_padded) == 0
    assert rows_by_expert(foreign) == {}


def test_foreign_routes_leave_no_row_and_do_not_inflate_expert_0():
    """Experts of other ranks are no rows of local expert 0 (B95)."""
    expert_map = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    topk_ids = torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [1, 0]])
    routing = align_to_blocks(topk_ids, 2, 8, expert_map)
    assert rows_by_expert(routing) == {0: [1, 6], 1: [3, 7]}
    assert int(routing.num_tokens_padded) == 16
    assert (routing.routed_m, routing.expected_m) == (10, 5)


def test_redundant_experts():
    """Eight logical experts as ten physical ones on two devices (B42): each rank lays out what its map names."""
    devices = [[7, 2, 0, 3, 5], [6, 1, 4, 7, 2]]  # 7 and 2 live on both
    topk_ids = torch.tensor([[7, 2], [0, 6], [2, 4], [7, 1]])
    for logical in devices:
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[torch.tensor(logical)] = torch.arange(5, dtype=torch.int32)
        found = rows_by_expert(align_to_blocks(topk_ids, 5, 8, expert_map))
        flat = topk_ids.reshape(-1).tolist()
        for local, expert in enumerate(logical):
            assert found.get(local, []) == [r for r, e in enumerate(flat) if e == expert]
    past_the_end = torch.tensor([0, 1, 2, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="expert_map holds local index 5; legal are -1 and 0 to 4"):
        align_to_blocks(torch.tensor([[0]]), 5, 8, past_the_end)


def test_one_token_in_blocks_of_64_pads_to_512_rows():
    """Padding of 98.4 % (B40): what a smaller block would save is visible in the routing itself."""
    topk_ids = torch.arange(8).unsqueeze(0)
    large, small = (align_to_blocks(topk_ids, 8, block_m) for block_m in (64, 8))
    assert int(large.num_tokens_padded) == 512
    assert 1 - 8 / int(large.num_tokens_padded) == pytest.approx(0.984, abs=5e-4)
    assert int(small.num_tokens_padded) == 64


@pytest.mark.parametrize(
    "routed_m, num_experts, block_m, blocks", [(0, 4, 8, 0), (1, 4, 8, 1), (4, 4, 8, 4), (20, 4, 8, 6), (12, 4, 8, 5)]
)
def test_the_worst_case_is_reached_and_never_passed(routed_m, num_experts, block_m, blocks):
    assert max_num_blocks(routed_m, num_experts, block_m) == blocks
    worst = 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = torch.randint(0, num_experts, (routed_m, 1), generator=generator)
        routing = align_to_blocks(ids, num_experts, block_m)
        assert routing.num_blocks_capacity == blocks
        worst = max(worst, int(routing.num_tokens_padded) // block_m)
    if routed_m >= num_experts:  # one expert takes all but one row of each other: the bound itself
        crowded = ids_of([routed_m - num_experts + 1] + [1] * (num_experts - 1))
        worst = max(worst, int(align_to_blocks(crowded, num_experts, block_m).num_tokens_padded) // block_m)
        assert worst == blocks


def test_buffers_may_be_larger_and_are_checked():
    topk_ids = ids_of([3, 5])
    sorted_ids, expert_ids, num = allocate(topk_ids, 2, 4)
    large = (torch.full((64,), 7, dtype=torch.int32), torch.full((16,), 7, dtype=torch.int32), num)
    routing = align_to_blocks(topk_ids, 2, 4, out=large)
    assert routing.sorted_ids is large[0]
    assert {e: len(r) for e, r in rows_by_expert(routing).items()} == {0: 3, 1: 5}
    with pytest.raises(ValueError, match="expert_ids has 2 entries; the worst case needs 3"):
        align_to_blocks(topk_ids, 2, 4, out=(sorted_ids, expert_ids[:2], num))
    with pytest.raises(ValueError, match="sorted_ids must be a contiguous int32"):
        align_to_blocks(topk_ids, 2, 4, out=(sorted_ids.long(), expert_ids, num))
    with pytest.raises(ValueError, match="expert_ids has 40 blocks, sorted_ids rows for 16"):
        align_to_blocks(topk_ids, 2, 4, out=(large[0], torch.zeros(40, dtype=torch.int32), num))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"topk_ids": torch.zeros((1, 1))}, "topk_ids must be int32 or int64, not float32"),
        ({"num_experts": 0}, "num_experts=0: legal are 1 to 4096"),
        ({"block_m": 0}, "block_m=0 must be at least 1"),
        ({"expert_map": torch.zeros(4)}, "expert_map must be int32"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(changes, message):
    arguments = {"topk_ids": torch.zeros((1, 1), dtype=torch.int64), "num_experts": 2, "block_m": 8} | changes
    with pytest.raises(ValueError, match=message) as caught:
        align_to_blocks(**arguments)
    assert "\n" not in str(caught.value)


# ---- grouped layouts


def test_m_indices_pad_each_group_to_128_rows():
    m_indices = build_m_indices([130, 0, 5])
    assert m_indices.numel() == 384
    assert m_indices[:130].eq(0).all() and m_indices[130:256].eq(-1).all()
    assert m_indices[256:261].eq(2).all() and m_indices[261:].eq(-1).all()
    check_m_indices(m_indices, 3)


def test_groups_built_at_another_alignment_are_loud():
    """Groups of [128, 130, 65] packed at 64 while the kernel works at 128 (B43)."""
    with pytest.raises(ValueError, match=r"rows 256 to 383 hold experts 1, 2 .* must start at a multiple of 128"):
        check_m_indices(build_m_indices([128, 130, 65, 1], alignment=64), 4)
    with pytest.raises(ValueError, match="m_indices has 448 rows; grouped_contiguous needs a multiple of 128"):
        check_m_indices(build_m_indices([128, 130, 65], alignment=64)[:448], 3)


def test_a_whole_block_of_padding_is_legal_and_ids_are_in_range():
    """A block of -1 in the middle belongs to nobody and is skipped (B45)."""
    m_indices = build_m_indices([128, 128])
    middle = torch.cat((m_indices[:128], torch.full((128,), -1, dtype=torch.int32), m_indices[128:]))
    check_m_indices(middle, 2)
    with pytest.raises(ValueError, match="m_indices holds expert 1; legal are -1 and 0 to 0"):
        check_m_indices(middle, 1)
    ragged = m_indices.clone()
    ragged[3] = -1
    with pytest.raises(ValueError, match="padding comes before valid rows in rows 0 to 127"):
        check_m_indices(ragged, 2)


def test_masked_layout_needs_no_alignment_but_fits_its_capacity():
    """A group of 130 rows is legal when masked: the rule is masked_m <= max_m, nothing else (B47)."""
    check_masked(torch.tensor([130, 0, 3], dtype=torch.int32), 3, 160)
    with pytest.raises(ValueError, match=r"masked_m\[0\] is 130; legal are 0 to max_m=128"):
        check_masked(torch.tensor([130, 0, 3], dtype=torch.int32), 3, 128)
    with pytest.raises(ValueError, match=r"masked_m must be int32 \[3\]"):
        check_masked(torch.tensor([1, 2]), 3, 128)

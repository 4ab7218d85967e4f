"""`align_to_blocks` on the GPU: a counting sort that never waits for the device and keeps routes in order.

Routes are cut into chunks. Count: each chunk counts its routes per expert. Scan: for each expert, how many routes
earlier chunks hold. Start: where each expert's blocks begin. Scatter: a route goes to its expert's start, past the
earlier chunks' routes and the earlier ones of its own chunk. One chunk does all of it in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .routing_blocks import Routing, check_arguments, expected_rows, out_buffers

CHUNK = 256  # routes per program; ranks inside a chunk come from comparing all pairs
ONE_LAUNCH = 512  # routes up to which a single program does everything
SCAN_EXPERTS = 32  # experts per program of the scan
FILL_WIDTH = 1024


@triton.jit
def _local_experts(
    topk_ids_ptr,
    expert_map_ptr,
    routes,
    routed_m,
    NUM_EXPERTS: tl.constexpr,
    NUM_IDS: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """(local expert, NUM_EXPERTS for every route without a row; whether the id is out of range) of each route."""
    ids = tl.load(topk_ids_ptr + routes, mask=routes < routed_m, other=0).to(tl.int64)
    invalid = (ids < 0) | (ids >= NUM_IDS)
    if HAS_MAP:
        local = tl.load(expert_map_ptr + tl.where(invalid, 0, ids))
        invalid = invalid | (local < -1) | (local >= NUM_EXPERTS)
    else:
        local = ids.to(tl.int32)
    absent = invalid | (local < 0) | (routes >= routed_m)
    return tl.where(absent, NUM_EXPERTS, local), invalid & (routes < routed_m)


@triton.jit
def _ranks(
    topk_ids_ptr, expert_map_ptr, routes, experts, first, routed_m,
    NUM_EXPERTS: tl.constexpr, NUM_IDS: tl.constexpr, HAS_MAP: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """How many earlier routes of the same chunk share each route's expert."""
    PIECE: tl.constexpr = 32
    ranks = tl.zeros_like(experts)
    for piece in range(LENGTH // PIECE):
        others = first + piece * PIECE + tl.arange(0, PIECE)
        their_experts, _ = _local_experts(topk_ids_ptr, expert_map_ptr, others, routed_m, NUM_EXPERTS, NUM_IDS, HAS_MAP)
        same = (their_experts[None, :] == experts[:, None]) & (others[None, :] < routes[:, None])
        ranks += tl.sum(same.to(tl.int32), axis=1)
    return ranks


@triton.jit
def _place(
    sorted_ids_ptr, expert_ids_ptr, routes, experts, starts, ranks, NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Write each route to its expert's rows; the first route of a block names the block's expert."""
    present = experts < NUM_EXPERTS
    tl.store(sorted_ids_ptr + starts + ranks, routes, mask=present)
    tl.store(expert_ids_ptr + (starts + ranks) // BLOCK_M, experts, mask=present & (ranks % BLOCK_M == 0))


@triton.jit
def _fill(pointer, length, value, program, num_programs, WIDTH: tl.constexpr):
    """pointer[:length] = value, shared by num_programs."""
    for start in range(program * WIDTH, length, num_programs * WIDTH):
        index = start + tl.arange(0, WIDTH)
        tl.store(pointer + index, tl.zeros((WIDTH,), tl.int32) + value, mask=index < length)


@triton.jit
def _starts(
    counts, num_tokens_padded_ptr, starts_ptr, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """First row of each expert from its number of routes; their padded total goes to num_tokens_padded."""
    bins = tl.arange(0, BINS)
    rows = tl.where(bins < NUM_EXPERTS, (counts + BLOCK_M - 1) // BLOCK_M * BLOCK_M, 0)
    tl.store(starts_ptr + bins, tl.cumsum(rows, 0) - rows)
    tl.store(num_tokens_padded_ptr, tl.sum(rows, 0))


@triton.jit(do_not_specialize=["routed_m", "num_sorted", "num_blocks"])
def _align_in_one_launch_kernel(
    topk_ids_ptr, expert_map_ptr, sorted_ids_ptr, expert_ids_ptr, num_tokens_padded_ptr, num_invalid_ptr, starts_ptr,
    routed_m, num_sorted, num_blocks,
    NUM_EXPERTS: tl.constexpr, NUM_IDS: tl.constexpr, HAS_MAP: tl.constexpr, BINS: tl.constexpr,
    BLOCK_M: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """All of it for at most LENGTH routes. Grid: (1,)."""
    routes = tl.arange(0, LENGTH)
    experts, invalid = _local_experts(topk_ids_ptr, expert_map_ptr, routes, routed_m, NUM_EXPERTS, NUM_IDS, HAS_MAP)
    tl.store(num_invalid_ptr, tl.sum(invalid.to(tl.int32), 0))
    _fill(sorted_ids_ptr, num_sorted, routed_m, 0, 1, WIDTH)
    _fill(expert_ids_ptr, num_blocks, -1, 0, 1, WIDTH)
    _starts(tl.histogram(experts, BINS), num_tokens_padded_ptr, starts_ptr, NUM_EXPERTS, BINS, BLOCK_M)
    ranks = _ranks(topk_ids_ptr, expert_map_ptr, routes, experts, 0, routed_m, NUM_EXPERTS, NUM_IDS, HAS_MAP, LENGTH)
    tl.debug_barrier()  # the fills and starts above were written by other threads
    _place(sorted_ids_ptr, expert_ids_ptr, routes, experts, tl.load(starts_ptr + experts), ranks, NUM_EXPERTS, BLOCK_M)


@triton.jit(do_not_specialize=["routed_m", "num_sorted", "num_blocks"])
def _count_kernel(
    topk_ids_ptr, expert_map_ptr, sorted_ids_ptr, expert_ids_ptr, num_invalid_ptr, counts_ptr,
    routed_m, num_sorted, num_blocks,
    NUM_EXPERTS: tl.constexpr, NUM_IDS: tl.constexpr, HAS_MAP: tl.constexpr, BINS: tl.constexpr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """counts[chunk, expert], and the fill of the outputs. Grid: (chunks,)."""
    chunk = tl.program_id(0)
    routes = chunk * LENGTH + tl.arange(0, LENGTH)
    experts, invalid = _local_experts(topk_ids_ptr, expert_map_ptr, routes, routed_m, NUM_EXPERTS, NUM_IDS, HAS_MAP)
    num_invalid = tl.sum(invalid.to(tl.int32), 0)
    if num_invalid > 0:
        tl.atomic_add(num_invalid_ptr, num_invalid)
    tl.store(counts_ptr + chunk.to(tl.int64) * BINS + tl.arange(0, BINS), tl.histogram(experts, BINS))
    _fill(sorted_ids_ptr, num_sorted, routed_m, chunk, tl.num_programs(0), WIDTH)
    _fill(expert_ids_ptr, num_blocks, -1, chunk, tl.num_programs(0), WIDTH)


@triton.jit(do_not_specialize=["num_chunks"])
def _scan_kernel(counts_ptr, totals_ptr, num_chunks, BINS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """counts[chunk, expert] becomes the routes of that expert in earlier chunks. Grid: (BINS / WIDTH,)."""
    experts = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    before = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, num_chunks, ROWS):
        chunks = first + tl.arange(0, ROWS)
        pointers = counts_ptr + chunks[:, None].to(tl.int64) * BINS + experts[None, :]
        inside = (chunks < num_chunks)[:, None]
        counts = tl.load(pointers, mask=inside, other=0)
        tl.store(pointers, tl.cumsum(counts, 0) - counts + before[None, :], mask=inside)
        before += tl.sum(counts, 0)
    tl.store(totals_ptr + experts, before)


@triton.jit
def _start_kernel(
    totals_ptr, num_tokens_padded_ptr, starts_ptr, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Grid: (1,)."""
    totals = tl.load(totals_ptr + tl.arange(0, BINS))
    _starts(totals, num_tokens_padded_ptr, starts_ptr, NUM_EXPERTS, BINS, BLOCK_M)


@triton.jit(do_not_specialize=["routed_m"])
def _scatter_kernel(
    topk_ids_ptr, expert_map_ptr, sorted_ids_ptr, expert_ids_ptr, starts_ptr, earlier_ptr, routed_m,
    NUM_EXPERTS: tl.constexpr, NUM_IDS: tl.constexpr, HAS_MAP: tl.constexpr, BINS: tl.constexpr,
    BLOCK_M: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks,)."""
    chunk = tl.program_id(0)
    routes = chunk * LENGTH + tl.arange(0, LENGTH)
    experts, _ = _local_experts(topk_ids_ptr, expert_map_ptr, routes, routed_m, NUM_EXPERTS, NUM_IDS, HAS_MAP)
    ranks = tl.load(earlier_ptr + chunk.to(tl.int64) * BINS + experts)
    ranks += _ranks(
        topk_ids_ptr, expert_map_ptr, routes, experts, chunk * LENGTH, routed_m, NUM_EXPERTS, NUM_IDS, HAS_MAP, LENGTH
    )
    _place(sorted_ids_ptr, expert_ids_ptr, routes, experts, tl.load(starts_ptr + experts), ranks, NUM_EXPERTS, BLOCK_M)


def align_to_blocks_gpu(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> Routing:
    """`routing.align_to_blocks` without host synchronisation, fit for CUDA graphs; `Routing.check` tells of bad ids."""
    check_arguments(topk_ids, num_experts, block_m, expert_map)
    topk_ids = topk_ids.contiguous()
    routed_m = topk_ids.numel()
    sorted_ids, expert_ids, num_tokens_padded = out_buffers(topk_ids, num_experts, block_m, out)
    num_invalid = torch.zeros(1, dtype=torch.int32, device=topk_ids.device)
    if routed_m == 0:
        sorted_ids.fill_(0)
        expert_ids.fill_(-1)
        num_tokens_padded.zero_()
    else:
        arguments = (topk_ids, expert_map, sorted_ids, expert_ids, num_tokens_padded, num_invalid)
        (_align_small if routed_m <= ONE_LAUNCH else _align_large)(*arguments, num_experts, block_m)
    rows = expected_rows(routed_m, num_experts, expert_map)
    return Routing(sorted_ids, expert_ids, num_tokens_padded, block_m, routed_m, rows, num_invalid)


def _align_small(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_padded: torch.Tensor,
    num_invalid: torch.Tensor,
    num_experts: int,
    block_m: int,
) -> None:
    bins = _bins(num_experts)
    _align_in_one_launch_kernel[(1,)](
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        sorted_ids,
        expert_ids,
        num_tokens_padded,
        num_invalid,
        torch.empty(bins, dtype=torch.int32, device=topk_ids.device),
        topk_ids.numel(),
        sorted_ids.numel(),
        expert_ids.numel(),
        **_sizes(num_experts, expert_map, bins),
        BLOCK_M=block_m,
        LENGTH=max(32, triton.next_power_of_2(topk_ids.numel())),
        WIDTH=FILL_WIDTH,
        num_warps=8,
    )


def _align_large(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_padded: torch.Tensor,
    num_invalid: torch.Tensor,
    num_experts: int,
    block_m: int,
) -> None:
    routed_m, device = topk_ids.numel(), topk_ids.device
    bins, num_chunks = _bins(num_experts), -(-routed_m // CHUNK)
    sizes = _sizes(num_experts, expert_map, bins)
    ids = (topk_ids, topk_ids if expert_map is None else expert_map)
    counts = torch.empty((num_chunks, bins), dtype=torch.int32, device=device)
    totals, starts = torch.empty((2, bins), dtype=torch.int32, device=device)
    lengths = (routed_m, sorted_ids.numel(), expert_ids.numel())
    _count_kernel[(num_chunks,)](
        *ids, sorted_ids, expert_ids, num_invalid, counts, *lengths, **sizes, LENGTH=CHUNK, WIDTH=FILL_WIDTH
    )
    width = min(SCAN_EXPERTS, bins)
    _scan_kernel[(bins // width,)](counts, totals, num_chunks, BINS=bins, WIDTH=width, ROWS=64)
    _start_kernel[(1,)](totals, num_tokens_padded, starts, NUM_EXPERTS=num_experts, BINS=bins, BLOCK_M=block_m)
    _scatter_kernel[(num_chunks,)](
        *ids, sorted_ids, expert_ids, starts, counts, routed_m, **sizes, BLOCK_M=block_m, LENGTH=CHUNK
    )


def _bins(num_experts: int) -> int:
    """Histogram bins: one per expert and one for routes without a row, a power of two."""
    return max(16, triton.next_power_of_2(num_experts + 1))


def _sizes(num_experts: int, expert_map: torch.Tensor | None, bins: int) -> dict[str, int | bool]:
    num_ids = num_experts if expert_map is None else expert_map.numel()
    return {"NUM_EXPERTS": num_experts, "NUM_IDS": num_ids, "HAS_MAP": expert_map is not None, "BINS": bins}

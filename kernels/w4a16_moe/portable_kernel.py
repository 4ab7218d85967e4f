"""Portable device schedule: plain Triton, any legal shape, Ampere to Blackwell.

One tile is ``BLOCK_M`` routed rows of one expert times ``BLOCK_N`` output columns. It walks K in steps of
``BLOCK_K``: a step's codes, scales and activations arrive by asynchronous copies ``num_stages`` deep, codes become
bf16 in registers, and the tensor cores sum in fp32. The layout (`layout.rows`) is such that a thread reads its share
of a row's codes at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .portable_pieces import (
    BLOCK,
    GROUP,
    fence,
    load_activations,
    offset,
    round_to_bf16,
    settle,
    store_tile,
    unpack_weights,
)


@triton.jit
def _slice_of_rows(
    x_ptr, ids_ptr, routed_m,
    K: tl.constexpr, TOP_K: tl.constexpr, SLICE: tl.constexpr, BLOCK_N: tl.constexpr, SWAP_AB: tl.constexpr,
):  # fmt: skip
    """Of SLICE rows: sums of zero, pointers to a block of x, and which of the rows exist."""
    ids = tl.load(ids_ptr + tl.arange(0, SLICE))
    rows = x_ptr + offset(tl.where(ids < routed_m, ids // TOP_K, 0), K)
    kk = tl.arange(0, BLOCK)
    if SWAP_AB:
        return tl.zeros((BLOCK_N, SLICE), tl.float32), rows[None, :] + kk[:, None], (ids < routed_m)[None, :]
    else:
        return tl.zeros((SLICE, BLOCK_N), tl.float32), rows[:, None] + kk[None, :], (ids < routed_m)[:, None]


@triton.jit
def _multiply_rows(
    x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr,
    expert, first_row, column0, num_rows, routed_m, part,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    TOKENS: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, SWAP_AB: tl.constexpr, DEQUANT: tl.constexpr, COMPUTE: tl.constexpr,
    REORDER_X: tl.constexpr, SETTLE: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    """TOKENS rows from ``first_row`` of sorted_ids times ``block_n`` columns, over one part of K.

    The rows are cut into NUM_SLICES: slice 0 is always multiplied, a later one only where ``num_rows`` rows reach it.
    """
    NUM_BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    STEPS: tl.constexpr = NUM_BLOCKS * BLOCK // BLOCK_K // SPLIT_K
    SLICE: tl.constexpr = TOKENS // NUM_SLICES
    kk = tl.arange(0, BLOCK)
    columns = column0 + tl.arange(0, BLOCK_N)
    block0 = part * (STEPS * BLOCK_K // BLOCK)  # first stored block of this part
    stored_row = offset(expert * NUM_BLOCKS + block0, N)
    codes_ptrs = codes_ptr + stored_row * GROUP + (columns[:, None] * GROUP + tl.arange(0, GROUP)[None, :])
    scale_ptrs = scales_ptr + stored_row + columns

    # Each slice loads its own rows: cut from one tile, they would lie unswizzled in shared memory, and all eight rows
    # of a read would meet in the same banks: 560 us where the static schedule took 217 (H200, gate_up, 400 rows).
    accs, x_ptrs, valid = (), (), ()
    for i in tl.static_range(NUM_SLICES):
        first_id = sorted_ids_ptr + first_row + i * SLICE
        acc, pointers, inside = _slice_of_rows(
            x_ptr + block0 * BLOCK, first_id, routed_m, K, TOP_K, SLICE, BLOCK_N, SWAP_AB
        )
        accs, x_ptrs, valid = accs + (acc,), x_ptrs + (pointers,), valid + (inside,)

    for step in tl.range(STEPS, num_stages=NUM_STAGES):  # stages said here: only then loads for an `if` are pipelined
        for j in tl.static_range(BLOCK_K // BLOCK):
            block = step * (BLOCK_K // BLOCK) + j
            codes = tl.load(codes_ptrs + offset(block, N * GROUP))
            scale_words = tl.load(scale_ptrs + offset(block, N))
            if FENCE == "slices" or (FENCE == "steps" and j == 0):
                scale_words = fence(scale_words, False)
            w = unpack_weights(codes, scale_words, DEQUANT, COMPUTE, REORDER_X)
            sums = ()
            for i in tl.static_range(NUM_SLICES):
                mask = valid[i]
                if NUM_BLOCKS * BLOCK != K:  # the last stored block is half empty: x ends 32 earlier
                    k_left = K - (block0 + block) * BLOCK
                    mask = mask & ((kk[:, None] if SWAP_AB else kk[None, :]) < k_left)
                x = load_activations(x_ptrs[i] + block * BLOCK, mask, COMPUTE, REORDER_X)
                acc = accs[i]
                if i == 0:
                    acc = tl.dot(w, x, acc) if SWAP_AB else tl.dot(x, w.T, acc)
                else:
                    if num_rows > i * SLICE:
                        if FENCE == "slices":
                            fence(num_rows, True)
                        acc = tl.dot(w, x, acc)
                sums = sums + (settle(acc) if SETTLE else acc,)
            accs = sums

    for i in tl.static_range(NUM_SLICES):
        slice_ids = tl.load(sorted_ids_ptr + first_row + i * SLICE + tl.arange(0, SLICE))
        acc = tl.trans(accs[i]) if SWAP_AB else accs[i]
        store_tile(acc, out_ptr, slice_ids, columns, routed_m, part, N, DEQUANT, COMPUTE)


@triton.jit
def _multiply_tile(
    x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr, expert_ids_ptr, tile, num_m_blocks, routed_m,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, SWAP_AB: tl.constexpr, TOKEN_SLICING: tl.constexpr, TOKEN_SLICE: tl.constexpr,
    DEQUANT: tl.constexpr, COMPUTE: tl.constexpr, REORDER_X: tl.constexpr, SETTLE: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    """One tile: where it lies, whose weights it takes, and how its rows are sliced."""
    part = tile % SPLIT_K
    block_m, block_n = _tile_coordinates(tile // SPLIT_K, num_m_blocks, N // BLOCK_N, GROUP_M)
    expert = tl.load(expert_ids_ptr + block_m)
    if expert >= 0:  # -1 is no expert: a block that the caller blanked
        first_row = block_m * BLOCK_M
        column0 = block_n * BLOCK_N
        if TOKEN_SLICING == "static":
            _multiply_rows(
                x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr,
                expert, first_row, column0, BLOCK_M, routed_m, part,
                N, K, TOP_K, BLOCK_M, 1, BLOCK_N, BLOCK_K, SPLIT_K, NUM_STAGES,
                SWAP_AB, DEQUANT, COMPUTE, REORDER_X, SETTLE, FENCE,
            )  # fmt: skip
        else:
            block_ids = tl.load(sorted_ids_ptr + first_row + tl.arange(0, BLOCK_M))
            num_rows = tl.sum((block_ids < routed_m).to(tl.int32), axis=0)
            if TOKEN_SLICING == "semi_static":
                _multiply_rows(
                    x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr,
                    expert, first_row, column0, num_rows, routed_m, part,
                    N, K, TOP_K, BLOCK_M, BLOCK_M // TOKEN_SLICE, BLOCK_N, BLOCK_K, SPLIT_K, NUM_STAGES,
                    SWAP_AB, DEQUANT, COMPUTE, REORDER_X, SETTLE, FENCE,
                )  # fmt: skip
            else:  # dynamic: as many passes over the weights as slices hold rows
                for done in range(0, num_rows, TOKEN_SLICE):
                    _multiply_rows(
                        x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr,
                        expert, first_row + done, column0, num_rows, routed_m, part,
                        N, K, TOP_K, TOKEN_SLICE, 1, BLOCK_N, BLOCK_K, SPLIT_K, NUM_STAGES,
                        SWAP_AB, DEQUANT, COMPUTE, REORDER_X, SETTLE, FENCE,
                    )  # fmt: skip


@triton.jit
def _tile_coordinates(tile, num_m_blocks, num_n_blocks, GROUP_M: tl.constexpr):
    """(block_m, block_n): n fastest, so that neighbours share rows of x; with GROUP_M > 1 also weights."""
    if GROUP_M == 1:
        block_m, block_n = tile // num_n_blocks, tile % num_n_blocks
    else:
        first = tile // (GROUP_M * num_n_blocks) * GROUP_M
        height = tl.minimum(num_m_blocks - first, GROUP_M)
        inside = tile % (GROUP_M * num_n_blocks)
        block_m, block_n = first + inside % height, inside // height
    return block_m, block_n


@triton.jit(do_not_specialize=["routed_m"])
def portable_kernel(
    x_ptr,  # [routed_m / top_k, K] bf16
    codes_ptr,  # [E, K/64, N, 32] uint8
    scales_ptr,  # [E, K/64, N] int32: two bf16
    out_ptr,  # [routed_m, N] bf16; SPLIT_K > 1: partial sums [SPLIT_K, routed_m, N] fp32
    sorted_ids_ptr,  # [num_tokens_padded] int32, padding holds routed_m
    expert_ids_ptr,  # [num_tokens_padded / BLOCK_M] int32
    num_tokens_padded_ptr,  # [1] int32
    routed_m,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
    PERSISTENT: tl.constexpr, NUM_STAGES: tl.constexpr,
    SWAP_AB: tl.constexpr, TOKEN_SLICING: tl.constexpr, TOKEN_SLICE: tl.constexpr,
    DEQUANT: tl.constexpr, COMPUTE: tl.constexpr, REORDER_X: tl.constexpr, SETTLE: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    """y[row] = x[row // top_k] @ dequant(w[expert]).T for every routed row.

    Grid: one program per tile of the worst case, those past num_tokens_padded leave at once; PERSISTENT: a fixed grid
    that walks the tiles in use.
    """
    num_m_blocks = tl.load(num_tokens_padded_ptr) // BLOCK_M
    num_tiles = num_m_blocks * (N // BLOCK_N) * SPLIT_K
    if PERSISTENT:
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            _multiply_tile(
                x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr, expert_ids_ptr, tile, num_m_blocks, routed_m,
                N, K, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SPLIT_K, NUM_STAGES,
                SWAP_AB, TOKEN_SLICING, TOKEN_SLICE, DEQUANT, COMPUTE, REORDER_X, SETTLE, FENCE,
            )  # fmt: skip
    else:
        if tl.program_id(0) < num_tiles:
            _multiply_tile(
                x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr, expert_ids_ptr, tl.program_id(0),
                num_m_blocks, routed_m,
                N, K, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SPLIT_K, NUM_STAGES,
                SWAP_AB, TOKEN_SLICING, TOKEN_SLICE, DEQUANT, COMPUTE, REORDER_X, SETTLE, FENCE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["routed_m"])
def sum_parts_kernel(
    parts_ptr,  # [SPLIT_K, routed_m, N] fp32
    out_ptr,  # [routed_m, N] bf16
    sorted_ids_ptr,
    expert_ids_ptr,
    num_tokens_padded_ptr,
    routed_m,
    N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """out[row] = sum of the row's parts, always in the same order: repeated runs are bit-equal.

    Nobody's block (-1) has no parts, and its rows stay as they are. Grid: (rows of sorted_ids, pieces of N).
    """
    if tl.program_id(0) < tl.load(num_tokens_padded_ptr):
        row = tl.load(sorted_ids_ptr + tl.program_id(0))
        if (row < routed_m) & (tl.load(expert_ids_ptr + tl.program_id(0) // BLOCK_M) >= 0):
            columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = columns < N
            total = tl.zeros((BLOCK_N,), tl.float32)
            for part in tl.static_range(SPLIT_K):
                pointers = parts_ptr + offset(offset(part + 0 * row, routed_m) + row, N) + columns
                total += tl.load(pointers, mask=inside, other=0.0)
            tl.store(out_ptr + offset(row, N) + columns, round_to_bf16(total, COMPUTE), mask=inside)

"""Decode schedule, one CTA per tile: mma.sync with swapped operands, cp.async ring, dequantisation in registers.

Best where the number of tiles is just under a whole number of waves, and for every `down`; `stream_k` evens out the rest.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .compat import cta_barrier
from .decode_pieces import (
    allocate_ring,
    copy_tokens,
    copy_weights,
    count_slices,
    multiply_stage,
    pow2,
    store_slices,
    tile_weights,
    token_rows,
    zero_accumulators,
)


@gluon.jit
def _start_stage(
    ring, x_ptr, weights, rows, num_slices, stage_k, SLOT: gl.constexpr,
    K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SLICES: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    codes, scales, tokens = ring
    copy_weights(codes[SLOT], scales[SLOT], weights, stage_k, K, BLOCK_N, BLOCK_K, NUM_WARPS)
    copy_tokens(tokens[SLOT], x_ptr, rows, num_slices, stage_k, BLOCK_K, SLICES, NUM_WARPS)


@gluon.jit
def _accumulate(
    x_ptr, weights, ring, rows, num_slices,
    K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr,
    SLICING: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):
    """The whole K of one tile for SLICES token slices; the first STAGES - 1 weight stages are already under way."""
    codes, scales, tokens = ring
    ROUNDS: gl.constexpr = K // (BLOCK_K * STAGES)
    for i in gl.static_range(STAGES - 1):
        copy_tokens(tokens[i], x_ptr, rows, num_slices, i, BLOCK_K, SLICES, NUM_WARPS)
        async_copy.commit_group()
    acc = zero_accumulators(BLOCK_N, SLICES, NUM_WARPS)
    for r in range(ROUNDS):
        for i in gl.static_range(STAGES):
            async_copy.wait_group(STAGES - 2)
            cta_barrier()
            # start the next stage, into the slot that was read last; ROUNDS is looked at first because a branch that can
            # never be taken would stay in the code and stop the compiler
            if i == 0:
                _start_stage(
                    ring, x_ptr, weights, rows, num_slices, r * STAGES + STAGES - 1, STAGES - 1,
                    K, BLOCK_N, BLOCK_K, SLICES, NUM_WARPS,
                )  # fmt: skip
            else:
                if ROUNDS > 1:
                    if r + 1 < ROUNDS:
                        _start_stage(
                            ring, x_ptr, weights, rows, num_slices, (r + 1) * STAGES + i - 1, i - 1,
                            K, BLOCK_N, BLOCK_K, SLICES, NUM_WARPS,
                        )  # fmt: skip
            async_copy.commit_group()
            acc = multiply_stage(
                acc, codes[i], scales[i], tokens[i], num_slices, BLOCK_N, BLOCK_K, SLICING, NUM_WARPS, DEQUANT
            )
    return acc


@gluon.jit(do_not_specialize=["routed_m"])
def mma_sync_kernel(
    x_ptr,  # [routed_m // top_k, K] bf16
    codes_ptr,  # layout fragment64: [E, N/64, K/64, 1024] int16
    scales_ptr,  # layout fragment64: [E, N/64, K/64, 64] int32
    y_ptr,  # [routed_m, N] bf16
    sorted_ids_ptr,  # [>= num_tokens_padded] int32, pad id >= routed_m
    expert_ids_ptr,  # [>= num_tokens_padded / block_m] int32, -1: nobody's block
    num_tokens_padded_ptr,  # [1] int32
    routed_m,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    SLICING: gl.constexpr, WIDE: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """Grid: (blocks * N / block_n,), n fastest so that neighbours share x rows in L2. K is a multiple of block_k * stages."""
    NUM_N: gl.constexpr = N // BLOCK_N
    SLICES: gl.constexpr = BLOCK_M // 8
    block = gl.program_id(0) // NUM_N
    n_tile = gl.program_id(0) % NUM_N
    ids_ptr = sorted_ids_ptr + block * BLOCK_M
    # three loads that do not wait for each other: one latency before the weights start
    num_tokens_padded = gl.load(num_tokens_padded_ptr)
    expert = gl.load(expert_ids_ptr + block)
    num_slices = count_slices(ids_ptr, routed_m, SLICES)
    rows = token_rows(ids_ptr, routed_m, K, TOP_K, BLOCK_K, SLICES, WIDE, NUM_WARPS)
    if (block * BLOCK_M >= num_tokens_padded) | (expert < 0):
        return
    ring = allocate_ring(STAGES, BLOCK_N, BLOCK_K, SLICES)
    buffer = gl.allocate_shared_memory(gl.bfloat16, [pow2(BLOCK_M), BLOCK_N], gl.NVMMASharedLayout(128, 16, rank=2))
    weights = tile_weights(codes_ptr, scales_ptr, expert, n_tile, N, K, BLOCK_N)
    for i in gl.static_range(STAGES - 1):
        copy_weights(ring[0][i], ring[1][i], weights, i, K, BLOCK_N, BLOCK_K, NUM_WARPS)
    n0 = n_tile * BLOCK_N
    if SLICING == "branched" and SLICES > 1:
        for s in gl.static_range(1, SLICES + 1):
            if num_slices == s:
                acc_s = _accumulate(
                    x_ptr, weights, ring, rows, s,
                    K, BLOCK_N, BLOCK_K, STAGES, s, "static", NUM_WARPS, DEQUANT,
                )  # fmt: skip
                store_slices(acc_s, buffer, y_ptr, ids_ptr, routed_m, n0, N, BLOCK_N, NUM_WARPS)
    else:
        INNER: gl.constexpr = "static" if SLICING == "branched" else SLICING
        if SLICING == "static":
            num_slices = SLICES
        acc = _accumulate(
            x_ptr, weights, ring, rows, num_slices,
            K, BLOCK_N, BLOCK_K, STAGES, SLICES, INNER, NUM_WARPS, DEQUANT,
        )  # fmt: skip
        store_slices(acc, buffer, y_ptr, ids_ptr, routed_m, n0, N, BLOCK_N, NUM_WARPS)


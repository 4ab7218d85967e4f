"""Decode schedule, stream-K: one wave of persistent CTAs, each with an equal share of the (block, n tile, k) space.

A tile cut by a share's border is summed in fp32: the CTA that has its later part stores a partial and raises a flag, the
CTA that has its head collects. A CTA hands over its first, cut tile before it does anything else, and collects at the
very end, so it rarely waits. All CTAs must be resident at once (cooperative launch). Flags are back to zero at the end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .compat import cta_barrier
from .decode_pieces import (
    accumulator_layout,
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
def _enter_block(
    codes_ptr, scales_ptr, sorted_ids_ptr, expert_ids_ptr, routed_m, t, num_blocks,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    SLICING: gl.constexpr, WIDE: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """What tile `t` needs: pointers of its weights, rows of x, populated slices. A block of nobody (-1) has no valid row."""
    NUM_N: gl.constexpr = N // BLOCK_N
    SLICES: gl.constexpr = BLOCK_M // 8
    block = gl.minimum(t // NUM_N, num_blocks - 1)
    expert = gl.load(expert_ids_ptr + block)
    ids_ptr = sorted_ids_ptr + block * BLOCK_M
    valid_m = gl.where(expert < 0, 0, routed_m)
    if SLICING == "static":
        num_slices = gl.where(expert < 0, 0, SLICES)
    else:
        num_slices = count_slices(ids_ptr, valid_m, SLICES)
    rows = token_rows(ids_ptr, valid_m, K, TOP_K, BLOCK_K, SLICES, WIDE, NUM_WARPS)
    weights = tile_weights(codes_ptr, scales_ptr, gl.maximum(expert, 0), t % NUM_N, N, K, BLOCK_N)
    return weights, rows, num_slices


@gluon.jit
def _multiply(
    acc, codes, scales, tokens, num_slices,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SLICING: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """One stage; branched slicing picks a whole body by the number of populated slices."""
    if SLICING != "branched":
        return multiply_stage(acc, codes, scales, tokens, num_slices, BLOCK_N, BLOCK_K, SLICING, NUM_WARPS, DEQUANT)
    else:
        return _branch(acc, codes, scales, tokens, num_slices, 1, BLOCK_N, BLOCK_K, NUM_WARPS, DEQUANT)


@gluon.jit
def _branch(
    acc, codes, scales, tokens, num_slices, COUNT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """The body for COUNT slices if that is enough, else look at the next."""
    if COUNT == len(acc):
        acc = multiply_stage(acc, codes, scales, tokens, COUNT, BLOCK_N, BLOCK_K, "static", NUM_WARPS, DEQUANT)
    else:
        if num_slices <= COUNT:
            acc = (
                multiply_stage(
                    acc[:COUNT], codes, scales, tokens, COUNT, BLOCK_N, BLOCK_K, "static", NUM_WARPS, DEQUANT
                )
                + acc[COUNT:]
            )
        else:
            acc = _branch(acc, codes, scales, tokens, num_slices, COUNT + 1, BLOCK_N, BLOCK_K, NUM_WARPS, DEQUANT)
    return acc


@gluon.jit
def _partial_pointers(
    partial_ptr, cta, j: gl.constexpr, SLICES: gl.constexpr, BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr
):
    ACC: gl.constexpr = accumulator_layout(NUM_WARPS)
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ACC))
    token = gl.arange(0, 8, layout=gl.SliceLayout(0, ACC))
    return partial_ptr + (cta * SLICES + j) * (BLOCK_N * 8) + gl.expand_dims(n * 8, 1) + gl.expand_dims(token, 0)


@gluon.jit
def _hand_over(acc, partial_ptr, flag_ptr, num_slices, BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Store the later part of a cut tile and raise this CTA's flag."""
    cta = gl.program_id(0)
    for j in gl.static_range(len(acc)):
        if j < num_slices:
            gl.store(_partial_pointers(partial_ptr, cta, j, len(acc), BLOCK_N, NUM_WARPS), acc[j])
    cta_barrier()
    gl.atomic_xchg(flag_ptr + cta, 1, sem="release", scope="gpu")


@gluon.jit
def _wait_flags(ptrs):
    """Each thread waits until its flag is up; what was written before the flag was raised can be read from then on."""
    return gl.inline_asm_elementwise("""{
.reg .pred p;
waitFlag:
ld.acquire.gpu.global.b32 $0, [$1];
setp.eq.s32 p, $0, 0;
@p bra waitFlag;
}""", "=r,l", [ptrs.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _collect(
    acc, partial_ptr, flag_ptr, num_slices, tile_end, quotient, remainder,
    BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Add the parts that the following CTAs did, in their order: the sum does not depend on who is first.

    Flags are waited for 32 at a time and parts loaded PARTS at a time: one latency, not one for each.
    """
    PARTS: gl.constexpr = max(256 // BLOCK_N, 1)  # what registers allow
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    first = gl.program_id(0) + 1
    last = first  # the CTA that ends the tile
    while _share(last + 1, quotient, remainder) < tile_end:
        last += 1
    for base in range(first, last + 1, 32):
        _wait_flags(flag_ptr + gl.minimum(base + lane, last))
        cta_barrier()
        gl.store(flag_ptr + base + lane, gl.zeros_like(lane), mask=base + lane <= last)
    for cta in range(first, last + 1, PARTS):
        out = ()
        for j in gl.static_range(len(acc)):
            acc_j = acc[j]
            if j < num_slices:
                parts = ()
                for i in gl.static_range(PARTS):
                    pointers = _partial_pointers(partial_ptr, cta + i, j, len(acc), BLOCK_N, NUM_WARPS)
                    there = gl.full_like(acc_j, cta + i, dtype=gl.int32) <= last
                    parts = parts + (gl.load(pointers, mask=there, other=0.0, cache_modifier=".cg"),)
                for i in gl.static_range(PARTS):
                    acc_j += parts[i]
            out = out + (acc_j,)
        acc = out
    return acc


@gluon.jit
def _share(cta, quotient, remainder):
    """First k round of a CTA's share: the first `remainder` CTAs have one round more than the others."""
    return cta * quotient + gl.minimum(cta, remainder)


@gluon.jit(do_not_specialize=["routed_m"])
def stream_k_kernel(
    x_ptr,  # [routed_m // top_k, K] bf16
    codes_ptr,  # layout fragment64: [E, N/64, K/64, 1024] int16
    scales_ptr,  # layout fragment64: [E, N/64, K/64, 64] int32
    y_ptr,  # [routed_m, N] bf16
    partial_ptr,  # [num_ctas, block_m / 8, block_n, 8] fp32, scratch
    flag_ptr,  # [num_ctas + 1] int32, zero before and after
    sorted_ids_ptr,  # [>= num_tokens_padded] int32, pad id >= routed_m
    expert_ids_ptr,  # [>= num_tokens_padded / block_m] int32, -1: nobody's block
    num_tokens_padded_ptr,  # [1] int32
    routed_m,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    SLICING: gl.constexpr, WIDE: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """Grid: (SMs * ctas_per_sm,), cooperative. Unit of division: a round of STAGES k stages; K is a multiple of it."""
    ROUNDS: gl.constexpr = K // (BLOCK_K * STAGES)
    NUM_N: gl.constexpr = N // BLOCK_N
    SLICES: gl.constexpr = BLOCK_M // 8
    num_blocks = gl.load(num_tokens_padded_ptr) // BLOCK_M
    quotient = num_blocks * (NUM_N * ROUNDS) // gl.num_programs(0)
    remainder = num_blocks * (NUM_N * ROUNDS) % gl.num_programs(0)
    begin = _share(gl.program_id(0), quotient, remainder)
    end = _share(gl.program_id(0) + 1, quotient, remainder)
    if begin >= end:  # fewer rounds than CTAs: the last ones have none
        return
    codes, scales, tokens = allocate_ring(STAGES, BLOCK_N, BLOCK_K, SLICES)
    buffer = gl.allocate_shared_memory(gl.bfloat16, [pow2(BLOCK_M), BLOCK_N], gl.NVMMASharedLayout(128, 16, rank=2))
    t = begin // ROUNDS  # tile being multiplied; copies may already be in the next one
    first = begin % ROUNDS  # where this CTA enters tile t
    r = first
    ahead_t = t
    ahead_r = r
    weights, rows, num_slices = _enter_block(
        codes_ptr, scales_ptr, sorted_ids_ptr, expert_ids_ptr, routed_m, t, num_blocks,
        N, K, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, SLICING, WIDE, NUM_WARPS,
    )  # fmt: skip
    for i in gl.static_range(STAGES - 1):
        copy_weights(codes[i], scales[i], weights, r * STAGES + i, K, BLOCK_N, BLOCK_K, NUM_WARPS)
        copy_tokens(tokens[i], x_ptr, rows, num_slices, r * STAGES + i, BLOCK_K, SLICES, NUM_WARPS)
        async_copy.commit_group()
    populated = num_slices  # of tile t
    acc = zero_accumulators(BLOCK_N, SLICES, NUM_WARPS)
    for unit in range(begin, end):
        for i in gl.static_range(STAGES):
            async_copy.wait_group(STAGES - 2)
            cta_barrier()
            if i == 1 or STAGES == 1:  # the slot freed by now holds the first stage of the next round
                ahead_r += 1
                if ahead_r == ROUNDS:
                    ahead_r = 0
                    ahead_t += 1
                    weights, rows, num_slices = _enter_block(
                        codes_ptr, scales_ptr, sorted_ids_ptr, expert_ids_ptr, routed_m, ahead_t, num_blocks,
                        N, K, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, SLICING, WIDE, NUM_WARPS,
                    )  # fmt: skip
            if i == 0 or unit + 1 < end:
                stage_k = ahead_r * STAGES + (i + STAGES - 1) % STAGES
                copy_weights(
                    codes[(i + STAGES - 1) % STAGES], scales[(i + STAGES - 1) % STAGES], weights, stage_k,
                    K, BLOCK_N, BLOCK_K, NUM_WARPS,
                )  # fmt: skip
                copy_tokens(tokens[(i + STAGES - 1) % STAGES], x_ptr, rows, num_slices, stage_k, BLOCK_K, SLICES, NUM_WARPS)
            async_copy.commit_group()
            acc = _multiply(acc, codes[i], scales[i], tokens[i], populated, BLOCK_N, BLOCK_K, SLICING, NUM_WARPS, DEQUANT)
        r += 1
        if (r == ROUNDS) | (unit == end - 1):
            if first > 0:
                _hand_over(acc, partial_ptr, flag_ptr, populated, BLOCK_N, NUM_WARPS)
            else:
                if r < ROUNDS:
                    acc = _collect(
                        acc, partial_ptr, flag_ptr, populated, (t + 1) * ROUNDS, quotient, remainder, BLOCK_N, NUM_WARPS
                    )
                valid_m = gl.where(populated > 0, routed_m, 0)
                ids_ptr = sorted_ids_ptr + (t // NUM_N) * BLOCK_M
                store_slices(acc, buffer, y_ptr, ids_ptr, valid_m, (t % NUM_N) * BLOCK_N, N, BLOCK_N, NUM_WARPS)
            acc = zero_accumulators(BLOCK_N, SLICES, NUM_WARPS)
            r = 0
            first = 0
            t += 1
            populated = num_slices


"""Prefill schedule: wgmma with dequantised weights in registers (A) and tokens in shared memory (B), warp-specialised.

Three roles share a ring of k64 stages. Gather warps copy rows of x with cp.async; one weight warp copies codes and scales
with tensor maps and hands out tiles; the rest multiply. Operands are swapped: weights are the M side (64 output columns
a warpgroup), tokens the N side, so any multiple of 8 tokens is a legal tile and padding is cheap.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .barriers import arrive_slot, wait_slot
from .compat import cta_barrier
from .decode_pieces import pow2
from .epilogue import load_entries, stage_rows, write_rows
from .fragments import dequantise_half, load_fragment
from .tiles import following_tile, make_queue, next_tile, push_tile, return_counter, tile_coordinates


@gluon.constexpr_function
def token_variants(block_m, slicing, contiguous=False):
    """Bodies a tile can run, largest first, each (B0, B1): accumulators of B0 and B1 tokens. B0 and B1 are powers of two.

    Contiguous rows come in groups of 128: the whole tile, or one group of it. Without gather warps there are registers
    for one accumulator of 256 tokens.
    """
    if contiguous:
        return ((block_m, 0),) if block_m == 128 else ((block_m, 0), (128, 0))
    whole = {256: (128, 128), 192: (128, 64), 160: (128, 32), 96: (64, 32)}.get(block_m, (block_m, 0))
    if slicing == "static":
        return (whole,)
    smaller = {
        256: ((128, 64), (128, 0), (64, 0)),
        192: ((128, 32), (128, 0), (64, 0)),
        160: ((128, 0), (64, 0)),
        128: ((64, 32), (64, 0)),  # a fourth body here makes ptxas serialise every wgmma (C7512)
        96: ((64, 0), (32, 0)),
        64: ((32, 0), (16, 0)),  # 48 = 32 + 16 takes as long as 64 and a quarter more instructions
        32: ((16, 0),),
    }
    return (whole, *smaller.get(block_m, ()))


@gluon.constexpr_function
def accumulator(tokens, num_warps):
    """``[block_n, tokens]`` fp32: warps stacked along n, 16 rows each; 64 rows a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, tokens, 16])


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """Next slot of the ring; the phase bit turns over with it."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


# ---------------------------------------------------------------- multiply
@gluon.jit
def _multiply_half(
    weights, x, acc0, acc1, HALF: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr, NUM_WARPS: gl.constexpr
):
    """Issue one k32 half; return when the half before it is done, so that its A registers may be overwritten."""
    x = x.slice(HALF * 32, 32, dim=1)
    acc0 = warpgroup_mma(weights, x.slice(0, B0, dim=0).permute((1, 0)), acc0, is_async=True)
    if B1 > 0:
        SECOND: gl.constexpr = gl.DotOperandLayout(0, accumulator(B1, NUM_WARPS), 2)
        same = gl.convert_layout(weights, SECOND, assert_trivial=True)
        acc1 = warpgroup_mma(same, x.slice(B0, B1, dim=0).permute((1, 0)), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
        return warpgroup_mma_init(acc0), warpgroup_mma_init(acc1)
    else:
        return warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc0])), acc1


@gluon.jit
def _accumulate(
    ring, slots, stage, phase,
    K: gl.constexpr, BLOCK_N: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr, STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """The whole K of one tile for B0 + B1 tokens.

    A k64 stage is two k32 halves (one scale group each) with two sets of A registers: while one half multiplies, the other
    is dequantised. The loop is rotated, so that the half in flight over the back edge is not redefined at its top:
    ptxas would serialise the wgmmas otherwise.
    """
    x, codes, scales, _full, _empty = ring
    full_offset, empty_offset = slots
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(B0, NUM_WARPS), 2)
    acc0 = warpgroup_mma_init(gl.zeros([BLOCK_N, B0], gl.float32, layout=accumulator(B0, NUM_WARPS)))
    if B1 > 0:
        acc1 = warpgroup_mma_init(gl.zeros([BLOCK_N, B1], gl.float32, layout=accumulator(B1, NUM_WARPS)))
    else:
        acc1 = 0
    # not `previous = stage`: the loop would then lose that it carries two values (Triton 3.6)
    previous = gl.where(stage == 0, STAGES - 1, stage - 1)
    ready = wait_slot(full_offset, stage, phase)
    words, pairs = load_fragment(codes.index(ready), scales.index(ready), BLOCK_N, True, OPERAND)
    low = dequantise_half(words, pairs, 0, BLOCK_N, OPERAND, DEQUANT)
    for k in range(K // 64 - 1):
        acc0, acc1 = _multiply_half(low, x.index(ready), acc0, acc1, 0, B0, B1, NUM_WARPS)
        arrive_slot(empty_offset, previous, (k > 0).to(gl.int32))
        high = dequantise_half(words, pairs, 1, BLOCK_N, OPERAND, DEQUANT)
        acc0, acc1 = _multiply_half(high, x.index(ready), acc0, acc1, 1, B0, B1, NUM_WARPS)
        previous = stage
        stage, phase = advance(stage, phase, STAGES)
        ready = wait_slot(full_offset, stage, phase)
        words, pairs = load_fragment(codes.index(ready), scales.index(ready), BLOCK_N, True, OPERAND)
        low = dequantise_half(words, pairs, 0, BLOCK_N, OPERAND, DEQUANT)
    acc0, acc1 = _multiply_half(low, x.index(ready), acc0, acc1, 0, B0, B1, NUM_WARPS)
    arrive_slot(empty_offset, previous, 1 if K // 64 > 1 else 0)
    high = dequantise_half(words, pairs, 1, BLOCK_N, OPERAND, DEQUANT)
    acc0, acc1 = _multiply_half(high, x.index(ready), acc0, acc1, 1, B0, B1, NUM_WARPS)
    if B1 > 0:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    else:
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
    arrive_slot(empty_offset, stage, 1)
    stage, phase = advance(stage, phase, STAGES)
    return acc0, acc1, stage, phase


@gluon.jit
def tile_body(
    ring, slots, buffer, y_ptr, ids_ptr, row0, routed_m, n0, stage, phase, variant, FIRST: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SLICING: gl.constexpr, CONTIGUOUS: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """Run body `variant`; FIRST is the one that this level of the recursion looks at: the smallest first."""
    VARIANTS: gl.constexpr = token_variants(BLOCK_M, SLICING, CONTIGUOUS)
    LAST: gl.constexpr = len(VARIANTS) - 1 - FIRST
    if LAST == 0:
        return _run_body(
            ring, slots, buffer, y_ptr, ids_ptr, row0, routed_m, n0, stage, phase, VARIANTS[LAST][0], VARIANTS[LAST][1],
            N, K, BLOCK_N, STAGES, CONTIGUOUS, NUM_WARPS, DEQUANT,
        )  # fmt: skip
    else:
        if variant >= LAST:
            return _run_body(
                ring, slots, buffer, y_ptr, ids_ptr, row0, routed_m, n0, stage, phase, VARIANTS[LAST][0], VARIANTS[LAST][1],
                N, K, BLOCK_N, STAGES, CONTIGUOUS, NUM_WARPS, DEQUANT,
            )  # fmt: skip
        else:
            return tile_body(
                ring, slots, buffer, y_ptr, ids_ptr, row0, routed_m, n0, stage, phase, variant, FIRST + 1,
                N, K, BLOCK_M, BLOCK_N, STAGES, SLICING, CONTIGUOUS, NUM_WARPS, DEQUANT,
            )  # fmt: skip


@gluon.jit
def _run_body(
    ring, slots, buffer, y_ptr, ids_ptr, row0, routed_m, n0, stage, phase, B0: gl.constexpr, B1: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONTIGUOUS: gl.constexpr,
    NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    acc0, acc1, stage, phase = _accumulate(ring, slots, stage, phase, K, BLOCK_N, B0, B1, STAGES, NUM_WARPS, DEQUANT)
    _store(acc0, buffer, y_ptr, ids_ptr, row0, 0, B0, routed_m, n0, N, BLOCK_N, CONTIGUOUS, NUM_WARPS)
    if B1 > 0:
        _store(acc1, buffer, y_ptr, ids_ptr, row0, B0, B1, routed_m, n0, N, BLOCK_N, CONTIGUOUS, NUM_WARPS)
    return stage, phase


@gluon.jit
def _store(
    acc, buffer, y_ptr, ids_ptr, row0, FIRST: gl.constexpr, NUM: gl.constexpr, routed_m, n0,
    N: gl.constexpr, BLOCK_N: gl.constexpr, CONTIGUOUS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """One accumulator, through shared memory, to rows FIRST.. of the tile."""
    entries = load_entries(ids_ptr, row0 + FIRST, BLOCK_N, NUM, NUM_WARPS)  # early: they arrive behind the barriers
    cta_barrier()  # everyone has read what was in the buffer before
    stage_rows(acc, buffer, 0, NUM)
    cta_barrier()
    write_rows(buffer, y_ptr, entries, row0 + FIRST, routed_m, n0, N, BLOCK_N, NUM, CONTIGUOUS, NUM_WARPS)


@gluon.jit
def _multiplier(
    ring, slots, buffer, queue, y_ptr, ids_ptr, num_blocks, routed_m,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, SLICING: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    NUM_N: gl.constexpr = N // BLOCK_N
    stage = 0
    phase = 0
    i = 0
    t, variant = next_tile(queue, i, NUM_WARPS)
    while t < num_blocks * NUM_N:
        block, n_tile = tile_coordinates(t, num_blocks, NUM_N, GROUP_M)
        stage, phase = tile_body(
            ring, slots, buffer, y_ptr, ids_ptr, block * BLOCK_M, routed_m, n_tile * BLOCK_N, stage, phase, variant, 0,
            N, K, BLOCK_M, BLOCK_N, STAGES, SLICING, False, NUM_WARPS, DEQUANT,
        )  # fmt: skip
        i += 1
        t, variant = next_tile(queue, i, NUM_WARPS)


# ---------------------------------------------------------------- copy
@gluon.jit
def _copy_weights(
    codes_desc, scales_desc, ring, queue, ids_ptr, expert_ids_ptr, num_blocks, routed_m,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, SLICING: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """One warp: hand out tiles, copy codes and scales of every k64 stage."""
    _x, codes, scales, full, empty = ring
    NUM_N: gl.constexpr = N // BLOCK_N
    stage = 0
    phase = 1
    i = 0
    t, expert = _find_tile(queue, gl.program_id(0), expert_ids_ptr, num_blocks, NUM_N, GROUP_M, ORDER)
    _announce(queue, i, t, ids_ptr, num_blocks, routed_m, NUM_N, BLOCK_M, GROUP_M, SLICING)
    while t < num_blocks * NUM_N:
        # The next tile, or the end, is announced before this one is copied: the gather warps look one tile ahead, and
        # this one's copies cannot finish without them.
        upcoming = following_tile(queue, t, ORDER)
        upcoming, next_expert = _find_tile(queue, upcoming, expert_ids_ptr, num_blocks, NUM_N, GROUP_M, ORDER)
        i += 1
        _announce(queue, i, upcoming, ids_ptr, num_blocks, routed_m, NUM_N, BLOCK_M, GROUP_M, SLICING)
        _block, n_tile = tile_coordinates(t, num_blocks, NUM_N, GROUP_M)
        row = (expert * N + n_tile * BLOCK_N) // 64
        for k in range(K // 64):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BLOCK_N * (32 + 4))
            tma.async_copy_global_to_shared(codes_desc, [row, k * 16, 0], full.index(stage), codes.index(stage))
            tma.async_copy_global_to_shared(scales_desc, [row, k * 64], full.index(stage), scales.index(stage))
            stage, phase = advance(stage, phase, STAGES)
        t = upcoming
        expert = next_expert
    if ORDER == "dynamic":
        return_counter(queue)


@gluon.jit
def _find_tile(
    queue, t, expert_ids_ptr, num_blocks, NUM_N: gl.constexpr, GROUP_M: gl.constexpr, ORDER: gl.constexpr
):
    """The first tile from t on, in this CTA's order, whose block has an expert (-1 is nobody's), and that expert."""
    expert = _expert_of(t, expert_ids_ptr, num_blocks, NUM_N, GROUP_M)
    while (expert < 0) & (t < num_blocks * NUM_N):
        t = following_tile(queue, t, ORDER)
        expert = _expert_of(t, expert_ids_ptr, num_blocks, NUM_N, GROUP_M)
    return t, expert


@gluon.jit
def _expert_of(t, expert_ids_ptr, num_blocks, NUM_N: gl.constexpr, GROUP_M: gl.constexpr):
    block, _n_tile = tile_coordinates(t, num_blocks, NUM_N, GROUP_M)
    return gl.load(expert_ids_ptr + block, mask=t < num_blocks * NUM_N, other=-1)


@gluon.jit
def _announce(
    queue, i, t, ids_ptr, num_blocks, routed_m,
    NUM_N: gl.constexpr, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr, SLICING: gl.constexpr,
):  # fmt: skip
    """Tell the other roles tile t and the body that it needs; t past the last tile tells them to stop."""
    block, _n_tile = tile_coordinates(t, num_blocks, NUM_N, GROUP_M)
    in_range = t < num_blocks * NUM_N
    VARIANTS: gl.constexpr = token_variants(BLOCK_M, SLICING)
    variant = 0
    for v in gl.static_range(1, len(VARIANTS)):  # real rows stand first in a block, so one entry each tells
        first_beyond = ids_ptr + block * BLOCK_M + VARIANTS[v][0] + VARIANTS[v][1]
        variant += (gl.load(first_beyond, mask=in_range, other=0) >= routed_m).to(gl.int32)
    push_tile(queue, i, gl.minimum(t, num_blocks * NUM_N), variant)


@gluon.jit
def _block_ids(
    ids_ptr, t, row, num_blocks, routed_m, NUM_N: gl.constexpr, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr
):
    """Routed rows of a tile's block, padding past block_m; all padding past the last tile."""
    block, _n_tile = tile_coordinates(t, num_blocks, NUM_N, GROUP_M)
    real = (row < BLOCK_M) & (t < num_blocks * NUM_N)
    return gl.load(ids_ptr + block * BLOCK_M + row, mask=real, other=routed_m)


@gluon.jit
def _gather_rows(
    x_ptr, ring, slots, queue, ids_ptr, num_blocks, routed_m,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, NUM_WARPS: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Copy the rows of x of every k64 stage, LAG stages at a time under way.

    wgmma reads shared memory through the async proxy, cp.async writes it through the generic one: a fence by the writer
    has to stand between completion and the barrier. It stands here, and costs the multipliers nothing.
    """
    x, _codes, _scales, _full, _empty = ring
    full_offset, empty_offset = slots
    NUM_N: gl.constexpr = N // BLOCK_N
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NUM_WARPS, 1], [1, 0])
    row = gl.arange(0, pow2(BLOCK_M), layout=gl.SliceLayout(1, COPY))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))
    stage = 0
    phase = 1
    started = 0
    done = 0  # slot whose copies complete next
    i = 0
    t, _variant = next_tile(queue, i, NUM_WARPS)
    ids = _block_ids(ids_ptr, t, row, num_blocks, routed_m, NUM_N, BLOCK_M, GROUP_M)
    while t < num_blocks * NUM_N:
        valid = ids < routed_m
        source = gl.where(valid, ids // TOP_K, 0).to(gl.int64) * K
        pointers = x_ptr + gl.expand_dims(source, 1) + gl.expand_dims(column, 0)
        mask = gl.broadcast(gl.expand_dims(valid, 1), pointers)[0]
        i += 1
        t, _variant = next_tile(queue, i, NUM_WARPS)  # ids of the next tile are on their way while this one is copied
        ids = _block_ids(ids_ptr, t, row, num_blocks, routed_m, NUM_N, BLOCK_M, GROUP_M)
        for k in range(K // 64):
            free = wait_slot(empty_offset, stage, phase)
            async_copy.async_copy_global_to_shared(x.index(free), pointers + k * 64, mask=mask)
            async_copy.commit_group()
            async_copy.wait_group(LAG)
            fence_async_shared()
            arrive_slot(full_offset, done, (started >= LAG).to(gl.int32))
            done = gl.where(started >= LAG, (done + 1) % STAGES, done)
            started += 1
            stage, phase = advance(stage, phase, STAGES)
    async_copy.wait_group(0)
    fence_async_shared()
    for _ in range(gl.minimum(started, LAG)):
        arrive_slot(full_offset, done, 1)
        done = (done + 1) % STAGES


# ---------------------------------------------------------------- kernel
@gluon.jit(do_not_specialize=["routed_m", "full_offset", "empty_offset"])
def wgmma_kernel(
    x_ptr,  # [routed_m // top_k, K] bf16
    codes_desc,  # layout fragment64 as [E * N/64, K/64 * 16, 64] int16, box [block_n/64, 16, 64], 128-byte swizzle
    scales_desc,  # layout fragment64 as [E * N/64, K] int32, box [block_n/64, 64]
    y_ptr,  # [routed_m, N] bf16
    sorted_ids_ptr,  # [>= num_tokens_padded] int32, pad id >= routed_m
    expert_ids_ptr,  # [>= num_tokens_padded / block_m] int32, -1: nobody's block
    num_tokens_padded_ptr,  # [1] int32
    counter_ptr,  # [2] int32 for tile_order dynamic, zero before and after
    routed_m,
    full_offset, empty_offset,  # of full[0] and empty[0] in shared memory: see barriers
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, SLICING: gl.constexpr,
    ORDER: gl.constexpr, NUM_WARPS: gl.constexpr, GATHER_WARPS: gl.constexpr, GATHER_REGISTERS: gl.constexpr, LAG: gl.constexpr,
    DEQUANT: gl.constexpr,
):  # fmt: skip
    """Grid: (min(SMs * ctas_per_sm, tiles),), persistent, n fastest within group_m blocks."""
    num_blocks = gl.load(num_tokens_padded_ptr) // BLOCK_M
    ROWS: gl.constexpr = pow2(BLOCK_M)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 64], SWIZZLED)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N // 64, 16, 64], gl.NVMMASharedLayout(128, 16, rank=3))
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N // 64, 64], gl.NVMMASharedLayout(0, 32, rank=2))
    buffer = gl.allocate_shared_memory(gl.bfloat16, [min(ROWS, 128), BLOCK_N], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + GATHER_WARPS * 32)  # weight warp, every gathering thread
        mbarrier.init(empty.index(i), count=NUM_WARPS * 32)  # every multiplying thread
    queue = make_queue(counter_ptr, 2)
    fence_async_shared()
    ring = (x, codes, scales, full, empty)
    slots = (full_offset, empty_offset)
    gl.warp_specialize(
        [
            (_multiplier, (
                ring, slots, buffer, queue, y_ptr, sorted_ids_ptr, num_blocks, routed_m,
                N, K, BLOCK_M, BLOCK_N, STAGES, GROUP_M, SLICING, NUM_WARPS, DEQUANT,
            )),
            (_gather_rows, (
                x_ptr, ring, slots, queue, sorted_ids_ptr, num_blocks, routed_m,
                N, K, TOP_K, BLOCK_M, BLOCK_N, STAGES, GROUP_M, GATHER_WARPS, LAG,
            )),
            (_copy_weights, (
                codes_desc, scales_desc, ring, queue, sorted_ids_ptr, expert_ids_ptr, num_blocks, routed_m,
                N, K, BLOCK_M, BLOCK_N, STAGES, GROUP_M, SLICING, ORDER,
            )),
        ],
        [GATHER_WARPS, 1],
        [GATHER_REGISTERS, 24],
    )  # fmt: skip

"""Prefill schedule: wgmma with dequantised weights in registers (A) and tokens in shared memory (B), warp-specialised.

Three roles share a ring of k64 stages. Gather warps copy rows of x with cp.async; one weight warp copies codes and scales
with tensor maps and hands out tiles; the rest multiply (`wgmma_body`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .barriers import arrive_slot, mark_start, wait_slot
from .decode_pieces import pow2
from .tiles import NUM_SLOTS, following_tile, make_queue, next_tile, push_tile, return_counter, tile_coordinates
from .wgmma_body import BUFFER_ROWS, advance, bodies_of, columns, run_tile


# ---------------------------------------------------------------- multiply
@gluon.jit
def _multiplier(
    ring, places, buffer, queue, y_ptr, ids_ptr, num_blocks, routed_m,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, BODIES: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    NUM_N: gl.constexpr = N // BLOCK_N
    stage = 0
    phase = 0
    i = 0
    t, body = next_tile(queue, i, NUM_WARPS)
    while t < num_blocks * NUM_N:
        block, n_tile = tile_coordinates(t, num_blocks, NUM_N, GROUP_M)
        stage, phase = run_tile(
            ring, places, buffer, y_ptr, ids_ptr, block * BLOCK_M, routed_m, n_tile * BLOCK_N, stage, phase, body,
            BODIES, len(BODIES) - 1, N, K, BLOCK_N, pow2(BLOCK_M) * 128, STAGES, False, NUM_WARPS, DEQUANT,
        )  # fmt: skip
        i += 1
        t, body = next_tile(queue, i, NUM_WARPS)


# ---------------------------------------------------------------- copy
@gluon.jit
def _copy_weights(
    codes_desc, scales_desc, ring, queue, ids_ptr, expert_ids_ptr, num_blocks, routed_m,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, BODIES: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """One warp: hand out tiles, copy codes and scales of every k64 stage."""
    _x, codes, scales, barriers = ring
    NUM_N: gl.constexpr = N // BLOCK_N
    stage = 0
    phase = 1
    i = 0
    t, expert = _find_tile(queue, gl.program_id(0), expert_ids_ptr, num_blocks, NUM_N, GROUP_M, ORDER)
    _announce(queue, i, t, ids_ptr, num_blocks, routed_m, NUM_N, BLOCK_M, GROUP_M, BODIES)
    while t < num_blocks * NUM_N:
        # The next tile, or the end, is announced before this one is copied: the gather warps look one tile ahead, and
        # this one's copies cannot finish without them.
        upcoming = following_tile(queue, t, ORDER)
        upcoming, next_expert = _find_tile(queue, upcoming, expert_ids_ptr, num_blocks, NUM_N, GROUP_M, ORDER)
        i += 1
        _announce(queue, i, upcoming, ids_ptr, num_blocks, routed_m, NUM_N, BLOCK_M, GROUP_M, BODIES)
        _block, n_tile = tile_coordinates(t, num_blocks, NUM_N, GROUP_M)
        row = (expert * N + n_tile * BLOCK_N) // 64
        for k in range(K // 64):
            mbarrier.wait(barriers.index(STAGES + stage), phase)
            full = barriers.index(stage)
            mbarrier.expect(full, BLOCK_N * (32 + 4))
            tma.async_copy_global_to_shared(codes_desc, [row, k * 16, 0], full, codes.index(stage))
            tma.async_copy_global_to_shared(scales_desc, [row, k * 64], full, scales.index(stage))
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
    NUM_N: gl.constexpr, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr, BODIES: gl.constexpr,
):  # fmt: skip
    """Tell the other roles tile t and the body that it needs; t past the last tile tells them to stop."""
    block, _n_tile = tile_coordinates(t, num_blocks, NUM_N, GROUP_M)
    in_range = t < num_blocks * NUM_N
    body = 0
    for b in gl.static_range(1, len(BODIES)):  # real rows stand first in a block, so one entry each tells
        first_beyond = ids_ptr + block * BLOCK_M + BODIES[b]
        body += (gl.load(first_beyond, mask=in_range, other=0) >= routed_m).to(gl.int32)
    push_tile(queue, i, gl.minimum(t, num_blocks * NUM_N), body)


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
    x_ptr, ring, places, queue, ids_ptr, num_blocks, routed_m,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, NUM_WARPS: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Copy the rows of x of every k64 stage, LAG stages at a time under way.

    wgmma reads shared memory through the async proxy, cp.async writes it through the generic one: a fence by the writer
    has to stand between completion and the barrier. It stands here, and costs the multipliers nothing.
    """
    x, _codes, _scales, _barriers = ring
    _x_offset, full_offset, empty_offset = places
    NUM_N: gl.constexpr = N // BLOCK_N
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NUM_WARPS, 1], [1, 0])
    row = gl.arange(0, pow2(BLOCK_M), layout=gl.SliceLayout(1, COPY))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))
    stage = 0
    phase = 1
    started = 0
    done = 0  # slot whose copies complete next
    i = 0
    t, _body = next_tile(queue, i, NUM_WARPS)
    ids = _block_ids(ids_ptr, t, row, num_blocks, routed_m, NUM_N, BLOCK_M, GROUP_M)
    while t < num_blocks * NUM_N:
        valid = ids < routed_m
        source = gl.where(valid, ids // TOP_K, 0).to(gl.int64) * K
        pointers = x_ptr + gl.expand_dims(source, 1) + gl.expand_dims(column, 0)
        mask = gl.broadcast(gl.expand_dims(valid, 1), pointers)[0]
        i += 1
        t, _body = next_tile(queue, i, NUM_WARPS)  # ids of the next tile are on their way while this one is copied
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
@gluon.jit(do_not_specialize=["routed_m", "x_offset", "barriers_offset"])
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
    x_offset, barriers_offset,  # in shared memory: see barriers
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, SLICING: gl.constexpr,
    ORDER: gl.constexpr, NUM_WARPS: gl.constexpr, GATHER_WARPS: gl.constexpr, GATHER_REGISTERS: gl.constexpr, LAG: gl.constexpr,
    DEQUANT: gl.constexpr,
):  # fmt: skip
    """Grid: (min(SMs * ctas_per_sm, tiles),), persistent, n fastest within group_m blocks."""
    num_blocks = gl.load(num_tokens_padded_ptr) // BLOCK_M
    BODIES: gl.constexpr = bodies_of(BLOCK_M, BLOCK_N, NUM_WARPS, SLICING)
    ROWS: gl.constexpr = pow2(BLOCK_M)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 64], SWIZZLED)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N // 64, 16, 64], gl.NVMMASharedLayout(128, 16, rank=3))
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N // 64, 64], gl.NVMMASharedLayout(0, 32, rank=2))
    buffer = gl.allocate_shared_memory(gl.bfloat16, [min(ROWS, BUFFER_ROWS), columns(BLOCK_N, NUM_WARPS)], SWIZZLED)
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 2 * NUM_SLOTS, 1], mbarrier.MBarrierLayout())
    mark_start(x, ROWS * 128)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1 + GATHER_WARPS * 32)  # weight warp, every gathering thread
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(STAGES + i), count=NUM_WARPS * 32)  # every multiplying thread
    queue = make_queue(barriers, barriers_offset, counter_ptr, 2 * STAGES, (NUM_WARPS + GATHER_WARPS) * 32)
    fence_async_shared()
    ring = (x, codes, scales, barriers)
    places = (x_offset, barriers_offset, barriers_offset + STAGES * 8)
    gl.warp_specialize(
        [
            (_multiplier, (
                ring, places, buffer, queue, y_ptr, sorted_ids_ptr, num_blocks, routed_m,
                N, K, BLOCK_M, BLOCK_N, STAGES, GROUP_M, BODIES, NUM_WARPS, DEQUANT,
            )),
            (_gather_rows, (
                x_ptr, ring, places, queue, sorted_ids_ptr, num_blocks, routed_m,
                N, K, TOP_K, BLOCK_M, BLOCK_N, STAGES, GROUP_M, GATHER_WARPS, LAG,
            )),
            (_copy_weights, (
                codes_desc, scales_desc, ring, queue, sorted_ids_ptr, expert_ids_ptr, num_blocks, routed_m,
                N, K, BLOCK_M, BLOCK_N, STAGES, GROUP_M, BODIES, ORDER,
            )),
        ],
        [GATHER_WARPS, 1],
        [GATHER_REGISTERS, 24],
    )  # fmt: skip

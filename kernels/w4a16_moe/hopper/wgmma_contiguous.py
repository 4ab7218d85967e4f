"""Prefill schedule for grouped_contiguous: as `wgmma`, but rows of x lie in order, so tensor maps copy them too.

m_indices names the expert of each 128-row group. A tile of 256 rows may lie over two groups: of one expert, it runs as
one body; of two, as two bodies of 128 rows. A group that is padding throughout (-1) is never announced.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .barriers import mark_start
from .tiles import NUM_SLOTS, following_tile, make_queue, next_tile, push_tile, return_counter, tile_coordinates
from .wgmma_body import BUFFER_ROWS, advance, columns, run_tile

GROUP = gl.constexpr(128)  # rows that share an expert; m_indices[group * 128] names it


@gluon.jit
def _multiplier(
    ring, places, buffer, queue, y_ptr, m_indices_ptr, num_blocks,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    BODIES: gl.constexpr = (BLOCK_M,) if BLOCK_M == GROUP else (BLOCK_M, GROUP)
    NUM_N: gl.constexpr = N // BLOCK_N
    stage = 0
    phase = 0
    i = 0
    t, part = next_tile(queue, i, NUM_WARPS)
    while t < num_blocks * NUM_N:
        block, n_tile = tile_coordinates(t, num_blocks, NUM_N, GROUP_M)
        row0 = block * BLOCK_M + gl.maximum(part - 1, 0) * GROUP
        stage, phase = run_tile(
            ring, places, buffer, y_ptr, m_indices_ptr, row0, 0, n_tile * BLOCK_N, stage, phase, part,
            BODIES, len(BODIES) - 1, N, K, BLOCK_N, BLOCK_M * 128, STAGES, True, NUM_WARPS, DEQUANT,
        )  # fmt: skip
        i += 1
        t, part = next_tile(queue, i, NUM_WARPS)


@gluon.jit
def _copier(
    x_desc, codes_desc, scales_desc, ring, queue, m_indices_ptr, num_blocks, num_rows,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """One warp: hand out tiles or halves of them, copy x, codes and scales of every k64 stage.

    A tile is announced as part 0 (all of it), 1 or 2 (its first or second group alone).
    """
    x, codes, scales, barriers = ring
    NUM_N: gl.constexpr = N // BLOCK_N
    stage = 0
    phase = 1
    i = 0
    t = gl.program_id(0)
    while t < num_blocks * NUM_N:
        block, n_tile = tile_coordinates(t, num_blocks, NUM_N, GROUP_M)
        row0 = block * BLOCK_M
        first = gl.load(m_indices_ptr + row0)
        second = first
        if BLOCK_M > GROUP:
            second = gl.load(m_indices_ptr + row0 + GROUP, mask=row0 + GROUP < num_rows, other=-1)
        for half in range(gl.where(first == second, 1, 2)):
            expert = gl.where(half == 0, first, second)
            if expert >= 0:
                push_tile(queue, i, t, gl.where(first == second, 0, 1 + half))
                i += 1
                row = (expert * N + n_tile * BLOCK_N) // 64
                for k in range(K // 64):
                    mbarrier.wait(barriers.index(STAGES + stage), phase)
                    bar = barriers.index(stage)
                    mbarrier.expect(bar, BLOCK_N * (32 + 4) + BLOCK_M * 128)
                    # the whole box for one group too: the rows behind it are not read, past the end they are zero
                    tma.async_copy_global_to_shared(x_desc, [row0 + half * GROUP, k * 64], bar, x.index(stage))
                    tma.async_copy_global_to_shared(codes_desc, [row, k * 16, 0], bar, codes.index(stage))
                    tma.async_copy_global_to_shared(scales_desc, [row, k * 64], bar, scales.index(stage))
                    stage, phase = advance(stage, phase, STAGES)
        t = following_tile(queue, t, ORDER)
    push_tile(queue, i, t, 0)  # past the end: the multipliers stop
    if ORDER == "dynamic":
        return_counter(queue)


@gluon.jit(do_not_specialize=["num_rows", "x_offset", "barriers_offset"])
def wgmma_contiguous_kernel(
    x_desc,  # [num_rows, K] bf16, box [block_m, 64], 128-byte swizzle
    codes_desc,  # layout fragment64 as [E * N/64, K/64 * 16, 64] int16, box [block_n/64, 16, 64], 128-byte swizzle
    scales_desc,  # layout fragment64 as [E * N/64, K] int32, box [block_n/64, 64]
    y_ptr,  # [num_rows, N] bf16; padding rows are not written
    m_indices_ptr,  # [num_rows] int32: expert, -1 for padding
    counter_ptr,  # [2] int32 for tile_order dynamic, zero before and after
    num_rows,
    x_offset, barriers_offset,  # in shared memory: see barriers
    N: gl.constexpr, K: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    ORDER: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """Grid: (min(SMs * ctas_per_sm, tiles),), persistent, n fastest within group_m blocks. block_m is 128 or 256."""
    num_blocks = (num_rows + BLOCK_M - 1) // BLOCK_M
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, 64], SWIZZLED)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N // 64, 16, 64], gl.NVMMASharedLayout(128, 16, rank=3))
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N // 64, 64], gl.NVMMASharedLayout(0, 32, rank=2))
    buffer = gl.allocate_shared_memory(gl.bfloat16, [BUFFER_ROWS, columns(BLOCK_N, NUM_WARPS)], SWIZZLED)
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 2 * NUM_SLOTS, 1], mbarrier.MBarrierLayout())
    mark_start(x, BLOCK_M * 128)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(STAGES + i), count=NUM_WARPS * 32)  # every multiplying thread
    queue = make_queue(barriers, barriers_offset, counter_ptr, 2 * STAGES, NUM_WARPS * 32)
    fence_async_shared()
    ring = (x, codes, scales, barriers)
    places = (x_offset, barriers_offset, barriers_offset + STAGES * 8)
    gl.warp_specialize(
        [
            (_multiplier, (
                ring, places, buffer, queue, y_ptr, m_indices_ptr, num_blocks,
                N, K, BLOCK_M, BLOCK_N, STAGES, GROUP_M, NUM_WARPS, DEQUANT,
            )),
            (_copier, (
                x_desc, codes_desc, scales_desc, ring, queue, m_indices_ptr, num_blocks, num_rows,
                N, K, BLOCK_M, BLOCK_N, STAGES, GROUP_M, ORDER,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip

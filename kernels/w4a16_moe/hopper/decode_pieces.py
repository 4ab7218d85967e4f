"""Pieces that the two mma.sync schedules share: shared-memory ring, copies into it, multiplication out of it.

Operands are swapped: weights are the MMA's A (its 16 rows are output columns), tokens its B (8 columns), so a tile of
block_m tokens is block_m / 8 token slices, each with an accumulator ``[block_n, 8]``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime.jit import constexpr_function

from .compat import cta_barrier
from .epilogue import load_entries, stage_rows, write_rows
from .fragments import dequantise_half, load_fragment


@constexpr_function
def pow2(n):
    """The smallest power of two that is at least n: shapes in shared memory must be one."""
    return 1 << (n - 1).bit_length()


@constexpr_function
def accumulator_layout(num_warps):
    """``[block_n, 8]`` fp32: warps stacked along n, 16 rows each."""
    return gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])


@constexpr_function
def weight_operand(num_warps):
    """A operand: in each k16 step a thread owns kk 2t, 2t+1, 2t+8, 2t+9 of rows g and g + 8."""
    return gl.DotOperandLayout(0, accumulator_layout(num_warps), 2)


@constexpr_function
def token_operand(num_warps):
    """B operand: what ldmatrix gives."""
    return gl.DotOperandLayout(1, accumulator_layout(num_warps), 2)


@constexpr_function
def codes_copy_layout(block_n, num_warps):
    """``[k64 steps, n64 blocks, 1024]`` words, 16 bytes a thread, warps over n64 blocks first."""
    across = min(num_warps, block_n // 64)
    return gl.BlockedLayout([1, 1, 8], [1, 1, 32], [1, across, num_warps // across], [2, 1, 0])


@constexpr_function
def scales_copy_layout(block_k, block_n, num_warps):
    """``[k64 steps, n64 blocks, 64]`` scale words, 16 bytes a thread."""
    steps = min(num_warps, block_k // 64)
    return gl.BlockedLayout([1, 1, 4], [1, 2, 16], [steps, num_warps // steps, 1], [2, 1, 0])


@constexpr_function
def tokens_copy_layout(num_warps):
    """``[8 * k64 steps, 64]`` activations, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])


@gluon.jit
def allocate_ring(STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SLICES: gl.constexpr):
    """One allocation per stage and operand: the compiler then sees that stages do not alias, and needs one barrier a stage."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])  # of one k64 step: what index() gives
    TOKENS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    codes = ()
    scales = ()
    tokens = ()
    for _ in gl.static_range(STAGES):
        codes = codes + (gl.allocate_shared_memory(gl.int16, [BLOCK_K // 64, BLOCK_N // 64, 1024], FLAT),)
        scales = scales + (gl.allocate_shared_memory(gl.int32, [BLOCK_K // 64, BLOCK_N // 64, 64], FLAT),)
        slices = ()
        for _j in gl.static_range(SLICES):
            slices = slices + (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_K // 8, 64], TOKENS),)
        tokens = tokens + (slices,)
    return codes, scales, tokens


@gluon.jit
def tile_weights(codes_ptr, scales_ptr, expert, n_tile, N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr):
    """Where the codes and scales of a tile begin. 64-bit: a layer can have more than 2**31 codes."""
    block = expert.to(gl.int64) * (N // 64 * (K // 64)) + n_tile * (BLOCK_N // 64 * (K // 64))
    return codes_ptr + block * 1024, scales_ptr + block * 64


@gluon.jit
def copy_weights(
    codes, scales, weights, stage_k,
    K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Start the copy of k stage `stage_k` of a tile; weights: the pointers of `tile_weights`."""
    STEPS: gl.constexpr = BLOCK_K // 64
    BLOCKS: gl.constexpr = BLOCK_N // 64
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])  # of the whole stage: one copy
    offsets = _block_offsets(K // 64, STEPS, BLOCKS, 1024, codes_copy_layout(BLOCK_N, NUM_WARPS))
    whole = codes._reinterpret(gl.int16, [STEPS, BLOCKS, 1024], FLAT)
    async_copy.async_copy_global_to_shared(whole, weights[0] + stage_k * (STEPS * 1024) + offsets)
    scale_offsets = _block_offsets(K // 64, STEPS, BLOCKS, 64, scales_copy_layout(BLOCK_K, BLOCK_N, NUM_WARPS))
    whole_scales = scales._reinterpret(gl.int32, [STEPS, BLOCKS, 64], FLAT)
    async_copy.async_copy_global_to_shared(whole_scales, weights[1] + stage_k * (STEPS * 64) + scale_offsets)


@gluon.jit
def _block_offsets(
    K64: gl.constexpr, STEPS: gl.constexpr, BLOCKS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Element offsets ``[STEPS, BLOCKS, SIZE]`` of consecutive k64 steps of consecutive n64 blocks."""
    step = gl.arange(0, STEPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    row = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    steps = gl.expand_dims(gl.expand_dims(step, 1), 2) * SIZE
    rows = gl.expand_dims(gl.expand_dims(row, 0), 2) * (K64 * SIZE)
    return steps + rows + gl.expand_dims(gl.expand_dims(word, 0), 1)


@gluon.jit
def copy_tokens(
    tokens, x_ptr, rows, num_slices, stage_k,
    BLOCK_K: gl.constexpr, SLICES: gl.constexpr, NUM_WARPS: gl.constexpr,
):
    """Start the copy of k stage `stage_k` of x for the populated token slices; rows that are padding are filled with zero.

    rows: per slice (offset of the row in x; valid), both ``[8 * k64 steps]``.
    """
    LAYOUT: gl.constexpr = tokens_copy_layout(NUM_WARPS)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    for j in gl.static_range(SLICES):
        if j < num_slices:
            offsets, valid = rows[j]
            pointers = x_ptr + (gl.expand_dims(offsets + stage_k * BLOCK_K, 1) + gl.expand_dims(column, 0))
            mask = gl.broadcast(gl.expand_dims(valid, 1), pointers)[0]
            async_copy.async_copy_global_to_shared(tokens[j], pointers, mask=mask)


@gluon.jit
def token_rows(
    ids_ptr, routed_m, K: gl.constexpr, TOP_K: gl.constexpr,
    BLOCK_K: gl.constexpr, SLICES: gl.constexpr, WIDE: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Per token slice: where its 8 rows lie in x (repeated for each k64 step of a stage) and whether they are real."""
    ROWS: gl.constexpr = gl.SliceLayout(1, tokens_copy_layout(NUM_WARPS))
    row = gl.arange(0, BLOCK_K // 8, layout=ROWS)
    out = ()
    for j in gl.static_range(SLICES):
        ids = gl.load(ids_ptr + j * 8 + row % 8)
        valid = ids < routed_m
        source = gl.where(valid, ids // TOP_K, 0)
        if WIDE:  # x has 2**31 elements or more
            source = source.to(gl.int64)
        out = out + ((source * K + (row // 8) * 64, valid),)
    return out


@gluon.jit
def count_slices(ids_ptr, routed_m, SLICES: gl.constexpr):
    """Token slices that hold a row: rows stand first in a block, so the first id of a slice tells."""
    num = 0
    for j in gl.static_range(SLICES):
        num += (gl.load(ids_ptr + j * 8) < routed_m).to(gl.int32)
    return num


@gluon.jit
def zero_accumulators(BLOCK_N: gl.constexpr, SLICES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """One fp32 ``[block_n, 8]`` per token slice."""
    out = ()
    for _ in gl.static_range(SLICES):
        out = out + (gl.zeros([BLOCK_N, 8], gl.float32, layout=accumulator_layout(NUM_WARPS)),)
    return out


@gluon.jit
def _multiply_slice(weights, tokens, acc, STEP: gl.constexpr, HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    piece = tokens.slice(STEP * 8, 8, dim=0).slice(HALF * 32, 32, dim=1).permute((1, 0))
    return mma_v2(weights, piece.load(token_operand(NUM_WARPS)), acc)


@gluon.jit
def _multiply_counted(
    weights, tokens, acc, num_slices, FIRST: gl.constexpr, STEP: gl.constexpr, HALF: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Slices FIRST.. up to the count: a loop that leaves at the first empty slice, unrolled because accumulators are registers."""
    if FIRST < num_slices:
        acc = (
            acc[:FIRST]
            + (_multiply_slice(weights, tokens[FIRST], acc[FIRST], STEP, HALF, NUM_WARPS),)
            + acc[FIRST + 1 :]
        )
        if FIRST + 1 < len(acc):
            acc = _multiply_counted(weights, tokens, acc, num_slices, FIRST + 1, STEP, HALF, NUM_WARPS)
    return acc


@gluon.jit
def multiply_stage(
    acc, codes, scales, tokens, num_slices,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SLICING: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """acc[j] += weights of this stage x tokens of slice j, for every accumulator.

    SLICING static: every slice. semi_static: slice 0 always, each later one under its own predicate.
    dynamic: a count loop that leaves at the first empty slice.
    """
    OPERAND: gl.constexpr = weight_operand(NUM_WARPS)
    for step in gl.static_range(BLOCK_K // 64):
        words, pairs = load_fragment(codes.index(step), scales.index(step), BLOCK_N, OPERAND)
        for half in gl.static_range(2):
            weights = dequantise_half(words, pairs, half, BLOCK_N, OPERAND, DEQUANT)
            if SLICING == "dynamic":
                acc = _multiply_counted(weights, tokens, acc, num_slices, 0, step, half, NUM_WARPS)
            else:
                out = ()
                for j in gl.static_range(len(acc)):
                    acc_j = acc[j]
                    if SLICING == "static" or j == 0:
                        acc_j = _multiply_slice(weights, tokens[j], acc_j, step, half, NUM_WARPS)
                    else:
                        if j < num_slices:
                            acc_j = _multiply_slice(weights, tokens[j], acc_j, step, half, NUM_WARPS)
                    out = out + (acc_j,)
                acc = out
    return acc


@gluon.jit
def store_slices(
    acc, buffer, y_ptr, ids_ptr, routed_m, n0, N: gl.constexpr, BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr
):
    """All accumulators of a tile, through shared memory, to the rows of y."""
    SLICES: gl.constexpr = len(acc)
    entries = ()
    for j in gl.static_range(SLICES):
        entries = entries + (load_entries(ids_ptr, j * 8, BLOCK_N, 8, NUM_WARPS),)
        stage_rows(acc[j], buffer, j * 8, 8)
    cta_barrier()
    for j in gl.static_range(SLICES):
        rows = buffer.slice(j * 8, 8, dim=0)
        write_rows(rows, y_ptr, entries[j], 0, routed_m, n0, N, BLOCK_N, 8, False, NUM_WARPS)

"""What the multiplying warps do with a tile, shared by the wgmma schedules: one body for every number of tokens.

Weights are operand A in registers (the M side: 64 output columns a warpgroup and instruction), tokens operand B in shared
memory (the N side: any multiple of 8 of them).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .barriers import arrive_slot, wait_slot
from .compat import cta_barrier
from .decode_pieces import pow2
from .epilogue import load_entries, stage_rows, write_rows
from .fragments import dequantise_words, load_words
from .wgmma_ptx import UNIT, descriptor_of, finish, multiply, registers_layout, zero

BUFFER_ROWS = gl.constexpr(128)  # rows on their way out at once


@gluon.constexpr_function
def columns(block_n, num_warps):
    """Output columns in flight at once: two m64 pieces a warpgroup. A wider tile takes them in turn, over the same tokens."""
    return min(block_n, 32 * num_warps)


@gluon.constexpr_function
def bodies_of(block_m, block_n, num_warps, slicing):
    """The bodies that a tile can run, by the tokens that they multiply, largest first: steps of 8 tokens, or of more.

    How many is a limit of the compiler: with more bodies than it can hold registers for ptxas serialises every wgmma
    (C7512). These compile for every legal tile under Triton 3.6 to 3.8.
    """
    accumulators = block_m * block_n // (32 * num_warps)
    wide = block_n > columns(block_n, num_warps)
    more = 0 if slicing == "static" else 3 if accumulators <= 96 or (accumulators <= 112 and not wide) else 2
    step = 8 if block_m <= 64 else 16 if block_m <= 112 else 32 if block_m <= 192 else 64
    if more == 1:
        step *= 2
    return tuple(block_m - i * step for i in range(more + 1) if i * step < block_m)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """Next slot of the ring; the phase bit turns over with it."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _weights(ring, slot, PART: gl.constexpr, BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Words and scale words of one part of a stage's columns."""
    _x, codes, scales, _barriers = ring
    COLUMNS: gl.constexpr = columns(BLOCK_N, NUM_WARPS)
    return load_words(
        codes.index(slot), scales.index(slot), BLOCK_N // COLUMNS, PART, COLUMNS, registers_layout(NUM_WARPS)
    )


@gluon.jit
def _start(sums, weights, tokens, PART: gl.constexpr, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Start a k32 half of one part; return when the half before it is done: its A registers may be overwritten."""
    part = multiply(sums[PART], weights, tokens, TOKENS, COLUMNS, NUM_WARPS)
    return sums[:PART] + (finish(part, 1, TOKENS, COLUMNS, NUM_WARPS),) + sums[PART + 1 :]


@gluon.jit
def _stage(
    ring, places, sums, words, pairs, low, slot, previous, release, ROW_BYTES: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """Every half of one k64 stage, part by part. Its first, `low`, comes dequantised; its last is left in flight."""
    x_offset, _full_offset, empty_offset = places
    COLUMNS: gl.constexpr = columns(BLOCK_N, NUM_WARPS)
    tokens = descriptor_of(x_offset, slot * ROW_BYTES)
    for part in gl.static_range(BLOCK_N // COLUMNS):
        if part > 0:
            words, pairs = _weights(ring, slot, part, BLOCK_N, NUM_WARPS)
            low = dequantise_words(words, pairs, 0, DEQUANT)
        sums = _start(sums, low, tokens, part, TOKENS, COLUMNS, NUM_WARPS)
        if part == 0:
            arrive_slot(empty_offset, previous, release)  # nothing reads the stage before this one any more
        high = dequantise_words(words, pairs, 1, DEQUANT)
        sums = _start(sums, high, tokens + 4, part, TOKENS, COLUMNS, NUM_WARPS)
    return sums


@gluon.jit
def _accumulate(
    ring, places, stage, phase,
    K: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, ROW_BYTES: gl.constexpr, STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """The whole K of one tile: accumulators of each part of its columns.

    A k64 stage is two k32 halves (one scale group each) a part, with two sets of A registers: while one half multiplies,
    the next is dequantised. The loop is rotated, so that the half in flight over the back edge is not redefined at its
    top: ptxas would serialise the wgmmas otherwise.
    """
    _x_offset, full_offset, empty_offset = places
    COLUMNS: gl.constexpr = columns(BLOCK_N, NUM_WARPS)
    sums = ()
    for _ in gl.static_range(BLOCK_N // COLUMNS):
        sums = sums + (zero(TOKENS, COLUMNS, NUM_WARPS),)
    # not `previous = stage`: the loop would then lose that it carries two values (Triton 3.6)
    previous = gl.where(stage == 0, STAGES - 1, stage - 1)
    slot = wait_slot(full_offset, stage, phase)
    words, pairs = _weights(ring, slot, 0, BLOCK_N, NUM_WARPS)
    low = dequantise_words(words, pairs, 0, DEQUANT)
    for k in range(K // 64 - 1):
        release = (k > 0).to(gl.int32)
        sums = _stage(
            ring, places, sums, words, pairs, low, slot, previous, release, ROW_BYTES, TOKENS, BLOCK_N, NUM_WARPS, DEQUANT
        )
        previous = stage
        stage, phase = advance(stage, phase, STAGES)
        slot = wait_slot(full_offset, stage, phase)
        words, pairs = _weights(ring, slot, 0, BLOCK_N, NUM_WARPS)
        low = dequantise_words(words, pairs, 0, DEQUANT)
    release = 1 if K // 64 > 1 else 0
    sums = _stage(
        ring, places, sums, words, pairs, low, slot, previous, release, ROW_BYTES, TOKENS, BLOCK_N, NUM_WARPS, DEQUANT
    )
    done = ()
    for part in gl.static_range(BLOCK_N // COLUMNS):
        done = done + (finish(sums[part], 0, TOKENS, COLUMNS, NUM_WARPS),)
    arrive_slot(empty_offset, stage, 1)
    stage, phase = advance(stage, phase, STAGES)
    return done, stage, phase


@gluon.jit
def run_tile(
    ring, places, buffer, y_ptr, ids_ptr, row0, routed_m, n0, stage, phase, body, BODIES: gl.constexpr, LAST: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, ROW_BYTES: gl.constexpr, STAGES: gl.constexpr,
    CONTIGUOUS: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """Run body number `body`. LAST is the one that this level of the recursion looks at, the smallest first: the other
    way round ptxas runs out of registers."""
    if LAST == 0:
        return _run_body(
            ring, places, buffer, y_ptr, ids_ptr, row0, routed_m, n0, stage, phase, BODIES[LAST],
            N, K, BLOCK_N, ROW_BYTES, STAGES, CONTIGUOUS, NUM_WARPS, DEQUANT,
        )  # fmt: skip
    else:
        if body >= LAST:
            return _run_body(
                ring, places, buffer, y_ptr, ids_ptr, row0, routed_m, n0, stage, phase, BODIES[LAST],
                N, K, BLOCK_N, ROW_BYTES, STAGES, CONTIGUOUS, NUM_WARPS, DEQUANT,
            )  # fmt: skip
        else:
            return run_tile(
                ring, places, buffer, y_ptr, ids_ptr, row0, routed_m, n0, stage, phase, body, BODIES, LAST - 1,
                N, K, BLOCK_N, ROW_BYTES, STAGES, CONTIGUOUS, NUM_WARPS, DEQUANT,
            )  # fmt: skip


@gluon.jit
def _run_body(
    ring, places, buffer, y_ptr, ids_ptr, row0, routed_m, n0, stage, phase, TOKENS: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, ROW_BYTES: gl.constexpr, STAGES: gl.constexpr,
    CONTIGUOUS: gl.constexpr, NUM_WARPS: gl.constexpr, DEQUANT: gl.constexpr,
):  # fmt: skip
    """One tile: multiply, then out through the buffer, a part of the columns and of the tokens at a time."""
    COLUMNS: gl.constexpr = columns(BLOCK_N, NUM_WARPS)
    sums, stage, phase = _accumulate(ring, places, stage, phase, K, BLOCK_N, TOKENS, ROW_BYTES, STAGES, NUM_WARPS, DEQUANT)
    for part in gl.static_range(BLOCK_N // COLUMNS):
        for first in gl.static_range(0, TOKENS, BUFFER_ROWS):
            _store(
                sums[part], buffer, y_ptr, ids_ptr, row0, first, min(TOKENS - first, BUFFER_ROWS), routed_m,
                n0 + part * COLUMNS, N, COLUMNS, CONTIGUOUS, NUM_WARPS,
            )  # fmt: skip
    return stage, phase


@gluon.jit
def _together(sums, FIRST: gl.constexpr, COUNT: gl.constexpr, LAST: gl.constexpr, BLOCK_N: gl.constexpr):
    """COUNT accumulator tensors (a power of two) side by side as one, the last again past the end: nothing moves."""
    if COUNT == 1:
        return sums[min(FIRST, LAST)]
    else:
        low = _together(sums, FIRST, COUNT // 2, LAST, BLOCK_N)
        high = _together(sums, FIRST + COUNT // 2, COUNT // 2, LAST, BLOCK_N)
        return gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), (BLOCK_N, COUNT * UNIT))


@gluon.jit
def _store(
    sums, buffer, y_ptr, ids_ptr, row0, FIRST: gl.constexpr, NUM: gl.constexpr, routed_m, n0,
    N: gl.constexpr, BLOCK_N: gl.constexpr, CONTIGUOUS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """NUM tokens, through shared memory, to rows FIRST.. of the tile."""
    entries = load_entries(ids_ptr, row0 + FIRST, BLOCK_N, NUM, NUM_WARPS)  # early: they arrive behind the barriers
    cta_barrier()  # everyone has read what was in the buffer before
    # in one store, though of some rows twice: Triton 3.6 puts a barrier between two
    rows = _together(sums, FIRST // UNIT, pow2(NUM // UNIT), (FIRST + NUM) // UNIT - 1, BLOCK_N)
    # the same registers in wgmma's own order: joined, stmatrix would meet itself in the banks
    stage_rows(gl.convert_layout(rows, registers_layout(NUM_WARPS), assert_trivial=True), buffer, 0, pow2(NUM))
    cta_barrier()
    write_rows(buffer, y_ptr, entries, row0 + FIRST, routed_m, n0, N, BLOCK_N, NUM, CONTIGUOUS, NUM_WARPS)

"""From accumulators to rows of y."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

OUTPUT_SCALE = gl.constexpr(1048576.0)  # 2**20, see layout.fragment64


@gluon.jit
def stage_rows(acc, buffer, FIRST: gl.constexpr, NUM: gl.constexpr):
    """Accumulator ``[block_n, NUM]`` (operands swapped) -> rows FIRST.. of a shared ``[rows, block_n]`` bf16 buffer."""
    buffer.slice(FIRST, NUM, dim=0).store(gl.permute((acc * OUTPUT_SCALE).to(gl.bfloat16), (1, 0)))


@constexpr_function
def store_layout(block_n, num_warps):
    """``[rows, block_n]``, at most 256 wide, with 16 bytes a thread along n."""
    return gl.BlockedLayout([1, 8], [256 // block_n, block_n // 8], [num_warps, 1], [1, 0])


@constexpr_function
def chunk_rows(block_n, num, num_warps):
    """Rows that all warps write at once; at least 8, because a 128-byte swizzle pattern cannot be cut."""
    return min(num & -num, max(8, 256 // block_n * num_warps))


@gluon.jit
def load_entries(ids_ptr, row0, BLOCK_N: gl.constexpr, NUM: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Entries row0..row0+NUM of sorted_ids or m_indices, in chunks as `write_rows` needs them."""
    CHUNK: gl.constexpr = chunk_rows(BLOCK_N, NUM, NUM_WARPS)
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, store_layout(BLOCK_N, NUM_WARPS)))
    entries = ()
    for c in gl.static_range(NUM // CHUNK):
        entries = entries + (gl.load(ids_ptr + row0 + c * CHUNK + row),)
    return entries


@gluon.jit
def write_rows(
    buffer, y_ptr, entries, row0, routed_m, n0,
    N: gl.constexpr, BLOCK_N: gl.constexpr, NUM: gl.constexpr, CONTIGUOUS: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """The first NUM rows of the buffer -> columns n0.. of y; 16-byte stores along n.

    Indexed: an entry is the row of y, real if below routed_m. Contiguous: rows stay in their place, from row0 on, real if
    their entry names an expert.
    """
    STORE: gl.constexpr = store_layout(BLOCK_N, NUM_WARPS)
    CHUNK: gl.constexpr = chunk_rows(BLOCK_N, NUM, NUM_WARPS)
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, STORE))
    for c in gl.static_range(NUM // CHUNK):
        if CONTIGUOUS:
            target = (row0 + c * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, STORE))).to(gl.int64)
            real = entries[c] >= 0
        else:
            target = entries[c].to(gl.int64)
            real = entries[c] < routed_m
        values = buffer.slice(c * CHUNK, CHUNK, dim=0).load(STORE)
        pointers = y_ptr + gl.expand_dims(target * N, 1) + gl.expand_dims(n, 0)
        gl.store(pointers, values, mask=gl.expand_dims(real, 1))

"""wgmma for any multiple of 8 tokens, A in registers, as inline PTX.

Gluon's own wgmma takes shapes that are powers of two, so that 48 tokens cost as much as 64. Here everything that lives in
registers is a tensor ``[columns, 8]`` of 32-bit elements in one layout: the accumulator is a tuple of them, 8 tokens each,
and a k16 step of A is one of packed bf16 pairs. One inline instruction reads and writes all of them. As with Gluon's,
results may be touched after `finish` only.

The descriptor of x needs its address in shared memory: see `barriers`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

UNIT = gl.constexpr(8)  # tokens of one accumulator tensor
STEPS = 2  # k16 steps of one `multiply`: a half of k64, one scale group
# Descriptor, upper half: 1024 bytes between groups of 8 rows (in 16-byte units), 128-byte swizzle.
DESCRIPTOR_HIGH = 0x40000040


@gluon.constexpr_function
def registers_layout(num_warps):
    """``[columns, 8]``: warps stacked along the columns, 16 each; a thread holds rows g, g + 8 and columns 2t, 2t + 1.

    One accumulator tensor of wgmma as it is. A step of A fills its four registers (row g, row g + 8, both again for
    k + 8) in the order 0, 2, 1, 3: see `fragments.words_layout`.
    """
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 8, 16])


@gluon.constexpr_function
def width(tokens):
    """Tokens of one instruction: at most 128, a wider one needs more registers than a warpgroup has at its start."""
    return tokens if tokens <= 128 else tokens // 2


@gluon.constexpr_function
def _registers(columns, num_warps):
    """Of one tensor, in one thread: four for each m64 piece that a warpgroup holds."""
    return columns // (16 * num_warps) * 4


@gluon.constexpr_function
def _multiply_asm(tokens, columns, num_warps):
    """Fence, one wgmma for each m64 piece, k16 step of a k32 half and instruction's width, commit."""
    each = _registers(columns, num_warps)
    sums = tokens // 8 * each
    descriptor = 2 * sums + STEPS * each  # behind results, the operands tied to them, and A
    lines = [".reg .b64 d;", ".reg .b32 low;", ".reg .pred p;", "setp.eq.u32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
    for piece in range(0, each, 4):
        for step in range(STEPS):
            for first in range(0, tokens, width(tokens)):
                # 16-byte units: 2 a k16 step, 8 a row of 64 k
                lines.append(f"add.u32 low, ${descriptor}, {2 * step + 8 * first};")
                lines.append(f"mov.b64 d, {{low, {DESCRIPTOR_HIGH}}};")
                units = range(first // 8, (first + width(tokens)) // 8)
                accumulator = ", ".join(f"${unit * each + piece + i}" for unit in units for i in range(4))
                a = ", ".join(f"${2 * sums + step * each + piece + i}" for i in (0, 2, 1, 3))
                lines.append(
                    f"wgmma.mma_async.sync.aligned.m64n{width(tokens)}k16.f32.bf16.bf16 "
                    f"{{{accumulator}}}, {{{a}}}, d, p, 1, 1, 0;"
                )
    return "{\n" + "\n".join([*lines, "wgmma.commit_group.sync.aligned;"]) + "\n}"


@gluon.constexpr_function
def _finish_asm(pending):
    return f"wgmma.wait_group.sync.aligned {pending};"


@gluon.constexpr_function
def _constraints(tokens, columns, num_warps, inputs):
    """Accumulators are read and written in place; `inputs` more tensors of 32-bit words are read."""
    each = _registers(columns, num_warps)
    sums = tokens // 8 * each
    return ",".join(["=f"] * sums + [str(i) for i in range(sums)] + ["r"] * (inputs * each))


@gluon.constexpr_function
def _types(tokens):
    return (gl.float32,) * (tokens // 8)


@gluon.jit
def zero(TOKENS: gl.constexpr, COLUMNS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Accumulators of a tile: a tuple of ``[COLUMNS, 8]`` fp32."""
    sums = ()
    for _ in gl.static_range(TOKENS // UNIT):
        sums = sums + (gl.zeros([COLUMNS, UNIT], gl.float32, layout=registers_layout(NUM_WARPS)),)
    return sums


@gluon.jit
def multiply(sums, steps, descriptor, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Start the two k16 steps of A (a tuple of ``[COLUMNS, 8]`` int32, bf16 pairs) times the tokens at `descriptor`."""
    where = gl.full([COLUMNS, UNIT], descriptor, gl.int32, layout=registers_layout(NUM_WARPS))
    return gl.inline_asm_elementwise(
        _multiply_asm(TOKENS, COLUMNS, NUM_WARPS),
        _constraints(TOKENS, COLUMNS, NUM_WARPS, len(steps) + 1),
        sums + steps + (where,), dtype=_types(TOKENS), is_pure=False, pack=_registers(COLUMNS, NUM_WARPS),
    )  # fmt: skip


@gluon.jit
def finish(sums, PENDING: gl.constexpr, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Wait until at most PENDING `multiply` are under way."""
    return gl.inline_asm_elementwise(
        _finish_asm(PENDING), _constraints(TOKENS, COLUMNS, NUM_WARPS, 0),
        sums, dtype=_types(TOKENS), is_pure=False, pack=_registers(COLUMNS, NUM_WARPS),
    )  # fmt: skip


@gluon.jit
def descriptor_of(x_offset, offset):
    """Lower half of the descriptor of the tokens `offset` bytes behind the start of x."""
    return gl.inline_asm_elementwise("""{
.reg .b32 a;
mov.u32 a, global_smem;
add.u32 a, a, $1;
shr.u32 a, a, 4;
or.b32 $0, a, 0x00010000;
}""", "=r,r", [x_offset + offset], dtype=gl.int32, is_pure=True, pack=1)  # fmt: skip

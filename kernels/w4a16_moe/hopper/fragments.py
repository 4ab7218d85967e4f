"""Weights as the tensor cores want them: layouts of `fragment64` in shared memory, and dequantisation in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import SharedLinearLayout
from triton.runtime.jit import constexpr_function


@constexpr_function
def codes_layout(block_n, swizzled):
    """Shared memory of one k64 step, ``[block_n, 16]`` 16-bit words; offset bits from low to high.

    swizzled: as a tensor-map copy with 128-byte swizzle leaves it (16-byte chunk index ^= 128-byte row & 7).
    """
    word = [[0, 1], [8, 0], [0, 8]]  # 16 bytes of one thread: kk+1, row+8, kk+8
    chunk = [[0, 2], [0, 4], [1, 0]]  # 8 threads in a 128-byte row: t, low bit of g
    row = [[2, 0], [4, 0], [16, 0], [32, 0]]  # 16 such rows: rest of g, warp
    if swizzled:
        row = [[row[i][0] ^ chunk[i][0], row[i][1] ^ chunk[i][1]] if i < 3 else row[i] for i in range(4)]
    blocks = []
    n = 64
    while n < block_n:
        blocks.append([n, 0])
        n *= 2
    return SharedLinearLayout(word + chunk + row + blocks, [], 1024 if swizzled else 128)


@constexpr_function
def scales_layout(block_n):
    """Shared memory of one k64 step, ``[block_n]`` 32-bit words: rows g and g + 8 adjacent, so that a thread loads 8 bytes."""
    bits = [[8], [1], [2], [4], [16], [32]]
    n = 64
    while n < block_n:
        bits.append([n])
        n *= 2
    return SharedLinearLayout(bits, [], 128)


# The pair is split with mov, not prmt: the assembler then folds the duplication into the fma's operand.
# One scale word -> multiplier and addend of the fma, both as bf16 pairs. 0x8008 is -2**-130, 0x8080 is -2**-126:
# the addend is -8 * scale * 2**-20 whatever power of two the stored scale carries.
SCALE_LOW = gl.constexpr("""{
.reg .b32 c;
.reg .b16 lo, hi;
mov.b32 c, 0x80088008;
mov.b32 {lo, hi}, $2;
mov.b32 $0, {lo, lo};
mul.rn.bf16x2 $1, $0, c;
}""")
SCALE_HIGH = gl.constexpr("""{
.reg .b32 c;
.reg .b16 lo, hi;
mov.b32 c, 0x80808080;
mov.b32 {lo, hi}, $2;
mov.b32 $0, {hi, hi};
mul.rn.bf16x2 $1, $0, c;
}""")
# Two words (two kk of one row) -> the codes of 16-steps 0 and 1 (low) or 2 and 3 (high), dequantised.
SUBNORMAL_LOW = gl.constexpr("""{
.reg .b32 t, u;
and.b32 t, $2, 0x000f000f;
fma.rn.bf16x2 $0, t, $3, $5;
shr.u32 u, $2, 8;
and.b32 t, u, 0x000f000f;
fma.rn.bf16x2 $1, t, $3, $5;
}""")
SUBNORMAL_HIGH = gl.constexpr("""{
.reg .b32 t, u;
and.b32 t, $2, 0x00f000f0;
fma.rn.bf16x2 $0, t, $3, $5;
shr.u32 u, $2, 8;
and.b32 t, u, 0x00f000f0;
fma.rn.bf16x2 $1, t, $3, $5;
}""")
# The other way: code into the mantissa of 128 (0x4300), minus 136 (0x4308), times the scale. The multiplier is the
# scale * 2**-20, from the stored one by an exact multiplication with 2**-133 (0x0001) or 2**-129 (0x0010).
EXPONENT_SCALE_LOW = gl.constexpr("""{
.reg .b32 c, s;
.reg .b16 lo, hi;
mov.b32 c, 0x00010001;
mov.b32 {lo, hi}, $2;
mov.b32 s, {lo, lo};
mul.rn.bf16x2 $0, s, c;
mov.b32 $1, 0xc308c308;
}""")
EXPONENT_SCALE_HIGH = gl.constexpr("""{
.reg .b32 c, s;
.reg .b16 lo, hi;
mov.b32 c, 0x00100010;
mov.b32 {lo, hi}, $2;
mov.b32 s, {hi, hi};
mul.rn.bf16x2 $0, s, c;
mov.b32 $1, 0xc308c308;
}""")
EXPONENT_LOW = gl.constexpr("""{
.reg .b32 t, u, one;
mov.b32 one, 0x3f803f80;
lop3.b32 t, $2, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 t, t, one, $5;
mul.rn.bf16x2 $0, t, $3;
shr.u32 u, $2, 8;
lop3.b32 t, u, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 t, t, one, $5;
mul.rn.bf16x2 $1, t, $3;
}""")
EXPONENT_HIGH = gl.constexpr("""{
.reg .b32 t, u, one;
mov.b32 one, 0x3f803f80;
shr.u32 u, $2, 4;
lop3.b32 t, u, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 t, t, one, $5;
mul.rn.bf16x2 $0, t, $3;
shr.u32 u, $2, 12;
lop3.b32 t, u, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 t, t, one, $5;
mul.rn.bf16x2 $1, t, $3;
}""")


@gluon.jit
def load_fragment(codes, scales, BLOCK_N: gl.constexpr, SWIZZLED: gl.constexpr, OPERAND: gl.constexpr):
    """One k64 step from shared memory: words ``[block_n, 16]`` in the A-operand layout, scale words ``[block_n]``."""
    words = codes._reinterpret(gl.int16, [BLOCK_N, 16], codes_layout(BLOCK_N, SWIZZLED)).load(OPERAND)
    pairs = scales._reinterpret(gl.int32, [BLOCK_N], scales_layout(BLOCK_N)).load(gl.SliceLayout(1, OPERAND))
    return words, pairs


@gluon.jit
def dequantise_half(
    words, pairs, HALF: gl.constexpr, BLOCK_N: gl.constexpr, OPERAND: gl.constexpr, DEQUANT: gl.constexpr
):
    """One scale group of a k64 step -> ``[block_n, 32]`` bf16, the A operand as it is: no data moves between threads.

    The value is (code - 8) * scale * 2**-20, rounded once to bf16.
    """
    if DEQUANT == "subnormal":
        TO_SCALE: gl.constexpr = SCALE_LOW if HALF == 0 else SCALE_HIGH
        TO_VALUE: gl.constexpr = SUBNORMAL_LOW if HALF == 0 else SUBNORMAL_HIGH
    else:
        TO_SCALE: gl.constexpr = EXPONENT_SCALE_LOW if HALF == 0 else EXPONENT_SCALE_HIGH
        TO_VALUE: gl.constexpr = EXPONENT_LOW if HALF == 0 else EXPONENT_HIGH
    scale, bias = gl.inline_asm_elementwise(
        TO_SCALE, "=r,=r,r", [pairs], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    scale = gl.expand_dims(scale, 1)
    bias = gl.expand_dims(bias, 1)
    # is_pure=False keeps the instructions where they stand: between two asynchronous wgmmas
    first, second = gl.inline_asm_elementwise(
        TO_VALUE, "=r,=r,r,r,r,r,r", [words, scale, bias], dtype=(gl.bfloat16, gl.bfloat16), is_pure=False, pack=2
    )
    values = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (BLOCK_N, 32))
    return gl.convert_layout(values, OPERAND, assert_trivial=True)

"""Weights as the tensor cores want them: layouts of `fragment64` in shared memory, and dequantisation in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import SharedLinearLayout
from triton.runtime.jit import constexpr_function


@constexpr_function
def codes_layout(block_n):
    """mma.sync, shared memory of one k64 step, ``[block_n, 16]`` 16-bit words; offset bits from low to high."""
    word = [[0, 1], [8, 0], [0, 8]]  # 16 bytes of one thread: kk+1, row+8, kk+8
    chunk = [[0, 2], [0, 4], [1, 0]]  # 8 threads in a 128-byte row: t, low bit of g
    row = [[2, 0], [4, 0], [16, 0], [32, 0]]  # 16 such rows: rest of g, warp
    return SharedLinearLayout(word + chunk + row + _blocks(block_n), [], 128)


@constexpr_function
def words_layout(columns):
    """wgmma, shared memory of one k64 step as a tensor-map copy with 128-byte swizzle leaves it (16-byte chunk index ^=
    128-byte row & 7): ``[columns, 8]`` 32-bit words of two kk. The lowest bit of the second index says kk + 8."""
    word = [[8, 0], [0, 1]]  # 16 bytes of one thread: row+8, kk+8
    chunk = [[0, 2], [0, 4], [1, 0]]  # t, low bit of g
    row = [[2, 0], [4, 0], [16, 0], [32, 0]]  # rest of g, warp
    row = [[row[i][0] ^ chunk[i][0], row[i][1] ^ chunk[i][1]] if i < 3 else row[i] for i in range(4)]
    return SharedLinearLayout(word + chunk + row + _blocks(columns), [], 1024)


@constexpr_function
def _blocks(block_n):
    """The 64-column blocks of a step lie one behind the other."""
    blocks = []
    n = 64
    while n < block_n:
        blocks.append([n, 0])
        n *= 2
    return blocks


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


@constexpr_function
def values_asm(dequant, half, copies):
    """One 32-bit word (two kk of one row) -> its codes of the two k16 steps of a half as pairs of bf16.

    The first step lies in the low byte, the second in the high one; half 0 in bits 0-3, half 1 in bits 4-7. Scale and
    addend come `copies` times.
    """
    lines = [".reg .b32 t;"]
    word, scale, bias = "$2", "$3", f"${3 + copies}"
    if dequant == "exponent":
        lines += [".reg .b32 one;", "mov.b32 one, 0x3f803f80;"]
    for i in range(2):
        if dequant == "subnormal":
            lines += [
                f"shr.u32 t, {word}, 8;" if i else f"mov.b32 t, {word};",
                f"and.b32 t, t, {'0x00f000f0' if half else '0x000f000f'};",
                f"fma.rn.bf16x2 ${i}, t, {scale}, {bias};",
            ]
        else:
            lines += [
                f"shr.u32 t, {word}, {8 * i + 4 * half};",
                "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;",
                f"fma.rn.bf16x2 t, t, one, {bias};",
                f"mul.rn.bf16x2 ${i}, t, {scale};",
            ]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def _multiplier_and_addend(pairs, HALF: gl.constexpr, DEQUANT: gl.constexpr):
    """Of one scale group, ``[block_n, 1]`` pairs of bf16, from the scale words."""
    if DEQUANT == "subnormal":
        TO_SCALE: gl.constexpr = SCALE_LOW if HALF == 0 else SCALE_HIGH
    else:
        TO_SCALE: gl.constexpr = EXPONENT_SCALE_LOW if HALF == 0 else EXPONENT_SCALE_HIGH
    scale, bias = gl.inline_asm_elementwise(
        TO_SCALE, "=r,=r,r", [pairs], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.expand_dims(scale, 1), gl.expand_dims(bias, 1)


# Two ways to the tensor cores. Both give (code - 8) * scale * 2**-20, rounded once to bf16, and move no data between
# threads. is_pure=False keeps the instructions where they stand: between two asynchronous wgmmas.
@gluon.jit
def load_words(codes, scales, PARTS: gl.constexpr, PART: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """For wgmma: part PART of a k64 step in shared memory, words ``[COLUMNS, 8]`` int32 and scale words ``[COLUMNS]``."""
    words = codes._reinterpret(gl.int32, [PARTS, COLUMNS, 8], words_layout(COLUMNS)).index(PART)
    pairs = scales._reinterpret(gl.int32, [PARTS, COLUMNS], scales_layout(COLUMNS)).index(PART)
    return words.load(LAYOUT), pairs.load(gl.SliceLayout(1, LAYOUT))


@gluon.jit
def dequantise_words(words, pairs, HALF: gl.constexpr, DEQUANT: gl.constexpr):
    """For wgmma: one scale group of a k64 step -> its two k16 steps, ``[COLUMNS, 8]`` bf16 pairs in int32."""
    scale, bias = _multiplier_and_addend(pairs, HALF, DEQUANT)
    return gl.inline_asm_elementwise(
        values_asm(DEQUANT, HALF, 1), "=r,=r,r,r,r", [words, scale, bias],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_fragment(codes, scales, BLOCK_N: gl.constexpr, OPERAND: gl.constexpr):
    """For mma.sync: one k64 step from shared memory, words ``[block_n, 16]`` int16 as operand A, scale words ``[block_n]``."""
    words = codes._reinterpret(gl.int16, [BLOCK_N, 16], codes_layout(BLOCK_N)).load(OPERAND)
    pairs = scales._reinterpret(gl.int32, [BLOCK_N], scales_layout(BLOCK_N)).load(gl.SliceLayout(1, OPERAND))
    return words, pairs


@gluon.jit
def dequantise_half(
    words, pairs, HALF: gl.constexpr, BLOCK_N: gl.constexpr, OPERAND: gl.constexpr, DEQUANT: gl.constexpr
):
    """For mma.sync: one scale group of a k64 step -> ``[block_n, 32]`` bf16, operand A as it is."""
    scale, bias = _multiplier_and_addend(pairs, HALF, DEQUANT)
    first, second = gl.inline_asm_elementwise(
        values_asm(DEQUANT, HALF, 2), "=r,=r,r,r,r,r,r", [words, scale, bias],
        dtype=(gl.bfloat16, gl.bfloat16), is_pure=False, pack=2,
    )  # fmt: skip
    values = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (BLOCK_N, 32))
    return gl.convert_layout(values, OPERAND, assert_trivial=True)

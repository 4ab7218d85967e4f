"""Pieces of the portable kernel: a step's operands from what is stored, and a tile's way out."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)  # k per stored block
GROUP = tl.constexpr(32)  # k per scale, bytes per row of a block


@triton.jit
def offset(index, stride):
    """index * stride in 64 bits: rows times columns pass 2^31 at real sizes (448000 routed rows of 7168)."""
    return index.to(tl.int64) * stride


@triton.jit
def round_to_bf16(values, COMPUTE: tl.constexpr):
    """fp32 to the nearest bf16, ties to even; the interpreter's own conversion drops the low bits."""
    if COMPUTE == tl.float32:
        bits = values.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(tl.bfloat16)


@triton.jit
def nibbles_as_bf16(codes):
    """Bytes to (128 + low nibble, 128 + high nibble): a code in the low mantissa bits of 128, where one step is 1."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, exponent;
        and.b32 low, $4, 0x0f0f0f0f;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0f0f0f0f;
        mov.b32 exponent, 0x43434343;
        prmt.b32 $0, low, exponent, 0x5140;
        prmt.b32 $1, low, exponent, 0x7362;
        prmt.b32 $2, high, exponent, 0x5140;
        prmt.b32 $3, high, exponent, 0x7362;
        }""",
        "=r,=r,=r,=r,r",
        [codes],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def zero_point(scale):
    """scale * -8 * 2^-20, the factor by its bf16 bits: Triton makes the bf16 -7.99e-06 of the literal -2^-17."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 factor, none;
        mov.b32 factor, 0xb700b700;
        mov.b32 none, 0x80008000;
        fma.rn.bf16x2 $0, $1, factor, none;
        }""",
        "=r,r",
        [scale],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def subnormal_times_scale(codes, scale0, scale1):
    """Bytes to (low - 8) * scale0 * 2^-20 and (high - 8) * scale1 * 2^-20, each with one rounding.

    A byte alone in a bf16's low bits is a subnormal: code * 2^-133 for the low nibble, code * 2^-129 for the high one.
    One fma with the scale moved up by 2^113 (2^109) is then all it takes; the zero point is its third operand.
    """
    up0, up1 = scale0 * 1.0384593717069655e34, scale1 * 6.490371073168535e32  # 2^113, 2^109
    zero0, zero1 = zero_point(scale0), zero_point(scale1)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, none, a, b, c, d;
        mov.b32 none, 0;
        and.b32 low, $4, 0x0f0f0f0f;
        and.b32 high, $4, 0xf0f0f0f0;
        prmt.b32 a, low, none, 0x4140;
        prmt.b32 b, low, none, 0x4342;
        prmt.b32 c, high, none, 0x4140;
        prmt.b32 d, high, none, 0x4342;
        fma.rn.bf16x2 $0, a, $5, $9;
        fma.rn.bf16x2 $1, b, $6, $10;
        fma.rn.bf16x2 $2, c, $7, $11;
        fma.rn.bf16x2 $3, d, $8, $12;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
        [codes, up0[:, None], up1[:, None], zero0[:, None], zero1[:, None]],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def dequantize(codes, scale_words, DEQUANT: tl.constexpr, COMPUTE: tl.constexpr):
    """uint8 [block_n, 32] and int32 [block_n] to two tiles [block_n, 32], one per scale group, in stored order."""
    scale0 = (scale_words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    scale1 = (scale_words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if COMPUTE == tl.float32:
        low = ((codes & 15).to(tl.float32) - 8.0) * scale0.to(tl.float32)[:, None]
        high = ((codes >> 4).to(tl.float32) - 8.0) * scale1.to(tl.float32)[:, None]
        return round_to_bf16(low, COMPUTE).to(tl.float32), round_to_bf16(high, COMPUTE).to(tl.float32)
    elif DEQUANT == "subnormal":
        return subnormal_times_scale(codes, scale0, scale1)
    else:
        low, high = nibbles_as_bf16(codes)
        return (low - 136.0) * scale0[:, None], (high - 136.0) * scale1[:, None]


@triton.jit
def unpack_weights(codes, scale_words, DEQUANT: tl.constexpr, COMPUTE: tl.constexpr, REORDER_X: tl.constexpr):
    """One stored block as the MMA's operand [block_n, 64], k in true order, or in stored order when x is reordered."""
    BLOCK_N: tl.constexpr = codes.shape[0]
    low, high = dequantize(codes, scale_words, DEQUANT, COMPUTE)
    both = tl.permute(tl.join(low, high), (0, 2, 1))  # [block_n, group, 32]
    if not REORDER_X:
        both = tl.reshape(both, (BLOCK_N, 2, 4, 2, 2, 2))  # [n, group, t, h, q, b] -> [n, group, h, q, t, b]
        both = tl.permute(both, (0, 1, 3, 4, 2, 5))
    return tl.reshape(both, (BLOCK_N, BLOCK))


@triton.jit
def load_activations(x_ptrs, mask, COMPUTE: tl.constexpr, REORDER_X: tl.constexpr):
    """x [64, tokens], k in the order of `unpack_weights`."""
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(COMPUTE)
    if REORDER_X:
        TOKENS: tl.constexpr = x.shape[1]
        x = tl.reshape(x, (2, 2, 2, 4, 2, TOKENS))  # [group, h, q, t, b, token] -> [group, t, h, q, b, token]
        x = tl.reshape(tl.permute(x, (0, 3, 1, 2, 4, 5)), (BLOCK, TOKENS))
    return x


@triton.jit
def settle(acc):
    """acc, unchanged and at no cost, but read: Triton must wait for the warpgroup instructions that make it.

    It would else leave them running over the loop's back edge while the next step writes the registers that hold
    their weights: wrong sums, at times NaN (Triton issue 9433; neither 3.6 nor 3.8 with their own ptxas is free of it).
    """
    return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def fence(words, ALWAYS: tl.constexpr):
    """int32 words, unchanged, behind a fence: the tensor cores see shared memory by a way of their own, and what copies
    have left there must be shown to it.

    It stays where it is needed because the words are read after the copies' barrier and used before the product; with
    ALWAYS it stays although nothing uses them.
    """
    return tl.inline_asm_elementwise(
        """
        fence.proxy.async.shared::cta;
        mov.b32 $0, $4;
        mov.b32 $1, $5;
        mov.b32 $2, $6;
        mov.b32 $3, $7;
        """,
        "=r,=r,=r,=r,r,r,r,r",
        [words],
        dtype=tl.int32,
        is_pure=not ALWAYS,
        pack=4,
    )


@triton.jit
def store_tile(
    acc, out_ptr, ids, columns, routed_m, part, N: tl.constexpr, DEQUANT: tl.constexpr, COMPUTE: tl.constexpr
):
    """acc [tokens, block_n] to rows ``ids`` of out, or of one part of the fp32 partial sums."""
    if DEQUANT == "subnormal" and COMPUTE != tl.float32:
        acc = acc * 1048576.0  # 2^20: what `subnormal_times_scale` left out
    rows = offset(part, routed_m) + ids
    pointers = out_ptr + offset(rows, N)[:, None] + columns[None, :]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        acc = round_to_bf16(acc, COMPUTE)
    tl.store(pointers, acc, mask=(ids < routed_m)[:, None])

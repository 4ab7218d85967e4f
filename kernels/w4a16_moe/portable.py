"""Portable device schedule: plain Triton, any legal shape, Ampere to Blackwell.

One tile is ``block_m`` routed rows of one expert times ``block_n`` output columns. It walks K in steps of
``block_k``: a step's codes, scales and activations arrive by asynchronous copies ``num_stages`` deep, codes become
bf16 in registers, and the tensor cores sum in fp32. The layout (`layout.rows`) is such that a thread reads its share
of a row's codes at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .offline import CompileSpec
from .packed import PackedWeights
from .portable_rules import SLICE
from .problem import MoeProblem
from .routing import Routing
from .schedule import Schedule

# The interpreter multiplies bf16 bit patterns instead of values, and knows no PTX: it computes in fp32 and plain
# arithmetic.
INTERPRETED = triton.knobs.runtime.interpret
COMPUTE_DTYPE = tl.float32 if INTERPRETED else tl.bfloat16

# Fewest columns for which Triton picks a warpgroup's instruction over mma.sync: 16 up to 3.7, the hardware's 8 from
# 3.8 on.
MIN_WARPGROUP_TOKENS = 16 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8) else 8

BLOCK = tl.constexpr(64)  # k per stored block
GROUP = tl.constexpr(32)  # k per scale, bytes per row of a block


@triton.jit
def _offset(index, stride):
    """index * stride in 64 bits: rows times columns pass 2^31 at real sizes (448000 routed rows of 7168)."""
    return index.to(tl.int64) * stride


@triton.jit
def _round_to_bf16(values, COMPUTE: tl.constexpr):
    """fp32 to the nearest bf16, ties to even; the interpreter's own conversion drops the low bits."""
    if COMPUTE == tl.float32:
        bits = values.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(tl.bfloat16)


@triton.jit
def _nibbles_as_bf16(codes):
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
def _subnormal_times_scale(codes, scale0, scale1):
    """Bytes to (low - 8) * scale0 * 2^-20 and (high - 8) * scale1 * 2^-20, each with one rounding.

    A byte alone in a bf16's low bits is a subnormal: code * 2^-133 for the low nibble, code * 2^-129 for the high one.
    One fma with the scale moved up by 2^113 (2^109) is then all it takes; the zero point is its third operand.
    """
    up0, up1 = scale0 * 1.0384593717069655e34, scale1 * 6.490371073168535e32  # 2^113, 2^109
    zero0, zero1 = scale0 * -7.62939453125e-06, scale1 * -7.62939453125e-06  # -8 * 2^-20
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
def _dequantize(codes, scale_words, DEQUANT: tl.constexpr, COMPUTE: tl.constexpr):
    """uint8 [block_n, 32] and int32 [block_n] to two tiles [block_n, 32], one per scale group, in stored order."""
    scale0 = (scale_words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    scale1 = (scale_words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if COMPUTE == tl.float32:
        low = ((codes & 15).to(tl.float32) - 8.0) * scale0.to(tl.float32)[:, None]
        high = ((codes >> 4).to(tl.float32) - 8.0) * scale1.to(tl.float32)[:, None]
        return _round_to_bf16(low, COMPUTE).to(tl.float32), _round_to_bf16(high, COMPUTE).to(tl.float32)
    elif DEQUANT == "subnormal":
        return _subnormal_times_scale(codes, scale0, scale1)
    else:
        low, high = _nibbles_as_bf16(codes)
        return (low - 136.0) * scale0[:, None], (high - 136.0) * scale1[:, None]


@triton.jit
def _weights(codes, scale_words, DEQUANT: tl.constexpr, COMPUTE: tl.constexpr, REORDER_X: tl.constexpr):
    """One stored block as the MMA's operand [block_n, 64], k in true order, or in stored order when x is reordered."""
    BLOCK_N: tl.constexpr = codes.shape[0]
    low, high = _dequantize(codes, scale_words, DEQUANT, COMPUTE)
    both = tl.permute(tl.join(low, high), (0, 2, 1))  # [block_n, group, 32]
    if not REORDER_X:
        both = tl.reshape(both, (BLOCK_N, 2, 4, 2, 2, 2))  # [n, group, t, h, q, b] -> [n, group, h, q, t, b]
        both = tl.permute(both, (0, 1, 3, 4, 2, 5))
    return tl.reshape(both, (BLOCK_N, BLOCK))


@triton.jit
def _activations(x_ptrs, mask, COMPUTE: tl.constexpr, REORDER_X: tl.constexpr):
    """x [64, tokens], k in the order of `_weights`."""
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(COMPUTE)
    if REORDER_X:
        TOKENS: tl.constexpr = x.shape[1]
        x = tl.reshape(x, (2, 2, 2, 4, 2, TOKENS))  # [group, h, q, t, b, token] -> [group, t, h, q, b, token]
        x = tl.reshape(tl.permute(x, (0, 3, 1, 2, 4, 5)), (BLOCK, TOKENS))
    return x


@triton.jit
def _slices(x, NUM_SLICES: tl.constexpr):
    """x [64, tokens] cut into NUM_SLICES (1, 2, 4, 8) runs of tokens, in registers."""
    slices = (x,)
    for level in tl.static_range(3):
        if 1 << level < NUM_SLICES:
            halves = ()
            for i in tl.static_range(1 << level):
                half = tl.permute(tl.reshape(slices[i], (BLOCK, 2, slices[i].shape[1] // 2)), (0, 2, 1))
                halves = halves + tl.split(half)
            slices = halves
    return slices


@triton.jit
def _store_tile(
    acc, out_ptr, ids, columns, routed_m, part, N: tl.constexpr, DEQUANT: tl.constexpr, COMPUTE: tl.constexpr
):
    """acc [tokens, block_n] to rows ``ids`` of out, or of one part of the fp32 partial sums."""
    if DEQUANT == "subnormal" and COMPUTE != tl.float32:
        acc = acc * 1048576.0  # 2^20: what `_subnormal_times_scale` left out
    rows = _offset(part, routed_m) + ids
    pointers = out_ptr + _offset(rows, N)[:, None] + columns[None, :]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        acc = _round_to_bf16(acc, COMPUTE)
    tl.store(pointers, acc, mask=(ids < routed_m)[:, None])


@triton.jit
def _multiply_rows(
    x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr,
    expert, first_row, column0, num_rows, routed_m, part,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    TOKENS: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    SWAP_AB: tl.constexpr, DEQUANT: tl.constexpr, COMPUTE: tl.constexpr, REORDER_X: tl.constexpr,
):  # fmt: skip
    """TOKENS rows from ``first_row`` of sorted_ids times ``block_n`` columns, over one part of K.

    The rows are cut into NUM_SLICES: slice 0 is always multiplied, a later one only where ``num_rows`` rows reach it.
    """
    NUM_BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    STEPS: tl.constexpr = NUM_BLOCKS * BLOCK // BLOCK_K // SPLIT_K
    kk = tl.arange(0, BLOCK)
    columns = column0 + tl.arange(0, BLOCK_N)
    block0 = part * (STEPS * BLOCK_K // BLOCK)  # first stored block of this part
    stored_row = _offset(expert * NUM_BLOCKS + block0, N)
    codes_ptrs = codes_ptr + stored_row * GROUP + (columns[:, None] * GROUP + tl.arange(0, GROUP)[None, :])
    scale_ptrs = scales_ptr + stored_row + columns

    ids = tl.load(sorted_ids_ptr + first_row + tl.arange(0, TOKENS))
    x_rows = _offset(tl.where(ids < routed_m, ids // TOP_K, 0), K) + block0 * BLOCK
    accs = ()
    if SWAP_AB:
        x_ptrs = x_ptr + x_rows[None, :] + kk[:, None]
        valid = (ids < routed_m)[None, :]
        for _ in tl.static_range(NUM_SLICES):
            accs = accs + (tl.zeros((BLOCK_N, TOKENS // NUM_SLICES), tl.float32),)
    else:
        x_ptrs = x_ptr + x_rows[:, None] + kk[None, :]
        valid = (ids < routed_m)[:, None]
        accs = accs + (tl.zeros((TOKENS, BLOCK_N), tl.float32),)

    for step in range(STEPS):
        for j in tl.static_range(BLOCK_K // BLOCK):
            block = step * (BLOCK_K // BLOCK) + j
            codes = tl.load(codes_ptrs + _offset(block, N * GROUP))
            scale_words = tl.load(scale_ptrs + _offset(block, N))
            w = _weights(codes, scale_words, DEQUANT, COMPUTE, REORDER_X)
            mask = valid
            if NUM_BLOCKS * BLOCK != K:  # the last stored block is half empty: x ends 32 earlier
                k_left = K - (block0 + block) * BLOCK
                mask = mask & ((kk[:, None] if SWAP_AB else kk[None, :]) < k_left)
            x = _slices(_activations(x_ptrs + block * BLOCK, mask, COMPUTE, REORDER_X), NUM_SLICES)
            sums = ()
            for i in tl.static_range(NUM_SLICES):
                acc = accs[i]
                if i == 0:
                    acc = tl.dot(w, x[i], acc) if SWAP_AB else tl.dot(x[i], w.T, acc)
                else:
                    if num_rows > i * (TOKENS // NUM_SLICES):
                        acc = tl.dot(w, x[i], acc)
                sums = sums + (acc,)
            accs = sums

    for i in tl.static_range(NUM_SLICES):
        first_id = first_row + i * (TOKENS // NUM_SLICES)
        slice_ids = tl.load(sorted_ids_ptr + first_id + tl.arange(0, TOKENS // NUM_SLICES))
        acc = tl.trans(accs[i]) if SWAP_AB else accs[i]
        _store_tile(acc, out_ptr, slice_ids, columns, routed_m, part, N, DEQUANT, COMPUTE)


@triton.jit
def _multiply_tile(
    x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr, expert_ids_ptr, tile, num_m_blocks, routed_m,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
    SWAP_AB: tl.constexpr, TOKEN_SLICING: tl.constexpr, TOKEN_SLICE: tl.constexpr,
    DEQUANT: tl.constexpr, COMPUTE: tl.constexpr, REORDER_X: tl.constexpr,
):  # fmt: skip
    """One tile: where it lies, whose weights it takes, and how its rows are sliced."""
    part = tile % SPLIT_K
    block_m, block_n = _tile_coordinates(tile // SPLIT_K, num_m_blocks, N // BLOCK_N, GROUP_M)
    expert = tl.load(expert_ids_ptr + block_m)
    if expert >= 0:  # -1 is no expert: a block that the caller blanked
        first_row = block_m * BLOCK_M
        column0 = block_n * BLOCK_N
        if TOKEN_SLICING == "static":
            _multiply_rows(
                x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr,
                expert, first_row, column0, BLOCK_M, routed_m, part,
                N, K, TOP_K, BLOCK_M, 1, BLOCK_N, BLOCK_K, SPLIT_K, SWAP_AB, DEQUANT, COMPUTE, REORDER_X,
            )  # fmt: skip
        else:
            block_ids = tl.load(sorted_ids_ptr + first_row + tl.arange(0, BLOCK_M))
            num_rows = tl.sum((block_ids < routed_m).to(tl.int32), axis=0)
            if TOKEN_SLICING == "semi_static":
                _multiply_rows(
                    x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr,
                    expert, first_row, column0, num_rows, routed_m, part,
                    N, K, TOP_K, BLOCK_M, BLOCK_M // TOKEN_SLICE, BLOCK_N, BLOCK_K, SPLIT_K,
                    SWAP_AB, DEQUANT, COMPUTE, REORDER_X,
                )  # fmt: skip
            else:  # dynamic: as many passes over the weights as slices hold rows
                for done in range(0, num_rows, TOKEN_SLICE):
                    _multiply_rows(
                        x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr,
                        expert, first_row + done, column0, num_rows, routed_m, part,
                        N, K, TOP_K, TOKEN_SLICE, 1, BLOCK_N, BLOCK_K, SPLIT_K,
                        SWAP_AB, DEQUANT, COMPUTE, REORDER_X,
                    )  # fmt: skip


@triton.jit
def _tile_coordinates(tile, num_m_blocks, num_n_blocks, GROUP_M: tl.constexpr):
    """(block_m, block_n): n fastest, so that neighbours share rows of x; with GROUP_M > 1 also weights."""
    if GROUP_M == 1:
        block_m, block_n = tile // num_n_blocks, tile % num_n_blocks
    else:
        first = tile // (GROUP_M * num_n_blocks) * GROUP_M
        height = tl.minimum(num_m_blocks - first, GROUP_M)
        inside = tile % (GROUP_M * num_n_blocks)
        block_m, block_n = first + inside % height, inside // height
    return block_m, block_n


@triton.jit(do_not_specialize=["routed_m"])
def portable_kernel(
    x_ptr,  # [routed_m / top_k, K] bf16
    codes_ptr,  # [E, K/64, N, 32] uint8
    scales_ptr,  # [E, K/64, N] int32: two bf16
    out_ptr,  # [routed_m, N] bf16; SPLIT_K > 1: partial sums [SPLIT_K, routed_m, N] fp32
    sorted_ids_ptr,  # [num_tokens_padded] int32, padding holds routed_m
    expert_ids_ptr,  # [num_tokens_padded / BLOCK_M] int32
    num_tokens_padded_ptr,  # [1] int32
    routed_m,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
    PERSISTENT: tl.constexpr, SWAP_AB: tl.constexpr, TOKEN_SLICING: tl.constexpr, TOKEN_SLICE: tl.constexpr,
    DEQUANT: tl.constexpr, COMPUTE: tl.constexpr, REORDER_X: tl.constexpr,
):  # fmt: skip
    """y[row] = x[row // top_k] @ dequant(w[expert]).T for every routed row.

    Grid: one program per tile of the worst case, those past num_tokens_padded leave at once; PERSISTENT: a fixed grid
    that walks the tiles in use.
    """
    num_m_blocks = tl.load(num_tokens_padded_ptr) // BLOCK_M
    num_tiles = num_m_blocks * (N // BLOCK_N) * SPLIT_K
    if PERSISTENT:
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            _multiply_tile(
                x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr, expert_ids_ptr, tile, num_m_blocks, routed_m,
                N, K, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SPLIT_K,
                SWAP_AB, TOKEN_SLICING, TOKEN_SLICE, DEQUANT, COMPUTE, REORDER_X,
            )  # fmt: skip
    else:
        if tl.program_id(0) < num_tiles:
            _multiply_tile(
                x_ptr, codes_ptr, scales_ptr, out_ptr, sorted_ids_ptr, expert_ids_ptr, tl.program_id(0),
                num_m_blocks, routed_m,
                N, K, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SPLIT_K,
                SWAP_AB, TOKEN_SLICING, TOKEN_SLICE, DEQUANT, COMPUTE, REORDER_X,
            )  # fmt: skip


@triton.jit(do_not_specialize=["routed_m"])
def sum_parts_kernel(
    parts_ptr,  # [SPLIT_K, routed_m, N] fp32
    out_ptr,  # [routed_m, N] bf16
    sorted_ids_ptr,
    num_tokens_padded_ptr,
    routed_m,
    N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """out[row] = sum of the row's parts, always in the same order: repeated runs are bit-equal.

    Grid: (rows of sorted_ids, pieces of N).
    """
    if tl.program_id(0) < tl.load(num_tokens_padded_ptr):
        row = tl.load(sorted_ids_ptr + tl.program_id(0))
        if row < routed_m:
            columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = columns < N
            total = tl.zeros((BLOCK_N,), tl.float32)
            for part in tl.static_range(SPLIT_K):
                pointers = parts_ptr + _offset(_offset(part + 0 * row, routed_m) + row, N) + columns
                total += tl.load(pointers, mask=inside, other=0.0)
            tl.store(out_ptr + _offset(row, N) + columns, _round_to_bf16(total, COMPUTE), mask=inside)


def launch(
    x: torch.Tensor, packed: PackedWeights, routing: Routing, schedule: Schedule, out: torch.Tensor, top_k: int
) -> None:
    """Run a legal schedule. No check and no host synchronisation here: `gemm.indexed_gemm` checks."""
    problem = packed.problem
    num_tiles = routing.num_blocks_capacity * (problem.N // schedule.block_n) * schedule.split_k
    grid = num_tiles
    if schedule.persistent:
        grid = min(num_tiles, _num_sms(x.device) * schedule.ctas_per_sm)
    split = schedule.split_k > 1
    target = out
    if split:
        target = torch.empty((schedule.split_k, *out.shape), dtype=torch.float32, device=out.device)
    portable_kernel[(grid,)](
        x,
        packed.codes,
        packed.scales.view(torch.int32),
        target,
        routing.sorted_ids,
        routing.expert_ids,
        routing.num_tokens_padded,
        routing.routed_m,
        **constexprs(schedule, problem, top_k, _capability(x.device)),
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
    )
    if split:
        rows = routing.num_blocks_capacity * routing.block_m
        sum_parts_kernel[(rows, -(-problem.N // 1024))](
            target,
            out,
            routing.sorted_ids,
            routing.num_tokens_padded,
            routing.routed_m,
            N=problem.N,
            SPLIT_K=schedule.split_k,
            BLOCK_N=1024,
            COMPUTE=COMPUTE_DTYPE,
        )


def compile_spec(schedule: Schedule, problem: MoeProblem, top_k: int) -> CompileSpec:
    """What `offline` needs to compile the GEMM kernel of a schedule."""
    values = constexprs(schedule, problem, top_k)
    tensors = {
        "x_ptr": "*bf16",
        "codes_ptr": "*u8",
        "scales_ptr": "*i32",
        "out_ptr": "*fp32" if schedule.split_k > 1 else "*bf16",
        "sorted_ids_ptr": "*i32",
        "expert_ids_ptr": "*i32",
        "num_tokens_padded_ptr": "*i32",
    }
    return CompileSpec(
        fn=portable_kernel,
        signature={**tensors, "routed_m": "i32", **dict.fromkeys(values, "constexpr")},
        constexprs=values,
        options={"num_warps": schedule.num_warps, "num_stages": schedule.num_stages},
        divisible_by_16=tuple(tensors),
        by_capability=lambda capability: {"REORDER_X": reorders_x(schedule, capability)},
    )


def constexprs(schedule: Schedule, problem: MoeProblem, top_k: int, capability: int = 90) -> dict[str, Any]:
    """Compile-time arguments: the one place where a schedule's fields become the kernel's."""
    return {
        "N": problem.N,
        "K": problem.K,
        "TOP_K": top_k,
        "BLOCK_M": schedule.block_m,
        "BLOCK_N": schedule.block_n,
        "BLOCK_K": schedule.block_k,
        "GROUP_M": schedule.group_m,
        "SPLIT_K": schedule.split_k,
        "PERSISTENT": schedule.persistent,
        "SWAP_AB": schedule.swap_ab,
        "TOKEN_SLICING": schedule.token_slicing,
        "TOKEN_SLICE": SLICE,
        "DEQUANT": schedule.dequant,
        "COMPUTE": COMPUTE_DTYPE,
        "REORDER_X": reorders_x(schedule, capability),
    }


def reorders_x(schedule: Schedule, capability: int) -> bool:
    """Whether x is brought into the weights' stored order, rather than the weights into true order.

    Triton multiplies small tiles, and all tiles before Hopper, with mma.sync: its operands both come from registers,
    in any order of k, so stored order suits the weights. wgmma and tcgen05 read x from shared memory in true order. A
    wrong guess costs speed, never correctness.
    """
    if not schedule.swap_ab:
        return False
    tokens = schedule.block_m if schedule.token_slicing == "static" else SLICE
    small = tokens < MIN_WARPGROUP_TOKENS or schedule.num_warps % 4 != 0 or schedule.block_n < 64
    return small or capability // 10 not in (9, 10)


_sms: dict[torch.device, int] = {}


def _num_sms(device: torch.device) -> int:
    if device not in _sms:
        on_gpu = device.type == "cuda"
        _sms[device] = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
    return _sms[device]


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor

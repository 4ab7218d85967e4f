"""Waiting for and arriving on ring slots without a barrier of all threads.

Triton puts a bar.sync before every mbarrier.wait in a loop and into every mbarrier.arrive. In the multiplying warps that
ties the warpgroups together, one dequantising while the other could multiply: 5 to 15 % of a prefill GEMM. `wait_slot` and
`arrive_slot` are the same instructions on one barrier each, per thread, with the release and acquire that PTX gives them.

Inline assembly needs addresses in shared memory, of the barriers and (for wgmma's descriptors) of x. They are read off the
compiled kernel (`offsets_in`) and passed back as two arguments of the very same binary, so they cannot be out of step.
"""

from __future__ import annotations

import re
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def wait_slot(offset, stage, phase):
    """Wait on barrier `stage` of the ring at `offset`; returns `stage`: what is indexed with it cannot be read before."""
    return stage + gl.inline_asm_elementwise("""{
.reg .pred p;
.reg .b32 a;
mov.u32 a, global_smem;
add.u32 a, a, $1;
waitSlot:
mbarrier.try_wait.parity.shared::cta.b64 p, [a], $2;
@!p bra waitSlot;
mov.u32 $0, 0;
}""", "=r,r,r", [offset + stage * 8, phase], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def arrive_slot(offset, stage, pred):
    """This thread arrives on barrier `stage` of the ring at `offset` (if pred is not 0)."""
    gl.inline_asm_elementwise("""{
.reg .pred p;
.reg .b32 a;
setp.ne.s32 p, $2, 0;
mov.u32 a, global_smem;
add.u32 a, a, $1;
@p mbarrier.arrive.shared::cta.b64 _, [a];
mov.u32 $0, 0;
}""", "=r,r,r", [offset + stage * 8, pred], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


MARK = gl.constexpr(1021)  # a count that no ring's barrier has


@gluon.jit
def mark_start(ring, SLOT_BYTES: gl.constexpr):
    """Start and end a barrier at the first bytes of a ring, so that the compiled kernel tells where the ring lies."""
    place = ring.index(0)._reinterpret(gl.int64, [SLOT_BYTES // 8], mbarrier.MBarrierLayout()).slice(0, 1)
    mbarrier.init(place, count=MARK)
    mbarrier.invalidate(place)


def offsets_in(ptx: str, counts: list[int]) -> tuple[int, int]:
    """Byte offsets in shared memory of the ring of x and of the first barrier.

    The kernel initialises a mark, then barriers with these counts, one after the other in memory. Anything else in the
    compiled code raises RuntimeError.
    """
    inits = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\], (\d+);", ptx)
    offsets = [_offset(ptx, register) for register, _count in inits]
    if [int(count) for _register, count in inits] == [MARK.value, *counts]:
        x, first, *_others = offsets
        if x is not None and first is not None and offsets[1:] == [first + 8 * i for i in range(len(counts))]:
            return x, first
    raise RuntimeError(f"this Triton compiles mbarrier.init in an unexpected way: {inits[:3]}")


def _offset(ptx: str, register: str) -> int | None:
    """What was added to the start of shared memory; None if that cannot be told."""
    added = re.findall(rf"add\.[su]32\s+{register}, %r\d+, (\d+);", ptx)
    if not added and re.search(rf"mov\.[bu]32\s+{register}, global_smem;", ptx):
        return 0
    return int(added[0]) if len(added) == 1 else None


_known: dict[Any, tuple[int, int]] = {}


def offsets_of(key: Any, compile_kernel: Any, counts: list[int]) -> tuple[int, int]:
    """The offsets of the kernel that `compile_kernel()` returns, remembered by `key`."""
    if key not in _known:
        _known[key] = offsets_in(compile_kernel().asm["ptx"], counts)
    return _known[key]

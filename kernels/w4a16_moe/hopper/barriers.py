"""Waiting for and arriving on ring slots without a barrier of all threads.

Triton puts a bar.sync before every mbarrier.wait in a loop and into every mbarrier.arrive. In the multiplying warps that
ties the warpgroups together, one dequantising while the other could multiply: 5 to 15 % of a prefill GEMM. The two
functions here are the same instructions on one barrier each, per thread, with the release and acquire that PTX gives them.

Inline assembly needs the barrier's address. It is read off the compiled kernel (`slot_offsets`) and passed back as two
arguments of the very same binary, so it cannot be out of step with it.
"""

from __future__ import annotations

import re
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
@!p bra.uni waitSlot;
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


def slot_offsets(ptx: str, releasing_threads: int) -> tuple[int, int]:
    """Byte offsets in shared memory of the barriers full[0] and empty[0]: the first two that the kernel initialises.

    They are told apart by their counts: empty expects every multiplying thread. Anything unexpected raises RuntimeError.
    """
    inits = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\], (\d+);", ptx)[:2]
    offsets = []
    for register, _count in inits:
        found = re.findall(rf"add\.[su]32\s+{register}, %r\d+, (\d+);", ptx)
        if len(found) == 1:
            offsets.append(int(found[0]))
    if len(offsets) != 2 or int(inits[1][1]) != releasing_threads or int(inits[0][1]) == releasing_threads:
        raise RuntimeError(f"this Triton compiles mbarrier.init in an unexpected way: {inits}")
    return offsets[0], offsets[1]


_known: dict[Any, tuple[int, int]] = {}


def offsets_of(key: Any, compile_kernel: Any, releasing_threads: int) -> tuple[int, int]:
    """The offsets of the kernel that `compile_kernel()` returns, remembered by `key`."""
    if key not in _known:
        _known[key] = slot_offsets(compile_kernel().asm["ptx"], releasing_threads)
    return _known[key]

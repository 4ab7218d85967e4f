"""Which tile comes next. One warp decides, by stride or from a counter in device memory, and tells the other roles.

It also looks up which body a tile needs, well before the multiplying warps get there: three dependent loads less on
their way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .barriers import arrive_slot, wait_slot

NUM_SLOTS = gl.constexpr(4)  # tiles announced ahead; two would do, four spare a wait


@gluon.jit
def tile_coordinates(t, num_blocks, NUM_N: gl.constexpr, GROUP_M: gl.constexpr):
    """Tile number -> (block, n tile): n fastest; with group_m, that many blocks share a sweep over n."""
    if GROUP_M == 1:
        return t // NUM_N, t % NUM_N
    else:
        group = t // (GROUP_M * NUM_N)
        within = t % (GROUP_M * NUM_N)
        height = gl.maximum(gl.minimum(num_blocks - group * GROUP_M, GROUP_M), 1)  # also past the last tile
        return group * GROUP_M + within % height, within // height


@gluon.jit
def make_queue(barriers, barriers_offset, counter_ptr, FIRST: gl.constexpr, READERS: gl.constexpr):
    """Slots for tile numbers, and the counter of tile_order dynamic. READERS threads of other roles take every tile.

    Barriers FIRST .. FIRST + 2 * NUM_SLOTS - 1 are the queue's: a tile is ready, its slot is free.
    """
    slots = gl.allocate_shared_memory(gl.int32, [NUM_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(NUM_SLOTS):
        mbarrier.init(barriers.index(FIRST + i), count=32)  # every lane of the weight warp
    for i in gl.static_range(NUM_SLOTS):
        mbarrier.init(barriers.index(FIRST + NUM_SLOTS + i), count=READERS)
    ready = barriers_offset + FIRST * 8
    return slots, ready, ready + NUM_SLOTS * 8, counter_ptr


@gluon.jit
def push_tile(queue, i, t, body):
    """Weight warp: announce the i-th tile of this CTA and the body that it needs."""
    slots, ready, free, _counter = queue
    slot = wait_slot(free, i % NUM_SLOTS, ((i // NUM_SLOTS) & 1) ^ 1)
    slots.index(slot).store(gl.full([1], t * 8 + body, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    arrive_slot(ready, slot, 1)


@gluon.jit
def next_tile(queue, i, NUM_WARPS: gl.constexpr):
    """The i-th tile of this CTA and the body that it needs."""
    slots, ready, free, _counter = queue
    slot = wait_slot(ready, i % NUM_SLOTS, (i // NUM_SLOTS) & 1)
    entry = gl.max(slots.index(slot).load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0])), 0)
    arrive_slot(free, slot, 1)
    return entry // 8, entry % 8


@gluon.jit
def following_tile(queue, t, ORDER: gl.constexpr):
    """Weight warp: the tile after t."""
    if ORDER == "dynamic":
        return take_ticket(queue) + gl.num_programs(0)
    else:
        return t + gl.num_programs(0)


@gluon.jit
def take_ticket(queue):
    """The next tile number that no CTA has, by one atomic of the warp.

    Not gl.atomic_add: in Triton 3.6 its scalar result goes through shared memory that warp_specialize uses for the
    arguments of the roles.
    """
    return _warp_atomic_add(queue[3])


@gluon.jit
def _warp_atomic_add(ptr):
    return gl.inline_asm_elementwise("""{
.reg .pred p;
.reg .b32 lane, old;
mov.u32 lane, %laneid;
setp.eq.u32 p, lane, 0;
mov.u32 old, 0;
@p atom.global.relaxed.gpu.add.u32 old, [$1], 1;
shfl.sync.idx.b32 $0, old, 0, 31, 0xffffffff;
}""", "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def return_counter(queue):
    """The last CTA to finish puts the counter back to zero for the next launch."""
    counter = queue[3]
    finished = _warp_atomic_add(counter + 1)
    if finished == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)

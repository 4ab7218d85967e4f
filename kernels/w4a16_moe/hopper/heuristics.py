"""The Hopper schedule for a shape that no table knows: by tokens per expert, then the first tile that is legal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..block_m import BlockMModel
from ..devices import DEVICES, Device
from ..legality import why_illegal
from ..problem import MoeProblem
from ..profiles import Profile
from ..schedule import Schedule, TokenSlicing

# Turns found in data/nvidia_h200: between recorded points on both sides of them.
DECODE_TOKENS = 11  # tokens per expert up to which mma.sync leads or is level, as at 10; wide wgmma tiles lead at 12
LONG_DECODE_TOKENS = 18  # the same where K is short or wide tiles fill their last wave badly
SHORT_K = 2048  # one CTA more per SM hides a tile's start
MIDDLE_K, MIDDLE_K_TOKENS = range(1024, SHORT_K + 1), 22  # here mma.sync leads longer: at 22, with 32-token tiles
TWO_SLICES_TOKENS = 12  # with a short K two slices of 8 tokens beat three up to here, though some experts take two tiles
DEEP_TOKENS = 6  # in the middle range of K a deep ring leads from here on
WIDE_TOKENS = 48  # tiles of 512 columns, which read x half as often, hold 64 tokens at most: they lead at 43, not at 60
WIDE_WAVES = 0.8  # share of the SMs that they must keep busy on average, unless all of them run at once
# Sizes from so many tokens per expert on: one block an expert as long as that is possible, then two or more alike.
# At 171 two blocks of 96 lead under uniform routing; 112 and 128 lose less there than 96 does under skew.
TALL_SIZES = ((300, (128,)), (136, (112, 128)), (96, (128,)), (80, (112,)), (0, (80, 96)))
LONG_K, FEW_WAVES = 4096, 4  # fewer 128-wide tiles than so many an SM, each a long walk along K: narrower ones
DEEP_CTAS = 6  # narrow tiles with a ring of 8 stages that an SM holds; more tiles than that want the shallow ring


def default_schedule(
    problem: MoeProblem, routed_m: int, profile: Profile, device: Device | None, model: BlockMModel | None = None
) -> Schedule:
    """The first legal schedule in order of preference; ValueError in one line when nothing fits the shape."""
    device = device or DEVICES["nvidia_h200"]
    reason = None
    for schedule in _preferences(problem, routed_m, profile, model or BlockMModel(), device.num_sms):
        reason = why_illegal(schedule, problem, profile, device)
        if reason is None or reason.rule == "device of profile":
            return schedule
    raise ValueError(
        f"no schedule of profile {profile.name} fits N={problem.N} K={problem.K} (last reason: {reason}); "
        "profile portable takes any shape"
    )


def _preferences(
    problem: MoeProblem, routed_m: int, profile: Profile, model: BlockMModel, num_sms: int
) -> Iterator[Schedule]:
    tok_e = routed_m / problem.num_experts
    wide = _wide_tiles_pay(problem, num_sms)
    few = tok_e <= (DECODE_TOKENS if wide and problem.K > SHORT_K else LONG_DECODE_TOKENS)
    if profile.interface == "grouped_contiguous":
        yield from _wgmma(256 if tok_e >= 256 else 128, "static")
        yield from _wgmma(128, "static")
        return
    if few:
        block_m = model.choose(problem.num_experts, routed_m, (8, 16, 24, 32))
        if profile.interface == "indexed":
            if problem.K < MIDDLE_K.start and tok_e <= TWO_SLICES_TOKENS:
                yield _tile(min(block_m, 16), 256, 128, 2, 3)
            elif problem.K in MIDDLE_K and DEEP_TOKENS < tok_e <= TWO_SLICES_TOKENS:
                yield _tile(16, 128, 64, 8, 4)
            if block_m <= 16:
                yield from _short_tiles(block_m, problem, routed_m, num_sms)
        yield from _mma_sync(block_m, profile)
    if tok_e <= MIDDLE_K_TOKENS and problem.K in MIDDLE_K and profile.interface == "indexed":
        yield _tile(32, 256, 128, 2, 3)
    if tok_e <= WIDE_TOKENS:
        sizes = (16, 24, 32, 40, 48, 56, 64) if wide else (32, 64)
        block_m = model.choose(problem.num_experts, routed_m, sizes)
        if block_m <= 32 and problem.K in MIDDLE_K:  # two CTAs hide each other's start
            yield from _wgmma_tiles(block_m, (256,), "static", 2)
        yield from _wgmma_tiles(block_m, (512, 256) if wide else (256,), "branched", 1)
    else:
        sizes = next(sizes for least, sizes in TALL_SIZES if tok_e >= least)
        yield from _wgmma(model.choose(problem.num_experts, routed_m, sizes))
    yield from _wgmma(64)
    if not few:
        yield from _mma_sync(32, profile)


def _wide_tiles_pay(problem: MoeProblem, num_sms: int) -> bool:
    """One block an expert: all tiles of 512 columns at once, or whole waves of them."""
    waves = problem.num_experts * problem.N / 512 / num_sms
    return waves <= 1 or waves / math.ceil(waves) >= WIDE_WAVES


def _short_tiles(block_m: int, problem: MoeProblem, routed_m: int, num_sms: int) -> Iterator[Schedule]:
    """Up to 16 tokens: many small CTAs per SM keep more loads in flight than few large ones."""
    tiles = min(problem.num_experts, routed_m) * problem.N // 128
    if problem.K >= LONG_K and tiles < FEW_WAVES * num_sms:
        if 2 * tiles < num_sms:  # not a wave even of narrow tiles: each is shared along K
            yield replace(_tile(8, 64, 64, 8, 4), stream_k=True, persistent=True)
        if 2 * tiles <= DEEP_CTAS * num_sms:
            yield _tile(16, 64, 64, 8, 4)
        yield _tile(block_m, 64, 64, 4, 4)
    active = problem.num_experts * (1 - (1 - 1 / problem.num_experts) ** routed_m)  # under uniform routing
    ctas_per_sm = 7 if problem.K <= SHORT_K else 6
    waves = active * problem.N / 128 / (ctas_per_sm * num_sms)
    if problem.K >= LONG_K and 1 < waves < 1.5:  # a second wave, hardly begun: smaller tiles fill it
        yield _tile(block_m, 64, 64, 4, 4)
    yield _tile(block_m, 128, 128, 2, ctas_per_sm)


def _tile(block_m: int, block_n: int, block_k: int, num_stages: int, ctas_per_sm: int) -> Schedule:
    return Schedule(
        kernel="mma_sync", block_m=block_m, block_n=block_n, block_k=block_k, num_warps=4, num_stages=num_stages,
        ctas_per_sm=ctas_per_sm, swap_ab=True, token_slicing="branched",
    )  # fmt: skip


def _mma_sync(block_m: int, profile: Profile) -> Iterator[Schedule]:
    """masked rows: the grid must not depend on the capacity, so the persistent form."""
    stream_k = profile.interface == "grouped_masked"
    rounds = [(128, 2), (64, 4)] if block_m <= 16 else [(64, 4), (128, 2)]
    rounds += [(64, stages) for stages in (2, 3, 6, 8, 5, 7, 9, 10, *range(11, 17))]
    for block_n in (256, 128, 64):
        for block_k, num_stages in rounds:
            for ctas_per_sm in (3, 2, 1) if block_m <= 16 or stream_k else (2, 3, 1):
                yield Schedule(
                    kernel="mma_sync", block_m=block_m, block_n=block_n, block_k=block_k, num_warps=4,
                    num_stages=num_stages, ctas_per_sm=ctas_per_sm, swap_ab=True, stream_k=stream_k,
                    persistent=stream_k, token_slicing="branched",
                )  # fmt: skip


def _wgmma(block_m: int, token_slicing: TokenSlicing = "branched") -> Iterator[Schedule]:
    """block_n 256 halves the traffic of x; block_m above 128 needs the registers and takes 128."""
    yield from _wgmma_tiles(block_m, (128,) if block_m > 128 else (256, 128), token_slicing, 1)


def _wgmma_tiles(
    block_m: int, widths: tuple[int, ...], token_slicing: TokenSlicing, ctas_per_sm: int
) -> Iterator[Schedule]:
    for block_n in widths:
        for num_stages in (6, 5, 4, 3):
            yield Schedule(
                kernel="wgmma", block_m=block_m, block_n=block_n, block_k=64, num_warps=8, num_stages=num_stages,
                ctas_per_sm=ctas_per_sm, swap_ab=True, persistent=True, tile_order="dynamic",
                token_slicing=token_slicing,
            )  # fmt: skip

"""The candidates of a point: knob grids by kernel, and the rule that refuses each one that may not run."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from w4a16_moe.devices import DEVICES, Device
from w4a16_moe.legality import why_illegal
from w4a16_moe.profiles import Profile, get_profile
from w4a16_moe.resolve import HEURISTICS
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.records.attempt import Point

Grid = Mapping[str, Sequence[Any]]

SPACES = ("focus", "record", "full")
# Rules of the plan itself; legality has its own.
FITS_LOAD = "block_m fits the load"
FITS_SHAPE = "tile fits the shape"
SHORT_RING = 256  # k elements in flight: less starves a long K, and is for K that has no more
LONG_K = 1024
NARROW_TILE = 64  # columns: more CTAs where N has few tiles, more copies of x elsewhere
WIDE_N = 1024
# Least block_m as a share of the mean rows of an expert: a smaller one reads weights more than eight times; wgmma more
# than four times; mma.sync, which has no tensor rate to spare for it, more than twice.
SMALLEST_SHARE = {"mma_sync": 1 / 2, "wgmma": 1 / 4}
OTHER_SMALLEST_SHARE = 1 / 8
LARGEST_FACTOR = 2  # times the rows of the busiest expert, rounded up: a larger block_m only adds padding

# Grids of one kernel are swept one after the other; a schedule that two grids share is tried once.
_PORTABLE: tuple[Grid, ...] = (
    {
        "block_m": (8, 16, 32, 64, 128, 256),
        "block_n": (64, 128),
        "block_k": (64, 128),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
        "swap_ab": (True,),
    },
    {
        "block_m": (16, 32, 64),
        "block_n": (128,),
        "block_k": (128,),
        "num_warps": (4,),
        "num_stages": (3, 4),
        "swap_ab": (True,),
        "token_slicing": ("semi_static", "dynamic"),
    },
    {
        "block_m": (64, 128, 256),
        "block_n": (128, 256),
        "block_k": (64,),
        "num_warps": (8,),
        "num_stages": (3, 4),
        "swap_ab": (True, False),
        "group_m": (1, 8),
    },
)
_MMA_SYNC: tuple[Grid, ...] = (
    {
        "block_m": (8, 16, 24, 32),
        "block_n": (256,),
        "block_k": (128,),
        "num_warps": (4,),
        "num_stages": (2,),
        "ctas_per_sm": (3,),
        "swap_ab": (True,),
        "token_slicing": ("branched",),
    },
    {  # more CTAs per SM hide the start of a tile where K is short
        "block_m": (8, 16),
        "block_n": (128,),
        "block_k": (128,),
        "num_warps": (4,),
        "num_stages": (2,),
        "ctas_per_sm": (6, 7),
        "swap_ab": (True,),
        "token_slicing": ("branched",),
    },
    {
        "block_m": (24, 32),
        "block_n": (256,),
        "block_k": (64,),
        "num_warps": (4,),
        "num_stages": (4,),
        "ctas_per_sm": (2,),
        "swap_ab": (True,),
        "token_slicing": ("branched",),
    },
    {
        "block_m": (8, 16, 24),
        "block_n": (256,),
        "block_k": (128,),
        "num_warps": (4,),
        "num_stages": (2,),
        "ctas_per_sm": (3,),
        "swap_ab": (True,),
        "persistent": (True,),
        "stream_k": (True,),
        "token_slicing": ("branched",),
    },
    {  # what is done for empty slices
        "block_m": (16, 24, 32),
        "block_n": (256,),
        "block_k": (128,),
        "num_warps": (4,),
        "num_stages": (2,),
        "ctas_per_sm": (2,),
        "swap_ab": (True,),
        "token_slicing": ("static", "semi_static", "dynamic", "branched"),
    },
    {  # short K: TP8 down, K 256
        "block_m": (8, 16, 32),
        "block_n": (128, 256),
        "block_k": (64,),
        "num_warps": (4,),
        "num_stages": (2,),
        "ctas_per_sm": (3, 4),
        "swap_ab": (True,),
        "token_slicing": ("branched",),
    },
    {  # few tiles in all: a share of K for every CTA
        "block_m": (8,),
        "block_n": (64, 128),
        "block_k": (64,),
        "num_warps": (4,),
        "num_stages": (4, 8),
        "ctas_per_sm": (2, 4),
        "swap_ab": (True,),
        "persistent": (True,),
        "stream_k": (True,),
        "token_slicing": ("branched",),
    },
    {  # few columns: TP8 gate_up, N 512
        "block_m": (8, 16),
        "block_n": (64, 128),
        "block_k": (64,),
        "num_warps": (4,),
        "num_stages": (4, 8),
        "ctas_per_sm": (4,),
        "swap_ab": (True,),
        "token_slicing": ("branched",),
    },
)
_WGMMA_KNOBS: dict[str, Sequence[Any]] = {
    "block_k": (64,),
    "num_warps": (8,),
    "num_stages": (6,),
    "swap_ab": (True,),
    "persistent": (True,),
    "tile_order": ("dynamic",),
    "token_slicing": ("branched",),
}
_WGMMA: tuple[Grid, ...] = (
    {**_WGMMA_KNOBS, "block_m": (16, 24, 32, 40, 48, 56, 64), "block_n": (512,)},  # x is read half as often
    {**_WGMMA_KNOBS, "block_m": (64, 80, 96, 112, 128), "block_n": (256,)},
    {**_WGMMA_KNOBS, "block_m": (24, 56), "block_n": (512,), "token_slicing": ("static",)},
    {**_WGMMA_KNOBS, "block_m": (96, 128), "block_n": (256,), "token_slicing": ("static",)},
    {**_WGMMA_KNOBS, "block_m": (56,), "block_n": (512,), "tile_order": ("static",)},
    {**_WGMMA_KNOBS, "block_m": (128,), "block_n": (256,), "tile_order": ("static",)},
    {  # two CTAs per SM: each hides the other's latency
        **_WGMMA_KNOBS,
        "block_m": (16, 32),
        "block_n": (256,),
        "ctas_per_sm": (2,),
        "token_slicing": ("static",),
    },
    {  # weights dequantised once for more tokens
        **_WGMMA_KNOBS,
        "block_m": (192,),
        "block_n": (128,),
        "num_stages": (5,),
    },
    {  # contiguous rows
        **_WGMMA_KNOBS,
        "block_m": (128,),
        "block_n": (256,),
        "tile_order": ("static", "dynamic"),
        "token_slicing": ("static",),
    },
    {
        **_WGMMA_KNOBS,
        "block_m": (256,),
        "block_n": (128,),
        "num_stages": (5,),
        "group_m": (1, 4),
        "token_slicing": ("static",),
    },
)
_FULL: dict[str, Grid] = {
    "portable": {
        "block_m": (8, 16, 32, 64, 128, 256),
        "block_n": (64, 128, 256),
        "block_k": (64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5),
        "ctas_per_sm": (1, 2),
        "group_m": (1, 8),
        "swap_ab": (True, False),
        "split_k": (1, 2),
        "persistent": (False, True),
        "token_slicing": ("static", "semi_static", "dynamic"),
        "dequant": ("subnormal", "exponent"),
    },
    "mma_sync": {
        "block_m": (8, 16, 24, 32),
        "block_n": (64, 128, 256),
        "block_k": (64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 6, 8),
        "ctas_per_sm": (1, 2, 3, 4),
        "swap_ab": (True,),
        "persistent": (False, True),
        "stream_k": (False, True),
        "tile_order": ("static", "dynamic"),
        "token_slicing": ("static", "semi_static", "dynamic", "branched"),
        "dequant": ("subnormal", "exponent"),
    },
    "wgmma": {
        "block_m": (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256),
        "block_n": (128, 256, 512),
        "block_k": (64,),
        "num_warps": (8, 16),
        "num_stages": (3, 4, 5, 6, 7, 8),
        "ctas_per_sm": (1, 2, 3),
        "group_m": (1, 4, 8),
        "swap_ab": (True,),
        "persistent": (False, True),
        "tile_order": ("static", "dynamic"),
        "token_slicing": ("static", "semi_static", "dynamic", "branched"),
        "dequant": ("subnormal", "exponent"),
    },
}
# What is recorded for data/: of the portable kernel every block_m that fits, the other knobs a few at a time.
_RECORD: dict[str, tuple[Grid, ...]] = {
    "portable": (
        {
            "block_m": (8, 16, 32),
            "block_n": (128,),
            "block_k": (128,),
            "num_warps": (4,),
            "num_stages": (4,),
            "swap_ab": (True,),
        },
        {
            "block_m": (64, 128, 256),
            "block_n": (128,),
            "block_k": (64,),
            "num_warps": (8,),
            "num_stages": (4,),
            "swap_ab": (True,),
        },
        {
            "block_m": (64, 128),
            "block_n": (256,),
            "block_k": (64,),
            "num_warps": (8,),
            "num_stages": (3,),
            "swap_ab": (True,),
        },
    ),
    "mma_sync": _MMA_SYNC,
    "wgmma": _WGMMA,
}
_FOCUS: dict[str, tuple[Grid, ...]] = {"portable": _PORTABLE, "mma_sync": _MMA_SYNC, "wgmma": _WGMMA}


class Verdict(NamedTuple):
    """One schedule of the space at a point."""

    schedule: Schedule
    rule: str  # empty: it may run
    reason: str


def grids(kernel: str, space: str) -> tuple[Grid, ...]:
    """The knob grids of a kernel in a space."""
    if space not in SPACES:
        raise UserError(f"space {space!r} is unknown; legal: {', '.join(SPACES)}")
    return {"focus": _FOCUS, "record": _RECORD}[space][kernel] if space != "full" else (_FULL[kernel],)


def schedules(kernel: str, space: str) -> Iterator[Schedule]:
    """Every schedule of a kernel in a space, legal or not, each once."""
    seen = set()
    for grid in grids(kernel, space):
        for values in itertools.product(*grid.values()):
            schedule = Schedule(kernel=kernel, **dict(zip(grid, values, strict=True)))  # type: ignore[arg-type]
            if schedule not in seen:
                seen.add(schedule)
                yield schedule


def candidates(
    point: Point, device: Device, space: str = "focus", kernels: Sequence[str] | None = None
) -> Iterator[Verdict]:
    """Every schedule of the point's profile, with the rule and reason where it may not run."""
    profile = get_profile(point.profile)
    wanted = profile.kernels if kernels is None else tuple(k for k in kernels if k in profile.kernels)
    if not wanted:
        raise UserError(f"profile {profile.name} runs {', '.join(profile.kernels)}, none of {', '.join(kernels or ())}")
    for kernel in wanted:
        for schedule in schedules(kernel, space):
            yield judge(schedule, point, profile, device)


def judge(schedule: Schedule, point: Point, profile: Profile, device: Device) -> Verdict:
    """Whether a schedule may run at a point."""
    if reason := _misfit(schedule, point):
        return Verdict(schedule, FITS_LOAD, reason)
    if reason := _misshapen(schedule, point):
        return Verdict(schedule, FITS_SHAPE, reason)
    illegal = why_illegal(schedule, point.problem, profile, device)
    return Verdict(schedule, illegal.rule, illegal.reason) if illegal else Verdict(schedule, "", "")


def _misfit(schedule: Schedule, point: Point) -> str:
    block_m = schedule.block_m
    busiest = max(point.routing.tok_e, default=0)
    mean = point.routed_m / max(1, point.routing.active_experts)
    if block_m > 8 and block_m > LARGEST_FACTOR * max(8, busiest):
        return f"block_m {block_m} for at most {busiest} rows an expert: only padding"
    if block_m < mean * SMALLEST_SHARE.get(schedule.kernel, OTHER_SMALLEST_SHARE):
        return f"block_m {block_m} for {mean:.0f} rows an expert: weights would be read {mean / block_m:.0f} times"
    return ""


def _misshapen(schedule: Schedule, point: Point) -> str:
    problem = point.problem
    if schedule.kernel != "mma_sync":
        return ""
    if schedule.block_k * schedule.num_stages < SHORT_RING and problem.K > LONG_K:
        return f"a ring of {schedule.block_k * schedule.num_stages} k elements for K={problem.K}"
    if schedule.block_n <= NARROW_TILE and problem.N > WIDE_N:
        return f"block_n {schedule.block_n} for N={problem.N}"
    return ""


def default_schedule(point: Point, device: Device | None) -> Schedule:
    """What the package runs untuned: its heuristic, whatever tables are installed."""
    profile = get_profile(point.profile)
    try:
        module = importlib.import_module(HEURISTICS[profile.layout], "w4a16_moe")
    except ModuleNotFoundError as error:
        raise UserError(f"profile {profile.name}: this build of w4a16_moe has no heuristic ({error})") from None
    try:
        return module.default_schedule(point.problem, point.routed_m, profile, device)
    except ValueError as error:
        raise UserError(f"{point.label()}: {error}") from None


def device_named(slug: str) -> Device:
    """Limits of a device by slug; a UserError lists the known ones."""
    if slug not in DEVICES:
        raise UserError(f"device {slug!r} is unknown; known: {', '.join(DEVICES)}")
    return DEVICES[slug]

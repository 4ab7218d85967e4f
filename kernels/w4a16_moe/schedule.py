"""How it is computed: the knobs of a device schedule."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Kernel = Literal["portable", "mma_sync", "wgmma"]
TokenSlicing = Literal["static", "semi_static", "dynamic", "branched"]
TileOrder = Literal["static", "dynamic"]
Dequant = Literal["subnormal", "exponent"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One way to run a `MoeProblem`. Changing any field may change the speed, never the result beyond rounding.

    Which values are legal depends on kernel, profile, problem and device: `legality.why_illegal` says, before a launch.
    """

    kernel: Kernel  # device schedule: portable Triton, Hopper mma.sync (swapped operands), Hopper wgmma
    block_m: int  # routed rows (tokens) per tile; also the padding unit of the routing
    block_n: int  # output columns per tile
    block_k: int  # reduction length per pipeline stage
    num_warps: int  # warps that multiply; copy warps of a warp-specialised kernel come on top
    num_stages: int  # pipeline stages in shared memory
    ctas_per_sm: int = 1  # resident CTAs per SM that a persistent grid counts on
    group_m: int = 1  # token blocks that share a sweep over N before the next group starts (L2 reuse)
    swap_ab: bool = False  # weights on the MMA's M side, tokens on its N side
    split_k: int = 1  # CTAs that share one tile's K, summed in fp32
    stream_k: bool = False  # persistent CTAs take equal shares of (tile, K) space; cut tiles are summed in fp32
    persistent: bool = False  # a fixed grid walks the tiles; False: one CTA per tile
    tile_order: TileOrder = "static"  # persistent only: tiles by stride, or from a queue in device memory
    token_slicing: TokenSlicing = "static"  # what is done for 8-token slices of a tile that hold no row
    dequant: Dequant = "subnormal"  # code read as a bf16 subnormal and one fma, or 128+code minus 136 times scale

    def __post_init__(self) -> None:
        for name, choices in (
            ("kernel", Kernel),
            ("token_slicing", TokenSlicing),
            ("tile_order", TileOrder),
            ("dequant", Dequant),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}={getattr(self, name)!r}: legal are {', '.join(get_args(choices))}")
        for name in ("swap_ab", "stream_k", "persistent"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        for name in ("block_m", "block_n", "block_k", "num_warps", "num_stages", "ctas_per_sm", "group_m", "split_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, every field."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Schedule:
        """The inverse of `to_dict`; an unknown or a missing field is named."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown schedule field {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"schedule is incomplete: {error}") from None

    def label(self) -> str:
        """A short name that is unique among schedules, fit for tables: ``mma_sync 16x256x128 w4 s2 c3 stream_k``."""
        parts = [
            self.kernel,
            f"{self.block_m}x{self.block_n}x{self.block_k}",
            f"w{self.num_warps}",
            f"s{self.num_stages}",
        ]
        if self.ctas_per_sm > 1:
            parts.append(f"c{self.ctas_per_sm}")
        if self.group_m > 1:
            parts.append(f"g{self.group_m}")
        if self.split_k > 1:
            parts.append(f"k{self.split_k}")
        parts += [
            word
            for word, on in (("swap", self.swap_ab), ("stream_k", self.stream_k), ("persistent", self.persistent))
            if on
        ]
        if self.tile_order != "static":
            parts.append("queue")
        if self.token_slicing != "static":
            parts.append(self.token_slicing)
        if self.dequant != "subnormal":
            parts.append(self.dequant)
        return " ".join(parts)

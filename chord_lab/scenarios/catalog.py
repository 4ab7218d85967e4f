"""Scenarios: a model's MoE layer under a sharding in a phase, with the token counts at which it is looked at."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Literal

from w4a16_moe.problem import MoeProblem
from w4a16_moe.profiles import Interface, get_profile

from chord_lab.errors import UserError
from chord_lab.scenarios.models import MODELS, ModelShape
from chord_lab.scenarios.shards import PROJECTIONS, Projection, Shard, shard_problem

Phase = Literal["prefill", "decode"]
TokenUnit = Literal["tokens of a system-wide chunk", "tokens of the batch", "tokens per GPU", "tokens per expert"]
PHASES = ("prefill", "decode", "grouped_prefill", "grouped_decode")

# Rows of one expert's group in the contiguous interface, and of one expert's capacity in the masked one.
CONTIGUOUS_ALIGNMENT = 128
MASKED_CAPACITY = 128


@dataclass(frozen=True, kw_only=True)
class TokenPoint:
    """One place of a scenario's token sweep."""

    num_tokens: int  # counted as the scenario's `token_unit` says
    routed_m: int  # rows that reach one GPU
    drawn_tokens: int  # tokens of the routing draw: each has top_k local routes, drawn_tokens * top_k = routed_m
    published: bool  # stands in the published comparison; False: added to see the turn of block_m or token slicing

    def tokens_per_expert(self, num_experts: int) -> float:
        """Mean rows of a local expert: routed_m / num_experts."""
        return self.routed_m / num_experts


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is looked at, with no word about how it is computed."""

    model: ModelShape
    shard: Shard
    phase: Phase
    interface: Interface
    profile: str  # default profile of the weights
    token_unit: TokenUnit
    points: tuple[TokenPoint, ...]
    draw: str = "uniform"  # default routing draw
    capacity: int | None = None  # grouped_masked: rows laid out per expert, or multiples of it; never picks the tile
    title: str = field(default="", compare=False)  # overrides the name: a config file's scenario

    @property
    def name(self) -> str:
        """``kimi-k2/ep8/prefill``, ``kimi-k2/ep8/grouped_decode``."""
        grouped = "" if self.interface == "indexed" else "grouped_"
        return self.title or f"{self.model.name}/{self.shard.name}/{grouped}{self.phase}"

    def problem(self, projection: Projection) -> MoeProblem:
        """What one GPU computes of that projection."""
        return shard_problem(self.model, self.shard, projection)

    @property
    def problems(self) -> dict[Projection, MoeProblem]:
        """Both projections of the layer."""
        return {projection: self.problem(projection) for projection in PROJECTIONS}

    @property
    def top_k(self) -> int:
        """Local routes of one drawn token."""
        return self.problem("gate_up").top_k

    def point(self, num_tokens: int) -> TokenPoint:
        """The point of that token count, counted in this scenario's unit; it need not stand in the sweep."""
        for point in self.points:
            if point.num_tokens == num_tokens:
                return point
        routed_m = _routed_m(self.model, self.shard, self.token_unit, num_tokens)
        return _point(routed_m, self.top_k, num_tokens, published=False)

    def with_tokens(self, tokens: list[int]) -> Scenario:
        """The same scenario at other token counts."""
        return replace(self, points=tuple(self.point(t) for t in tokens))


def _routed_m(model: ModelShape, shard: Shard, unit: TokenUnit, num_tokens: int) -> int:
    """Rows that reach one GPU.

    A system-wide chunk sends T * top_k routes over ep GPUs; without EP every GPU sees all routes of the batch. Tokens
    per GPU (ep GPUs, each with its own batch) bring T * top_k rows to each, whatever ep is. Under uniform load.

    Raises:
        UserError: the rows are no whole number of drawn tokens, each with all its routes on this GPU.
    """
    if num_tokens < 0:
        raise UserError(f"tokens must be at least 0, not {num_tokens}")
    local = (model.num_experts + shard.num_redundant) // shard.ep
    routes = min(model.top_k, local)  # of one drawn token
    if unit == "tokens of a system-wide chunk":
        numerator, denominator = model.top_k, shard.ep
    else:
        numerator, denominator = (local if unit == "tokens per expert" else model.top_k), 1
    step = routes * denominator // gcd(numerator, routes * denominator)
    if num_tokens % step:
        raise UserError(
            f"{num_tokens} {unit} bring {num_tokens * numerator / denominator:g} rows to one GPU, no whole number of "
            f"tokens with {routes} routes; take a multiple of {step}"
        )
    return num_tokens * numerator // denominator


def _point(routed_m: int, top_k: int, num_tokens: int, *, published: bool) -> TokenPoint:
    return TokenPoint(num_tokens=num_tokens, routed_m=routed_m, drawn_tokens=routed_m // top_k, published=published)


def _sweep(
    model: ModelShape, shard: Shard, unit: TokenUnit, published: tuple[int, ...], added: tuple[int, ...] = ()
) -> tuple[TokenPoint, ...]:
    """Published token counts and added ones, ascending by routed_m."""
    top_k = shard_problem(model, shard, "gate_up").top_k
    points = {t: _point(_routed_m(model, shard, unit, t), top_k, t, published=False) for t in added}
    points |= {t: _point(_routed_m(model, shard, unit, t), top_k, t, published=True) for t in published}
    return tuple(sorted(points.values(), key=lambda p: p.routed_m))


def _tokens_for(model: ModelShape, shard: Shard, unit: TokenUnit, per_expert: tuple[int, ...]) -> tuple[int, ...]:
    """Token counts, in `unit`, that bring so many rows to each local expert on average."""
    local = (model.num_experts + shard.num_redundant) // shard.ep
    factor = shard.ep if unit == "tokens of a system-wide chunk" else 1
    return tuple(t * local * factor // model.top_k for t in per_expert)


# Rows per expert on both sides of 80, where published schedules change their way of choosing block_m.
TURN = (40, 60, 70, 80, 90, 100, 120, 160, 352)
# Rows per expert where a decode tile holds one, two or three 8-token slices.
SLICES = (4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24)
PUBLISHED_PREFILL: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
PUBLISHED_DECODE = (20, 30, 40, 50)
# Rows between decode and prefill, where neither family of kernels is known to lead.
BETWEEN_ROWS = (400, 512, 640, 768, 896, 1024)


def default_profile(model: ModelShape, shard: Shard, phase: Phase, interface: Interface) -> str:
    """The profile a scenario starts from: Hopper's where its kernels take the shape, else the portable one.

    The mma.sync kernel walks K in units of 256 and both Hopper layouts hold blocks of 64 output columns.
    """
    for projection in PROJECTIONS:
        problem = shard_problem(model, shard, projection)
        if problem.K % 256 or problem.N % 64:
            return "portable"
    if interface == "grouped_contiguous":
        return "h200_grouped_prefill"
    if interface == "grouped_masked":
        return "h200_grouped_decode"
    if shard.tp > 1:
        return "h200_tp8"
    return "h200_decode_ep8" if phase == "decode" else "h200_prefill_ep8"


def make_scenario(model: ModelShape, shard: Shard, phase: str, *, title: str = "", detailed: bool = False) -> Scenario:
    """A scenario of any model and shard; `detailed` adds the points around the turn of block_m and of token slicing.

    phase: ``prefill``, ``decode``, ``grouped_prefill`` or ``grouped_decode``.
    """
    if phase not in PHASES:
        raise UserError(f"phase {phase!r} is unknown; legal: {', '.join(PHASES)}")
    if phase.startswith("grouped_"):
        return _grouped(model, shard, phase, title)
    if phase == "prefill":
        unit: TokenUnit = "tokens of a system-wide chunk" if shard.ep > 1 else "tokens of the batch"
        published = PUBLISHED_PREFILL
        added = _tokens_for(model, shard, unit, TURN) if detailed else ()
    elif shard.ep > 1:
        unit = "tokens per GPU"
        published = PUBLISHED_DECODE
        added = ()
        if detailed:
            rows = tuple(r // model.top_k for r in BETWEEN_ROWS)
            added = tuple(sorted({*_tokens_for(model, shard, unit, SLICES), *rows}))
    else:
        unit = "tokens of the batch"
        published = (1, 8, 32)
        added = (2, 4, 16, 64, 128, 256, 512) if detailed else (64, 128)
    return Scenario(
        model=model,
        shard=shard,
        phase=phase,  # type: ignore[arg-type]
        interface="indexed",
        profile=default_profile(model, shard, phase, "indexed"),  # type: ignore[arg-type]
        token_unit=unit,
        points=_sweep(model, shard, unit, published, added),
        title=title,
    )


def _grouped(model: ModelShape, shard: Shard, phase: str, title: str) -> Scenario:
    """Published comparison of the grouped interfaces: under their own draw every expert gets equally many rows."""
    prefill = phase == "grouped_prefill"
    interface: Interface = "grouped_contiguous" if prefill else "grouped_masked"
    plain: Phase = "prefill" if prefill else "decode"
    published = (128, 256, 512) if prefill else (8, 16, 32, 64)
    profile = default_profile(model, shard, plain, interface)
    if get_profile(profile).interface != interface:
        raise UserError(
            f"{model.name}/{shard.name}: no kernel serves {interface} at this shape; legal: prefill, decode"
        )
    return Scenario(
        model=model,
        shard=shard,
        phase=plain,
        interface=interface,
        profile=profile,
        token_unit="tokens per expert",
        points=_sweep(model, shard, "tokens per expert", published),
        draw="balanced",
        capacity=None if prefill else MASKED_CAPACITY,
        title=title,
    )


# model -> shards and phases that are listed; any other shard and phase of a known model is made on demand.
_LISTED: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "kimi-k2": (
        ("ep8", PHASES),
        ("ep16", PHASES),
        ("ep32", PHASES),
        ("tp8", ("prefill", "decode")),
    ),
    "deepseek-v3": (("ep8", ("prefill", "decode")), ("tp8", ("prefill", "decode"))),
    "qwen3-235b": (("ep8", ("prefill", "decode")), ("tp4", ("prefill", "decode"))),
    "qwen3-30b": (("ep1", ("prefill", "decode")),),
    "glm-5": (("ep8", ("prefill", "decode")), ("tp8", ("prefill", "decode"))),
    "gpt-oss-120b": (("ep8", ("prefill", "decode")), ("tp2", ("prefill", "decode"))),
}


def scenario_names() -> list[str]:
    """Every listed scenario."""
    return [f"{m}/{s}/{p}" for m, shards in _LISTED.items() for s, phases in shards for p in phases]


def get_scenario(name: str) -> Scenario:
    """The scenario of that name: ``model/shard/phase``.

    Raises:
        UserError: unknown; the message names near matches.
    """
    parts = name.split("/")
    if len(parts) == 3 and parts[0] in MODELS and parts[2] in PHASES:
        model, shard = MODELS[parts[0]], Shard.parse(parts[1])
        if shard.name != parts[1]:
            raise UserError(
                f"scenario {name!r}: that shard is written {shard.name}: {parts[0]}/{shard.name}/{parts[2]}"
            )
        detailed = parts[0] == "kimi-k2" and parts[1] in ("ep8", "tp8")
        return make_scenario(model, shard, parts[2], detailed=detailed)
    near = difflib.get_close_matches(name, scenario_names(), n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "`chord-lab scenarios` lists them"
    raise UserError(f"unknown scenario {name!r}; {hint}")

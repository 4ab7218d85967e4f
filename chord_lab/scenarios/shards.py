"""How a layer's experts are spread over GPUs: whole experts (EP), slices of every expert (TP), or both."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from w4a16_moe.problem import MoeProblem

from chord_lab.errors import UserError
from chord_lab.scenarios.models import ModelShape

Projection = Literal["gate_up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate_up", "down")
GROUP_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Shard:
    """``ep`` GPUs share the experts, ``tp`` GPUs slice each expert's intermediate width."""

    ep: int = 1
    tp: int = 1
    num_redundant: int = 0  # physical copies beyond the logical experts, spread evenly: E physical = E + num_redundant

    @property
    def name(self) -> str:
        """``ep8``, ``tp8``, ``ep4tp2``, ``ep8r16`` (16 redundant experts), ``ep1`` for a single GPU."""
        text = "" if self.ep == 1 and self.tp > 1 else f"ep{self.ep}"
        if self.num_redundant:
            text += f"r{self.num_redundant}"
        return text + (f"tp{self.tp}" if self.tp > 1 else "")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The inverse of `name`."""
        match = re.fullmatch(r"(?:ep(\d+)(?:r(\d+))?)?(?:tp(\d+))?", text)
        if not text or match is None:
            raise UserError(f"shard {text!r} is not understood; legal: ep8, tp8, ep4tp2, ep8r16 (16 redundant experts)")
        ep, redundant, tp = (
            int(part) if part else default for part, default in zip(match.groups(), (1, 0, 1), strict=True)
        )
        if ep < 1 or tp < 1:
            raise UserError(f"shard {text!r}: ep and tp must be at least 1")
        return cls(ep=ep, tp=tp, num_redundant=redundant)


def divisors(value: int) -> list[int]:
    """Every whole divisor, ascending."""
    small = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return small + [value // d for d in reversed(small) if d * d != value]


def legal_tp(model: ModelShape, group_size: int = GROUP_SIZE) -> list[int]:
    """Tensor-parallel sizes that leave each GPU whole scale groups of down's K = intermediate / tp."""
    return divisors(model.intermediate // group_size) if model.intermediate % group_size == 0 else []


def legal_ep(model: ModelShape, num_redundant: int = 0) -> list[int]:
    """Expert-parallel sizes that give every GPU the same number of experts."""
    return divisors(model.num_experts + num_redundant)


def shard_problem(model: ModelShape, shard: Shard, projection: Projection, group_size: int = GROUP_SIZE) -> MoeProblem:
    """What one GPU computes of one projection.

    Raises:
        UserError: the shard does not divide the model; the message lists what does.
    """
    physical = model.num_experts + shard.num_redundant
    if physical % shard.ep:
        redundant = f" + {shard.num_redundant} redundant" if shard.num_redundant else ""
        legal = ", ".join(map(str, legal_ep(model, shard.num_redundant)))
        raise UserError(
            f"{model.name}: ep={shard.ep} does not divide {model.num_experts}{redundant} experts; legal ep: {legal}"
        )
    if shard.tp not in legal_tp(model, group_size):
        raise UserError(_why_tp_illegal(model, shard.tp, group_size))
    intermediate = model.intermediate // shard.tp
    num_experts = physical // shard.ep
    if projection == "gate_up":
        columns = intermediate * (2 if model.gated else 1)
        return MoeProblem(
            num_experts=num_experts,
            N=columns,
            K=model.hidden,
            group_size=group_size,
            top_k=min(model.top_k, num_experts),
        )
    if projection == "down":
        return MoeProblem(num_experts=num_experts, N=model.hidden, K=intermediate, group_size=group_size, top_k=1)
    raise UserError(f"projection {projection!r} is unknown; legal: {', '.join(PROJECTIONS)}")


def _why_tp_illegal(model: ModelShape, tp: int, group_size: int) -> str:
    groups, rest = divmod(model.intermediate, group_size)
    if rest:
        return (
            f"{model.name}: intermediate {model.intermediate} is not a multiple of group size {group_size}; "
            "no tensor-parallel size is legal"
        )
    width = f"{model.intermediate}/{tp}" if model.intermediate % tp else str(model.intermediate // tp)
    legal = ", ".join(map(str, legal_tp(model, group_size)))
    return (
        f"{model.name}: tp={tp} leaves {width} of intermediate {model.intermediate} on a GPU, not whole groups of "
        f"{group_size}; tp must divide {groups}: {legal}"
    )


class ShardRow(NamedTuple):
    """One line of "where do E and N come from?"."""

    shard: str
    num_experts: int  # E: local experts
    gate_up_N: int
    gate_up_K: int
    down_N: int
    down_K: int
    weight_mib: float  # codes and scales of one layer on one GPU, MiB
    table_key: str  # what vLLM calls this shape: E local experts, N = intermediate per rank


def shard_table(model: ModelShape, shards: tuple[str, ...] = ()) -> list[ShardRow]:
    """E, N and K of a model under each parallelism that divides it (ep and tp of 1, 2, 4, 8, 16, 32 when not named)."""
    sizes = (2, 4, 8, 16, 32)
    names = shards or ("ep1", *(f"ep{n}" for n in sizes), *(f"tp{n}" for n in sizes))
    rows = []
    for name in names:
        try:
            rows.append(_shard_row(model, Shard.parse(name)))
        except UserError:
            if shards:
                raise
    return rows


def _shard_row(model: ModelShape, shard: Shard) -> ShardRow:
    gate_up = shard_problem(model, shard, "gate_up")
    down = shard_problem(model, shard, "down")
    return ShardRow(
        shard=shard.name,
        num_experts=gate_up.num_experts,
        gate_up_N=gate_up.N,
        gate_up_K=gate_up.K,
        down_N=down.N,
        down_K=down.K,
        weight_mib=gate_up.num_experts * (gate_up.weight_bytes + down.weight_bytes) / 2**20,
        table_key=f"E={gate_up.num_experts},N={down.K}",
    )

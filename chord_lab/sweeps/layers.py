"""The layer as the sum of its two GEMMs, from the verdicts at its points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chord_lab.sweeps.winners import Winner


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Both GEMMs of an MoE layer at one point; routing, activation and communication are not in it."""

    scenario: str
    profile: str
    routed_m: int
    draw: str
    default_time_us: float
    time_us: float
    humming_us: float | None
    humming_best_us: float | None
    doubtful: bool = False  # a GEMM of it carries a flag: drift, throttled, ...


def layers(found: list[Winner]) -> list[Layer]:
    """gate_up + down where both have a result in the same scenario, profile and routing, in like environments."""
    pairs: dict[Any, dict[str, Winner]] = {}
    for winner in found:
        routing = (winner.routed_m, winner.draw, winner.seed)
        key = (winner.scenario, winner.profile, routing, winner.source == "predicted", winner.environment)
        pairs.setdefault(key, {})[winner.projection] = winner
    made = []
    for (scenario, profile, (routed_m, draw, _), *_), by_projection in pairs.items():
        both = [by_projection.get(name) for name in ("gate_up", "down")]
        if any(w is None or w.time_us is None or w.default_time_us is None for w in both):
            continue
        made.append(
            Layer(
                scenario=scenario,
                profile=profile,
                routed_m=routed_m,
                draw=draw,
                default_time_us=sum(w.default_time_us or 0.0 for w in both if w is not None),
                time_us=sum(w.time_us or 0.0 for w in both if w is not None),
                humming_us=_sum([w.humming_us for w in both if w is not None]),
                humming_best_us=_sum([w.humming_best_us for w in both if w is not None]),
                doubtful=any(w.flags for w in both if w is not None),
            )
        )
    return made


def _sum(times: list[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None

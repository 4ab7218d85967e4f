"""Points of a scenario: its token counts, each under each routing draw, for each projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from chord_lab.errors import UserError
from chord_lab.records.attempt import Point
from chord_lab.records.record import RoutingRef
from chord_lab.routing.draws import GENERATOR, draw_topk_ids
from chord_lab.scenarios import PROJECTIONS, Scenario, get_scenario


def routing_ref(draw: str, *, num_tokens: int, num_experts: int, top_k: int, seed: int) -> RoutingRef:
    """Draw a routing and keep what identifies it, its counts included."""
    ids = draw_topk_ids(draw, num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, seed=seed)
    tok_e = np.bincount(ids.reshape(-1), minlength=num_experts)
    return RoutingRef(
        draw=draw,
        generator=GENERATOR,
        seed=seed,
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        tok_e=tuple(int(count) for count in tok_e),
    )


def scenario_points(
    scenario: Scenario | str,
    *,
    tokens: str | Sequence[int] = "all",
    draws: Sequence[str] | None = None,
    seed: int = 0,
    projections: Sequence[str] = PROJECTIONS,
    profile: str | None = None,
) -> list[Point]:
    """Every point of a scenario, gate_up and down of one routing next to each other.

    tokens: ``all``, ``published``, or token counts in the scenario's unit. draws: the scenario's own when None.
    """
    scenario = get_scenario(scenario) if isinstance(scenario, str) else scenario
    unknown = [p for p in projections if p not in PROJECTIONS]
    if unknown:
        raise UserError(f"unknown projection {unknown[0]!r}; legal: {', '.join(PROJECTIONS)}")
    if not isinstance(tokens, str):
        scenario = scenario.with_tokens(list(tokens))
    elif tokens == "published":
        scenario = replace(scenario, points=tuple(p for p in scenario.points if p.published))
    elif tokens != "all":
        raise UserError(f"tokens {tokens!r}: legal are all, published, or token counts such as 20,40")
    points = []
    for token_point in scenario.points:
        for draw in draws or (scenario.draw,):
            routing = routing_ref(
                draw,
                num_tokens=token_point.drawn_tokens,
                num_experts=scenario.problem("gate_up").num_experts,
                top_k=scenario.top_k,
                seed=seed,
            )
            points += [
                Point(
                    scenario=scenario.name,
                    projection=projection,
                    problem=scenario.problem(projection),  # type: ignore[arg-type]
                    profile=profile or scenario.profile,
                    num_tokens=token_point.num_tokens,
                    routing=routing,
                    capacity=_capacity(scenario, routing),
                )
                for projection in projections
            ]
    return points


def _capacity(scenario: Scenario, routing: RoutingRef) -> int | None:
    """Rows laid out per expert: the scenario's, as many times over as the fullest expert of a skewed draw needs."""
    if scenario.capacity is None:
        return None
    return scenario.capacity * max(1, -(-max(routing.tok_e) // scenario.capacity))

"""Tables for a mix of traffic: token counts and routing draws by weight, not one uniform draw.

A traffic file is a small YAML:

    scenario: kimi-k2/ep8/decode
    points: {20: 5, 30: 3, 50: 1}        # tokens, in the scenario's unit: weight
    draws: {uniform: 0.7, "zipf:1.0": 0.3}

A schedule's cost at a token count is its time under each draw, weighted. Where none is proved to beat the default, the
default stays. Neighbouring token counts share a row where one schedule may stand at each: proved there, and at most the
margin dearer than the best that is. Of such schedules the one with the least weighted cost serves the row, so that
tables stay small and frequent counts decide.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.records.intervals import interval
from chord_lab.routing.draws import canonical_draw
from chord_lab.scenarios import get_scenario
from chord_lab.sweeps.winners import MARGIN, CandidateTime, Winner, candidate_times, winners

if TYPE_CHECKING:
    import pyarrow as pa


MOST_WEIGHT = 1e15  # beyond, weights no longer add up exactly


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a table is tuned for."""

    scenario: str
    points: Mapping[int, float]  # tokens -> share, summing to 1
    draws: Mapping[str, float]  # draw -> share, summing to 1

    def to_dict(self) -> dict[str, Any]:
        """For a table's header."""
        return {"points": {str(k): round(v, 6) for k, v in self.points.items()}, "draws": dict(self.draws)}

    def describe_draws(self) -> str:
        """``uniform 70 %, zipf:1.0 30 %``: what stands in the table's header."""
        return ", ".join(f"{draw} {share:.0%}" for draw, share in self.draws.items())


def read_traffic(path: pathlib.Path) -> Traffic:
    """Read and check a traffic file."""
    import yaml

    try:
        value = yaml.load(pathlib.Path(path).read_text(encoding="utf-8"), _loader())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())[:160]}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must be a mapping with scenario, points and draws")
    unknown = sorted(map(str, set(value) - {"scenario", "points", "draws"}))
    if unknown:
        raise UserError(f"{path}: unknown key {unknown[0]!r}; legal: scenario, points, draws")
    if not isinstance(value.get("scenario"), str):
        raise UserError(f"{path}: scenario is missing; for example scenario: kimi-k2/ep8/decode")
    scenario = get_scenario(value["scenario"])
    points = _shares(path, "points", value.get("points") or {p.num_tokens: 1 for p in scenario.points if p.published})
    draws = _shares(path, "draws", value.get("draws") or {scenario.draw: 1})
    wrong = [key for key in points if not isinstance(key, int) or isinstance(key, bool) or key < 1]
    if wrong:
        raise UserError(f"{path}: points are token counts of at least 1, not {wrong[0]!r}")
    _refuse_two_names(path, [str(draw) for draw in draws])
    return Traffic(scenario=value["scenario"], points=points, draws={str(k): v for k, v in draws.items()})


def _loader() -> Any:
    """YAML's plain types; a key that stands twice is refused, where the library would drop the first."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise yaml.YAMLError(f"it says {twice} twice")
            return super().construct_mapping(node, deep)

    return Loader


def _refuse_two_names(path: pathlib.Path, draws: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for draw in draws:
        first = seen.setdefault(canonical_draw(draw), draw)
        if first != draw:
            raise UserError(f"{path}: {draw!r} names {first!r} again; give each draw once")


def _shares(path: pathlib.Path, name: str, weights: Any) -> dict[Any, float]:
    if not isinstance(weights, dict):
        raise UserError(f"{path}: {name} maps each entry to its weight, for example {{20: 5, 30: 3}}")
    for key, weight in weights.items():
        fine = isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 <= weight <= MOST_WEIGHT
        if not fine:
            shown = f"{weight!r}"[:40]
            raise UserError(f"{path}: the weight of {name} {key} must be a number of at least 0, not {shown}")
    total = sum(weights.values())
    if total <= 0:
        raise UserError(f"{path}: the weights of {name} sum to 0")
    return {key: weight / total for key, weight in weights.items() if weight > 0}


@dataclass
class _Place:
    """One token count of one projection: what each schedule costs there."""

    share: float
    draws: list[float]  # share of each
    winners: list[Winner]  # one a draw
    times: list[Mapping[Schedule, CandidateTime]]  # one a draw
    default: Schedule

    @cached_property
    def costs(self) -> dict[Schedule, float]:
        """Microseconds, weighted over the draws; only what every draw has measured."""
        shared = set.intersection(*map(set, self.times))
        return {s: sum(d * t[s].time_us for d, t in zip(self.draws, self.times, strict=True)) for s in shared}

    def high(self, schedule: Schedule) -> float | None:
        """Upper bound of the schedule's cost over the default's; None where a draw's repeats cannot tell."""
        if self.default not in self.costs:
            return None
        cost = 0.0
        for share, times in zip(self.draws, self.times, strict=True):
            ratios = times[schedule].ratios
            cost += share * times[self.default].time_us * (interval(ratios).high if len(ratios) else math.inf)
        return cost / self.costs[self.default] if math.isfinite(cost) else None

    def proved(self, schedule: Schedule, margin: float) -> bool:
        """Whether it beats the default by more than the margin and the noise; without a default to beat, anyone."""
        if self.default not in self.costs:
            return True
        if self.costs[schedule] >= self.costs[self.default] * (1 - margin):
            return False
        high = self.high(schedule)
        return high is not None and high < 1 - margin

    def close(self, margin: float) -> set[Schedule]:
        """Proved schedules that cost at most the margin more than the best of them; the default where none is."""
        proved = {s: cost for s, cost in self.costs.items() if self.proved(s, margin)}
        if not proved:
            return {self.default}
        return {s for s, cost in proved.items() if cost <= min(proved.values()) * (1 + margin)}


class NotMeasured(UserError):
    """A point or draw of the mix has no record."""


def traffic_winners(
    table: pa.Table, traffic: Traffic, margin: float = MARGIN, say: Callable[[str], None] = lambda text: None
) -> list[Winner]:
    """One verdict per profile, projection and token count for the mix, rows merged; `draw` says for what mix.

    A profile that was not measured under all of the mix is left out, if another was; `say` gets a line about it.

    Raises:
        UserError: no profile has a record of every point and draw of the mix.
    """
    found = [w for w in winners(table, margin) if w.scenario == traffic.scenario]
    times = candidate_times(table)
    made: list[Winner] = []
    lacking: list[tuple[str, NotMeasured]] = []
    for profile in dict.fromkeys(w.profile for w in found):
        own = [w for w in found if w.profile == profile]
        projections = [[w for w in own if w.projection == name] for name in ("gate_up", "down")]
        try:
            verdicts = [w for mine in projections if mine for w in _projection(mine, times, traffic, margin)]
        except NotMeasured as error:
            lacking.append((profile, error))
            continue
        made += verdicts
    if not made and lacking:
        usual = get_scenario(traffic.scenario).profile
        raise next((error for name, error in lacking if name == usual), lacking[0][1])
    if not made:
        raise UserError(f"no record of {traffic.scenario} to tune this traffic from")
    for profile, reason in lacking:
        say(f"profile {profile} is left out: {reason}")
    return made


def _projection(
    mine: list[Winner], times: Mapping[Any, Mapping[Schedule, CandidateTime]], traffic: Traffic, margin: float
) -> list[Winner]:
    by_place = _by_place(mine)
    shares = list(traffic.draws.values())
    places = []
    for tokens in sorted(traffic.points):
        wanted = [(tokens, canonical_draw(draw)) for draw in traffic.draws]
        lacking = [place for place in wanted if place not in by_place or by_place[place].schedule is None]
        if lacking:
            what = f"{mine[0].projection} at {lacking[0][0]} tokens under {lacking[0][1]}"
            raise NotMeasured(f"no usable record of {traffic.scenario} {what}: sweep it first (--points, --draw)")
        here = [by_place[place] for place in wanted]
        default = here[0].default_schedule
        per_draw = [times[w.place()] for w in here]
        if default is None or not set.intersection(*map(set, per_draw)):
            raise UserError(f"{mine[0].projection} at {tokens} tokens: no schedule was measured under every draw")
        places.append(_Place(traffic.points[tokens], shares, here, per_draw, default))
    chosen = _fewest_rows(places, margin)
    return [_verdict(place, schedule, traffic, margin) for place, schedule in zip(places, chosen, strict=True)]


def _by_place(mine: Sequence[Winner]) -> dict[tuple[int, str], Winner]:
    """(tokens, draw) -> its one verdict."""
    found: dict[tuple[int, str], Winner] = {}
    for w in mine:
        other = found.setdefault((w.num_tokens, canonical_draw(w.draw)), w)
        if other is not w:
            raise UserError(
                f"{w.scenario} {w.projection} at {w.num_tokens} tokens under {w.draw} was measured twice in unlike "
                f"ways (seeds {other.seed} and {w.seed}, runs {other.run_id} and {w.run_id}): tune them apart"
            )
    return found


def _fewest_rows(places: Sequence[_Place], margin: float) -> list[Schedule]:
    """The schedule of each place: as few changes as possible, then the least weighted cost (dynamic programming)."""
    best: list[tuple[int, float, list[Schedule]]] = [(0, 0.0, [])]
    for end in range(1, len(places) + 1):
        options = []
        shared: set[Schedule] | None = None
        for start in range(end - 1, -1, -1):
            close = places[start].close(margin)
            shared = close if shared is None else shared & close
            if not shared:
                break
            run = places[start:end]
            costs = {s: sum(p.share * p.costs[s] for p in run) for s in shared}
            schedule = min(costs, key=lambda s: (costs[s], s.label()))
            rows, cost, before = best[start]
            options.append((rows + 1, cost + costs[schedule], [*before, *[schedule] * len(run)]))
        best.append(min(options, key=lambda option: option[:2]))
    return best[-1][2]


def _verdict(place: _Place, schedule: Schedule, traffic: Traffic, margin: float) -> Winner:
    """The mix's verdict at one token count: its bound is that of the draws, weighted."""
    first = place.winners[0]
    default_us = place.costs.get(place.default)
    cost = place.costs[schedule]
    shares = place.draws
    gain = None if default_us is None else 1 - cost / default_us
    return replace(
        first,
        draw=traffic.describe_draws(),
        schedule=schedule,
        best=schedule,
        time_us=cost,
        default_time_us=default_us,
        margin=gain,
        ratio_low=None,
        ratio_high=place.high(schedule),
        verdict="win" if place.proved(schedule, margin) else "tie",
        within=(schedule,),  # the row's schedule: neighbours with the same one share a row
        candidates=sum(w.candidates for w in place.winners),
        failed=sum(w.failed for w in place.winners),
        flags=tuple(dict.fromkeys(flag for w in place.winners for flag in w.flags)),
        humming_us=_mixed([w.humming_us for w in place.winners], shares),
        humming_best_us=_mixed([w.humming_best_us for w in place.winners], shares),
        baseline_us=_mixed([w.baseline_us for w in place.winners], shares),
    )


def _mixed(times: list[float | None], shares: list[float]) -> float | None:
    return None if None in times else float(np.dot(shares, [t for t in times if t is not None]))

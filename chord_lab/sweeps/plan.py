"""A plan: which candidates are tried at which points, which are refused and why, and how long it will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from w4a16_moe.devices import Device
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.records.attempt import Candidate, Point
from chord_lab.sweeps.space import candidates, default_schedule

# Seconds that a candidate takes live: checking, then its share of interleaved repeats; measured on an H200.
CHECK_S = 0.06
REPEAT_S = 0.035
MEAN_REPEATS = 2.2
COMPILE_S = 2.0  # of one core


@dataclass
class Refused:
    """Schedules that a rule kept out."""

    count: int
    example: str  # one schedule and its reason


@dataclass
class Plan:
    """Points and candidates; pairs index both, so that a million of them stay small."""

    points: list[Point]
    candidates: list[Candidate]  # each once, however many points try it
    pairs: npt.NDArray[np.int32]  # [n, 2]: index of the point, index of the candidate; ascending by point
    refused: dict[str, Refused] = field(default_factory=dict)  # by rule

    def __len__(self) -> int:
        return len(self.pairs)

    def by_point(self) -> Iterator[tuple[Point, list[Candidate]]]:
        """Each point with its candidates, in the plan's order."""
        starts = np.searchsorted(self.pairs[:, 0], np.arange(len(self.points) + 1))
        for index, point in enumerate(self.points):
            chosen = self.pairs[starts[index] : starts[index + 1], 1]
            yield point, [self.candidates[i] for i in chosen]

    def without(self, done: Collection[str]) -> Plan:
        """The plan less the attempts whose keys are done."""
        keep = [
            candidate.key_at(point) not in done for point, candidates_ in self.by_point() for candidate in candidates_
        ]
        return replace(self, pairs=self.pairs[np.array(keep, dtype=bool)] if keep else self.pairs)

    def at_unfinished_points(self, done: Collection[str]) -> Plan:
        """The points with an attempt that is not done, whole: times are compared within one run only."""
        pairs = self.pairs
        left = [any(c.key_at(point) not in done for c in candidates_) for point, candidates_ in self.by_point()]
        return replace(self, pairs=pairs[np.array(left, dtype=bool)[pairs[:, 0]]] if len(pairs) else pairs)

    def limited(self, most: int) -> Plan:
        """At most so many candidates, spread over the points; every point keeps its default."""
        if most >= len(self):
            return self
        order = np.concatenate([np.arange(np.sum(self.pairs[:, 0] == p)) for p in range(len(self.points))])
        chosen = np.sort(np.argsort(order, kind="stable")[:most])
        return replace(self, pairs=self.pairs[chosen])

    def summary(self) -> dict[str, Any]:
        """What `--plan-only` prints."""
        problems: dict[MoeProblem, int] = {}
        of_point = np.array([problems.setdefault(p.problem, len(problems)) for p in self.points] or [0])
        compiled = np.array([c.schedule is not None for c in self.candidates] or [False])
        kernels = of_point[self.pairs[:, 0]] * (len(self.candidates) + 1) + self.pairs[:, 1]
        num_kernels = len(np.unique(kernels[compiled[self.pairs[:, 1]]]))
        return {
            "points": len(np.unique(self.pairs[:, 0])),
            "candidates": len(self),
            "kernels_to_compile": num_kernels,
            "refused": {rule: {"count": r.count, "example": r.example} for rule, r in self.refused.items()},
            "num_refused": sum(r.count for r in self.refused.values()),
        }

    def expected_seconds(self, cores: int) -> float:
        """Live: the slower of measuring and compiling, since both go on at once."""
        measuring = len(self) * (CHECK_S + REPEAT_S * MEAN_REPEATS)
        return max(measuring, self.summary()["kernels_to_compile"] * COMPILE_S / max(1, cores - 1))


def make_plan(
    points: Sequence[Point],
    device: Device,
    *,
    space: str = "focus",
    kernels: Sequence[str] | None = None,
    order: Callable[[Point, list[Schedule]], list[Schedule]] | None = None,
) -> Plan:
    """Every legal schedule of the space at every point; each point's default comes first.

    order: puts a point's schedules in the order in which they are tried, best guess first.
    """
    known: dict[Candidate, int] = {}
    pairs: list[tuple[int, int]] = []
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for index, point in enumerate(points):
        if point.routed_m == 0:
            counts["no rows"] += 1
            examples.setdefault("no rows", f"{point.label()}: an empty result, no launch")
            continue
        legal = []
        for schedule, rule, reason in candidates(point, device, space, kernels):
            if rule:
                counts[rule] += 1
                examples.setdefault(rule, f"{schedule.label()}: {reason}")
            else:
                legal.append(schedule)
        default = default_schedule(point, device)
        legal = [s for s in (order(point, legal) if order else legal) if s != default]
        for candidate in [Candidate(schedule=default, default=True), *(Candidate(schedule=s) for s in legal)]:
            pairs.append((index, known.setdefault(candidate, len(known))))
    refused = {rule: Refused(count, examples[rule]) for rule, count in counts.most_common()}
    return Plan(list(points), list(known), np.array(pairs, dtype=np.int32).reshape(-1, 2), refused)

"""How many rows a tile should have, from tokens per expert alone: what a schedule starts from when no table knows
better.

Few tokens per expert: an expert's rows should fit one block, since every further block reads the expert's weights
again; among the sizes that need (nearly) the fewest blocks, the smallest wastes least. Many tokens per expert:
weights are read often anyway, so the expected rows are covered by the fewest blocks under a ceiling. Where the one
turns into the other is `BlockMModel.threshold`: a parameter to sweep, not a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_THRESHOLD = 80.0  # tokens per expert


@dataclass(frozen=True, kw_only=True)
class BlockMModel:
    """The parameters of the choice."""

    threshold: float = DEFAULT_THRESHOLD  # tokens per expert from which the covering rule applies
    headroom: float = 1.1  # covering rule: rows to cover, relative to the mean, as routing is uneven
    ceiling: int = 128  # covering rule: largest block_m; the accumulator's registers set it
    tolerance: float = 0.02  # packing rule: blocks above the fewest that a smaller block_m may cost

    def __post_init__(self) -> None:
        for name in ("threshold", "headroom", "ceiling", "tolerance"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 0")

    def choose(self, num_experts: int, routed_m: int, legal: Sequence[int]) -> int:
        """The block_m for ``routed_m`` rows spread over ``num_experts``, among the ``legal`` sizes of a kernel."""
        if not legal or min(legal) < 1:
            raise ValueError("choose needs at least one legal block_m, all of them at least 1")
        if routed_m < 1 or num_experts < 1:
            raise ValueError(f"routed_m={routed_m} and num_experts={num_experts} must be at least 1")
        sizes = sorted(set(legal))
        if routed_m / num_experts < self.threshold:
            return self._fewest_blocks(num_experts, routed_m, sizes)
        return self._cover(routed_m / num_experts, sizes)

    def _fewest_blocks(self, num_experts: int, routed_m: int, sizes: list[int]) -> int:
        blocks = {size: expected_blocks(num_experts, routed_m, size) for size in sizes}
        limit = min(blocks.values()) * (1 + self.tolerance)
        return next(size for size in sizes if blocks[size] <= limit)

    def _cover(self, tok_e: float, sizes: list[int]) -> int:
        allowed = [size for size in sizes if size <= self.ceiling] or sizes[:1]
        rows = self.headroom * tok_e
        num_blocks = math.ceil(rows / allowed[-1])
        return next((size for size in allowed if size * num_blocks >= rows), allowed[-1])


def expected_blocks(num_experts: int, routed_m: int, block_m: int) -> float:
    """Blocks that ``routed_m`` rows need on average when each falls on any expert alike (binomial counts)."""
    return num_experts * sum(
        chance * -(-count // block_m) for count, chance in _binomial(routed_m, 1 / num_experts) if count
    )


def _binomial(trials: int, p: float) -> list[tuple[int, float]]:
    """(count, chance) for every count with a chance that matters: within ten standard deviations of the mean."""
    if p >= 1:
        return [(trials, 1.0)]
    mean, spread = trials * p, math.sqrt(trials * p * (1 - p))
    low, high = max(0, int(mean - 10 * spread)), min(trials, int(mean + 10 * spread) + 10)
    log_p, log_q = math.log(p), math.log1p(-p)
    log_trials = math.lgamma(trials + 1)
    return [
        (
            count,
            math.exp(
                log_trials
                - math.lgamma(count + 1)
                - math.lgamma(trials - count + 1)
                + count * log_p
                + (trials - count) * log_q
            ),
        )
        for count in range(low, high + 1)
    ]

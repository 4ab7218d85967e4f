"""Routing draws: which experts each token goes to, the same on every machine.

The published benchmark gives each (token, local expert) a standard-normal score and takes the top_k, with CUDA's
generator seeded with the token count. That stream exists on a GPU only, and scores of one continuous distribution rank
alike whatever the distribution is, so `uniform` ranks PCG64's raw 53-bit numbers instead: equal in distribution, never
the same routing. A record therefore names its generator and keeps its per-expert counts.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from chord_lab.errors import UserError

Ids = npt.NDArray[np.int32]

GENERATOR = "numpy-pcg64-v1"  # part of every record: another generator or version is another routing
MOST_TOKENS, MOST_EXPERTS, MOST_SCORES = 1 << 24, 1 << 16, 1 << 33  # beyond: minutes and gigabytes for a typing error
_ROWS_AT_ONCE = 1 << 22  # scores held at a time, 32 MiB


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A parsed draw: ``uniform``, ``balanced``, ``zipf:S`` or ``file:PATH``."""

    kind: str
    skew: float = 0.0  # zipf: expert of rank r is drawn in proportion to r**-skew
    path: str = ""  # file
    layer: int | None = None  # file: which layer, where the file holds several

    def __str__(self) -> str:
        if self.kind == "zipf":
            return f"zipf:{self.skew:g}"
        if self.kind == "file":
            return f"file:{self.path}" + ("" if self.layer is None else f"#{self.layer}")
        return self.kind


def parse_draw(text: str) -> Draw:
    """A `Draw` from its name; refuses anything else in one line."""
    kind, _, argument = text.partition(":")
    if kind in ("uniform", "balanced") and not argument:
        return Draw(kind=kind)
    if kind == "zipf":
        try:
            skew = float(argument)
        except ValueError:
            skew = math.nan
        if not 0 <= skew <= 10:
            raise UserError(f"draw {text!r}: zipf needs a skew from 0 to 10, as in zipf:1.0")
        return Draw(kind="zipf", skew=skew)
    if kind == "file" and argument:
        path, mark, layer = argument.rpartition("#")
        if mark and layer.isascii() and layer.isdigit() and len(layer) <= 9:
            return Draw(kind="file", path=path, layer=int(layer))
        return Draw(kind="file", path=argument)
    raise UserError(f"unknown draw {text!r}; legal: uniform, balanced, zipf:S, file:PATH (file:PATH#LAYER)")


def canonical_draw(text: str) -> str:
    """One name for one draw: ``zipf:1.0`` and ``zipf:1`` are the same; what is no draw stays as it is."""
    try:
        return str(parse_draw(text))
    except UserError:
        return text


def draw_topk_ids(draw: str | Draw, *, num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Ids:
    """``topk_ids [num_tokens, top_k]`` int32, each row distinct experts.

    Depends on the five arguments (and a file's content) alone, never on what was drawn before.

    Raises:
        UserError: counts that make no routing, or a file that does not fit.
    """
    parsed = parse_draw(draw) if isinstance(draw, str) else draw
    _check_counts(num_tokens, num_experts, top_k)
    generator = np.random.PCG64(_seed(parsed, seed, num_tokens, num_experts, top_k))
    if parsed.kind == "uniform":
        return _top_k_of_scores(generator, num_tokens, num_experts, top_k, None)
    if parsed.kind == "balanced":
        return _balanced(generator, num_tokens, num_experts, top_k)
    if parsed.kind == "zipf":
        popularity = np.arange(1, num_experts + 1, dtype=np.float64) ** -parsed.skew
        return _top_k_of_scores(
            generator, num_tokens, num_experts, top_k, popularity[_permutation(generator, num_experts)]
        )
    from chord_lab.routing.files import read_recorded

    recorded = read_recorded(Path(parsed.path), layer=parsed.layer, num_experts=num_experts, top_k=top_k)
    if recorded.topk_ids is not None:
        return _sampled(generator, recorded.topk_ids, num_tokens)
    return ids_from_counts(_scaled(recorded.counts, num_tokens * top_k, num_tokens), top_k)


def ids_from_counts(tok_e: npt.NDArray[np.int64], top_k: int) -> Ids:
    """``topk_ids [sum(tok_e) / top_k, top_k]`` with exactly these counts and distinct experts in each row."""
    routed_m = int(tok_e.sum())
    num_tokens, rest = divmod(routed_m, top_k)
    if rest:
        raise UserError(f"{routed_m} routed rows are not a multiple of top_k={top_k}")
    if tok_e.size and int(tok_e.max()) > num_tokens:
        raise UserError(f"one expert has {int(tok_e.max())} rows but there are only {num_tokens} tokens")
    # Routes sorted by expert, dealt to tokens in turn: an expert's run is at most num_tokens long, so no token twice.
    by_expert = np.repeat(np.arange(tok_e.size, dtype=np.int32), tok_e)
    return np.ascontiguousarray(by_expert.reshape(top_k, num_tokens).T)


def _check_counts(num_tokens: int, num_experts: int, top_k: int) -> None:
    if num_experts < 1:
        raise UserError(f"experts must be at least 1, not {num_experts}")
    if num_tokens < 0:
        raise UserError(f"tokens must be at least 0, not {num_tokens}")
    for name, count, most in (("experts", num_experts, MOST_EXPERTS), ("tokens", num_tokens, MOST_TOKENS)):
        if count > most:
            raise UserError(f"{name} must be at most {most}, not {count}")
    if num_tokens * num_experts > MOST_SCORES:
        raise UserError(f"{num_tokens} tokens over {num_experts} experts are too many to draw (at most {MOST_SCORES})")
    if not 1 <= top_k <= num_experts:
        raise UserError(f"top_k must be from 1 to the {num_experts} experts, not {top_k}")


def _seed(draw: Draw, seed: int, num_tokens: int, num_experts: int, top_k: int) -> int:
    kind = "file" if draw.kind == "file" else str(draw)  # a file's path must not matter, only its content
    text = f"{GENERATOR}|{kind}|{seed}|{num_tokens}|{num_experts}|{top_k}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def _uniforms(generator: np.random.PCG64, count: int) -> npt.NDArray[np.float64]:
    """`count` numbers of [0, 1) from the raw stream: its stability numpy promises, that of `Generator` it does not."""
    return (generator.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _permutation(generator: np.random.PCG64, count: int) -> npt.NDArray[np.int64]:
    return np.argsort(_uniforms(generator, count), kind="stable")


def _top_k_of_scores(
    generator: np.random.PCG64,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    popularity: npt.NDArray[np.float64] | None,
) -> Ids:
    """The top_k scores of each token; with `popularity`, drawn without replacement in proportion to it."""
    ids = np.empty((num_tokens, top_k), dtype=np.int32)
    step = max(1, _ROWS_AT_ONCE // num_experts)
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        scores = _uniforms(generator, (stop - start) * num_experts).reshape(stop - start, num_experts)
        if popularity is not None:  # exponential races: the earliest arrivals are a weighted draw without replacement
            scores = np.log1p(-scores) / popularity
        chosen = np.argpartition(scores, num_experts - top_k, axis=1)[:, num_experts - top_k :]
        order = np.argsort(-np.take_along_axis(scores, chosen, axis=1), axis=1, kind="stable")
        ids[start:stop] = np.take_along_axis(chosen, order, axis=1)
    return ids


def _balanced(generator: np.random.PCG64, num_tokens: int, num_experts: int, top_k: int) -> Ids:
    """Counts that differ by at most one; which experts get the odd rows is drawn."""
    turns = np.arange(num_tokens * top_k, dtype=np.int64) % num_experts
    return _permutation(generator, num_experts)[turns].astype(np.int32).reshape(num_tokens, top_k)


def _sampled(generator: np.random.PCG64, topk_ids: Ids, num_tokens: int) -> Ids:
    """Recorded rows, drawn without replacement while they last."""
    if not len(topk_ids):
        raise UserError("the recorded routing holds no token")
    rounds = [_permutation(generator, len(topk_ids)) for _ in range(-(-num_tokens // len(topk_ids)))]
    rows = np.concatenate(rounds)[:num_tokens] if rounds else np.empty(0, dtype=np.int64)
    return topk_ids[rows]


def _scaled(counts: npt.NDArray[np.int64], routed_m: int, most: int) -> npt.NDArray[np.int64]:
    """Counts in the recorded proportions that sum to `routed_m`, none above `most` (a token visits an expert once)."""
    if not counts.sum():
        raise UserError("the recorded load is zero for every expert")
    if int(counts.sum()) == routed_m and int(counts.max()) <= most:
        return counts
    scaled = np.zeros(counts.size, dtype=np.int64)
    free = np.ones(counts.size, dtype=bool)
    while True:  # experts that would pass the cap are held at it and the rest shares what remains
        left = routed_m - int(scaled[~free].sum())
        weights = np.where(free, counts, 0).astype(np.float64)
        if not weights.sum():
            raise UserError(f"recorded load reaches too few experts for {routed_m} rows at {most} tokens")
        exact = weights * (left / weights.sum())
        over = free & (exact > most)
        if not over.any():
            break
        scaled[over] = most
        free &= ~over
    floor = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - floor), kind="stable")
    order = order[free[order] & (floor[order] < most)]
    floor[order[: left - int(floor.sum())]] += 1
    return np.where(free, floor, scaled)

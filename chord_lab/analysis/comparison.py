"""Ours against peers, one schedule against another, and the layer as the sum of its two projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from chord_lab.analysis.selection import (
    candidates,
    fastest,
    is_missing,
    others,
    require_one_environment,
    round_medians,
    rows_of,
    select,
    source_line,
    timed,
    with_labels,
)
from chord_lab.errors import UserError
from chord_lab.records.intervals import Ratio, paired_ratio
from chord_lab.records.rows import SCHEDULE_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

LAYER_CAVEATS = (
    "layer time is gate_up + down; routing, activation and communication are outside it",
    "every implementation ran on the same routing, weights and activations, in turns within one process",
)
PEER_NOTES = {
    "humming": "Humming (own heuristics) runs the tile that the peer's own tables choose",
    "humming_best_tile": "Humming (best tile) is the fastest of that tile and of those that were forced on it",
    "torch_dequant_bf16": "bf16 matmul is the baseline: weights dequantised first, then one dense matmul per expert",
}


def name_tiles(rows: pd.DataFrame) -> pd.DataFrame:
    """Peer rows with its best tile under a name of its own: the fastest of forced tiles and its own choice."""
    import pandas as pd

    named = rows.assign(implementation=rows["implementation"].astype(str).replace("humming_tile", "humming_best_tile"))
    if not (named["implementation"] == "humming_best_tile").any():
        return named
    own = named[named["implementation"] == "humming"]
    return pd.concat([named, own.assign(implementation="humming_best_tile")], ignore_index=True)


def per_round(row: Mapping[str, Any]) -> dict[int, float]:
    """Round -> median time of a row, for pairing with another row's rounds."""
    medians = round_medians(row.get("times_us"))
    rounds = row.get("rounds")
    if rounds is None or isinstance(rounds, float) or len(rounds) != len(medians):
        rounds = range(len(medians))
    return {int(r): t for r, t in zip(rounds, medians, strict=True)}


def ratio_of(slower: Mapping[str, Any], faster: Mapping[str, Any]) -> Ratio | None:
    """Time of `slower` over time of `faster`, from the rounds that both share; above 1 where `faster` is faster."""
    return paired_ratio(per_round(slower), per_round(faster))


class CompareInfo(NamedTuple):
    """Ours beside the others at each point; lists over points, inner lists over implementations."""

    projection: list[str]
    routed_m: list[int]
    num_tokens: list[int]
    tokens_per_expert: list[float]
    draw: list[str]
    ours: list[str]  # schedule label
    ours_us: list[float]
    implementation: list[str]  # peers and baselines, in a fixed order
    other_us: list[list[float | None]]  # [point][implementation]
    ratio: list[list[float | None]]  # other / ours: above 1 where ours is faster
    ratio_low: list[list[float | None]]  # 95 % interval; None with fewer than two paired rounds
    ratio_high: list[list[float | None]]
    config: list[list[str]]  # the other's configuration: its tile
    padded_rows: list[list[int]]  # rows that it computed, padding included; 0: not recorded
    notes: list[str]
    source: str


def compare_info(
    frame: pd.DataFrame,
    *,
    scenario: str | None = None,
    projection: str | None = None,
    draw: str | None = None,
    chosen: Mapping[tuple[str, int, str], str] | None = None,
) -> CompareInfo:
    """Our schedule against every other implementation measured at the same point.

    chosen: (projection, routed_m, draw) -> label of the schedule to stand for ours; the fastest where it has none.

    Raises:
        UserError: no point where ours and another implementation were both timed, or unlike environments.
    """
    part = select(frame, scenario=scenario, projection=projection, draw=draw)
    mine, theirs = with_labels(candidates(part)), name_tiles(others(part))
    if not len(mine) or not len(theirs):
        raise UserError("no point where both our kernels and another implementation were timed")
    part = require_one_environment(timed(part[part["kind"] != "ceiling"]))
    mine, theirs = with_labels(candidates(part)), name_tiles(others(part))
    keys = ["projection", "routed_m", "num_tokens", "draw", "seed"]
    theirs_by_point = dict(list(theirs.groupby(keys, observed=True, dropna=False)))
    names = [n for n in PEER_NOTES if (theirs["implementation"] == n).any()]
    names += sorted({str(n) for n in theirs["implementation"].unique()} - set(names))
    lists: dict[str, list[Any]] = {n: [] for n in CompareInfo._fields if n not in ("implementation", "notes", "source")}
    for key, group in mine.groupby(keys, observed=True, dropna=False):
        if key in theirs_by_point:
            _compare_point(lists, _ours(group, chosen or {}), theirs_by_point[key], names)
    if not lists["routed_m"]:
        raise UserError("no point where both our kernels and another implementation were timed")
    return CompareInfo(
        **lists,
        implementation=names,
        notes=[PEER_NOTES[n] for n in names if n in PEER_NOTES],
        source=source_line(mine),
    )


def _ours(group: pd.DataFrame, chosen: Mapping[tuple[str, int, str], str]) -> dict[str, Any]:
    """Row of the chosen schedule; the fastest row where none is chosen."""
    first = group.iloc[0]
    wanted = chosen.get((str(first["projection"]), int(first["routed_m"]), str(first["draw"])))
    rows = group[group["label"] == wanted] if wanted else group
    rows = rows if len(rows) else group
    return rows_of(rows.loc[[rows["time_us"].idxmin()]])[0]


def _compare_point(lists: dict[str, list[Any]], ours: dict[str, Any], theirs: pd.DataFrame, names: list[str]) -> None:
    best = {str(row["implementation"]): row for row in rows_of(fastest(theirs, ["implementation"]))}
    ratios = [ratio_of(best[n], ours) if n in best else None for n in names]
    plain = [float(best[n]["time_us"]) / float(ours["time_us"]) if n in best else None for n in names]
    paired = [r is not None and r.num_pairs > 1 for r in ratios]
    values = {
        "projection": str(ours["projection"]),
        "routed_m": int(ours["routed_m"]),
        "num_tokens": int(ours["num_tokens"]),
        "tokens_per_expert": float(ours["tokens_per_expert"]),
        "draw": str(ours["draw"]),
        "ours": ours["label"],
        "ours_us": float(ours["time_us"]),
        "other_us": [float(best[n]["time_us"]) if n in best else None for n in names],
        "ratio": [r.estimate if r is not None else p for r, p in zip(ratios, plain, strict=True)],
        "ratio_low": [r.low if r and ok else None for r, ok in zip(ratios, paired, strict=True)],
        "ratio_high": [r.high if r and ok else None for r, ok in zip(ratios, paired, strict=True)],
        "config": [str(best[n].get("config") or "") if n in best else "" for n in names],
        "padded_rows": [_whole(best[n].get("num_tokens_padded")) if n in best else 0 for n in names],
    }
    for name, value in values.items():
        lists[name].append(value)


def _whole(value: Any) -> int:
    return 0 if is_missing(value) else int(value)


class LayerInfo(NamedTuple):
    """gate_up + down of a layer; lists over token counts, inner lists over implementations."""

    num_tokens: list[int]
    routed_m: list[int]
    tokens_per_expert: list[float]
    draw: list[str]
    ours_us: list[float]
    gate_up_us: list[float]
    down_us: list[float]
    implementation: list[str]
    other_us: list[list[float | None]]
    ratio: list[list[float | None]]  # other / ours
    caveats: list[str]
    scenario: str
    source: str


def layer_info(
    frame: pd.DataFrame,
    *,
    scenario: str | None = None,
    draw: str | None = None,
    chosen: Mapping[tuple[str, int, str], str] | None = None,
) -> LayerInfo:
    """The layer, where both projections were timed.

    Raises:
        UserError: no token count with both projections, several scenarios, or unlike environments.
    """
    part = select(frame, scenario=scenario, draw=draw)
    part = timed(part[part["kind"] != "ceiling"])
    if part["scenario"].nunique() > 1:
        raise UserError(f"several scenarios ({', '.join(sorted(part['scenario'].unique()))}); choose one")
    part = require_one_environment(part, together=("projection",))
    mine, theirs = with_labels(candidates(part)), others(part)
    whole = _whole_layers(mine, chosen or {})
    if not whole:
        raise UserError("no token count where both gate_up and down were timed")
    sums = _layer_sums(name_tiles(theirs))
    names = [n for n in PEER_NOTES if any(n in s for s in sums.values())]
    lists: dict[str, list[Any]] = {
        n: [] for n in LayerInfo._fields if n not in ("implementation", "caveats", "scenario", "source")
    }
    for key, both in sorted(whole.items(), key=lambda item: (str(item[0][2]), item[0][0])):
        gate_up, down = float(both["gate_up"]["time_us"]), float(both["down"]["time_us"])
        found = [sums.get(key, {}).get(n) for n in names]
        values = (
            int(key[1]), int(key[0]), float(both["down"]["tokens_per_expert"]), str(key[2]),
            gate_up + down, gate_up, down, found, [None if t is None else t / (gate_up + down) for t in found],
        )  # fmt: skip
        for name, value in zip(lists, values, strict=True):
            lists[name].append(value)
    caveats = [*LAYER_CAVEATS, *(PEER_NOTES[n] for n in names)]
    return LayerInfo(
        **lists,
        implementation=names,
        caveats=caveats,
        scenario=str(mine["scenario"].iloc[0]),
        source=source_line(mine),
    )


_LAYER_KEYS = ["routed_m", "num_tokens", "draw", "seed"]


def _whole_layers(
    mine: pd.DataFrame, chosen: Mapping[tuple[str, int, str], str]
) -> dict[Any, dict[str, dict[str, Any]]]:
    """Point -> projection -> our row, where both projections were timed."""
    ours: dict[Any, dict[str, dict[str, Any]]] = {}
    for key, group in mine.groupby([*_LAYER_KEYS, "projection"], observed=True, dropna=False):
        ours.setdefault(key[:-1], {})[str(key[-1])] = _ours(group, chosen)
    return {key: both for key, both in ours.items() if {"gate_up", "down"} <= set(both)}


def _layer_sums(theirs: pd.DataFrame) -> dict[Any, dict[str, float]]:
    """Point -> implementation -> gate_up + down of its fastest record each."""
    sums: dict[Any, dict[str, float]] = {}
    if not len(theirs):
        return sums
    best = fastest(theirs, ["implementation", "projection", *_LAYER_KEYS])
    for key, group in best.groupby(["implementation", *_LAYER_KEYS], observed=True, dropna=False):
        times = dict(zip(group["projection"].astype(str), group["time_us"], strict=True))
        if {"gate_up", "down"} <= set(times):
            sums.setdefault(tuple(key[1:]), {})[str(key[0])] = float(times["gate_up"] + times["down"])
    return sums


class PairInfo(NamedTuple):
    """Two schedules over the points where both were timed."""

    first: str
    second: str
    differs: dict[str, tuple[Any, Any]]  # knob -> its two values
    projection: list[str]
    routed_m: list[int]
    tokens_per_expert: list[float]
    draw: list[str]
    first_us: list[float]
    second_us: list[float]
    ratio: list[float]  # second / first: above 1 where the first is faster
    ratio_low: list[float | None]
    ratio_high: list[float | None]
    source: str


def pair_info(frame: pd.DataFrame, first: str, second: str) -> PairInfo:
    """Compare two schedules by their labels.

    Raises:
        UserError: a label that no record has, or no point in common.
    """
    rows = with_labels(require_one_environment(candidates(frame)))
    mine, theirs = _points_of(rows, first), _points_of(rows, second)
    shared = sorted(set(mine) & set(theirs))
    if not shared:
        raise UserError(f"{first!r} and {second!r} were timed at no common point")
    pairs = [(mine[key], theirs[key]) for key in shared]
    one, two = ({knob: row[knob] for knob in SCHEDULE_COLUMNS} for row in pairs[0])
    ratios = [ratio_of(b, a) for a, b in pairs]
    return PairInfo(
        first=first,
        second=second,
        differs={name: (one[name], two[name]) for name in one if one[name] != two[name]},
        projection=[key[1] for key in shared],
        routed_m=[key[2] for key in shared],
        tokens_per_expert=[float(a["tokens_per_expert"]) for a, _ in pairs],
        draw=[key[3] for key in shared],
        first_us=[float(a["time_us"]) for a, _ in pairs],
        second_us=[float(b["time_us"]) for _, b in pairs],
        ratio=[
            r.estimate if r else float(b["time_us"] / a["time_us"]) for r, (a, b) in zip(ratios, pairs, strict=True)
        ],
        ratio_low=[r.low if r and r.num_pairs > 1 else None for r in ratios],
        ratio_high=[r.high if r and r.num_pairs > 1 and np.isfinite(r.high) else None for r in ratios],
        source=source_line(rows),
    )


def _points_of(rows: pd.DataFrame, label: str) -> dict[Any, dict[str, Any]]:
    """Point -> row of the schedule with that label."""
    found = rows_of(rows[rows["label"] == label])
    if not found:
        raise UserError(f"no timed record of schedule {label!r}")
    keys = [(str(r["scenario"]), str(r["projection"]), int(r["routed_m"]), str(r["draw"]), r["seed"]) for r in found]
    return dict(zip(keys, found, strict=True))

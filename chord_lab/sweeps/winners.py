"""Winners: who is faster than the default by more than the noise, point by point."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from w4a16_moe.schedule import Schedule

from chord_lab.records.attempt import Point
from chord_lab.records.decode import decode, group
from chord_lab.records.intervals import interval
from chord_lab.records.peer_tile import tile_text
from chord_lab.sweeps.flags import point_flags
from chord_lab.sweeps.recorded import LIKENESS_COLUMNS, newest_runs
from chord_lab.sweeps.timed import Timed, timed_rows
from chord_lab.sweeps.unsteady import is_unsteady, whole_range

if TYPE_CHECKING:
    import pyarrow as pa

MARGIN = 0.01  # a win must beat the default by at least this, whatever the interval says
ENOUGH_ROUNDS = 3
METHOD_COLUMNS = ("timer", "l2", "timed")


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The verdict at one point of one run."""

    scenario: str
    projection: str
    profile: str
    num_tokens: int
    routed_m: int
    num_experts: int
    draw: str
    seed: int
    verdict: str  # win | tie | none
    schedule: Schedule | None  # what should run: the winner; on a tie the default
    time_us: float | None  # of `schedule`
    default_schedule: Schedule | None
    default_time_us: float | None  # in the rounds that the winner was measured in too
    best: Schedule | None  # the fastest candidate, whether or not it wins
    margin: float | None  # 1 - best time / default time
    ratio_low: float | None  # 95 % interval of best time / default time; None: too few repeats to tell
    ratio_high: float | None
    num_rounds: int  # repeats that the interval rests on
    candidates: int
    failed: int
    failures: dict[str, int] = field(default_factory=dict)  # status -> count
    humming_us: float | None = None  # the peer with its own heuristics
    humming_best_us: float | None = None  # its fastest tile, forced ones included
    humming_tile: str = ""  # what it chose, in short
    humming_best_tile: str = ""
    baseline_us: float | None = None  # dequantise and multiply in bf16
    flags: tuple[str, ...] = ()  # drift, throttled, impossible, unpaired: why to be careful
    source: str = ""
    device: str = ""
    date: str = ""
    run_id: str = ""
    environment: tuple[Any, ...] = ()  # what must agree before times of two verdicts may be added or compared
    within: tuple[Schedule, ...] = ()  # candidates within `MARGIN` of the best: a table may use any of them

    def place(self) -> Place:
        """What tells it from the verdicts at other points and of other runs."""
        return (self.scenario, self.projection, self.profile, self.num_tokens, self.draw, self.seed, self.run_id)


Place = tuple[str, str, str, int, str, int, str]


class CandidateTime(NamedTuple):
    """One candidate at one point."""

    time_us: float  # paired with the default, so that drift cancels
    ratios: npt.NDArray[np.float64]  # to the default, of each round that has both


def winners(table: pa.Table, margin: float = MARGIN) -> list[Winner]:
    """One verdict per point, run, environment and method; unlike ones are never compared with each other."""
    table = newest_runs(table)[0]
    decoded, columns, timed, contests = _contests(table)
    ceilings = _ceilings(columns, timed, decoded.point_of_row < 0)
    found = [
        _verdict(rows, decoded, columns=columns, timed=timed, ceilings=ceilings, margin=margin)
        for rows in contests
        if (columns["kind"][rows] == "candidate").any()
    ]
    return sorted(found, key=lambda w: (w.scenario, w.projection != "gate_up", w.routed_m, w.draw, w.run_id))


def candidate_times(table: pa.Table) -> dict[Place, dict[Schedule, CandidateTime]]:
    """Every candidate that ran, by `Winner.place`."""
    table = newest_runs(table)[0]
    decoded, columns, timed, contests = _contests(table)
    found: dict[Place, dict[Schedule, CandidateTime]] = {}
    for rows in contests:
        tried = rows[(columns["kind"][rows] == "candidate") & ~np.isnan(timed.time[rows])]
        if not len(tried):
            continue
        default = next((int(r) for r in tried if columns["default"][r]), None)
        defaults = timed.time[tried[columns["default"][tried]]]
        pairs = bool(len(defaults)) and not is_unsteady(default, tried, timed)
        times = np.where(
            (timed.pairs[tried] > 0) & pairs,
            timed.estimate[tried] * (np.median(defaults) if len(defaults) else 1.0),
            timed.time[tried],
        )
        point = decoded.points[decoded.point_of_row[tried[0]]]
        run_id, routing = str(columns["run_id"][tried[0]]), point.routing
        place = (
            point.scenario, point.projection, point.profile, point.num_tokens, routing.draw, routing.seed, run_id
        )  # fmt: skip
        by_schedule = found.setdefault(place, {})
        for row, time_us in zip(tried, times, strict=True):
            schedule = _schedule(decoded, int(row))
            if schedule is not None:
                by_schedule[schedule] = CandidateTime(float(time_us), timed.pairs_of(int(row))[1])
    return found


def _contests(table: pa.Table) -> tuple[Any, dict[str, Any], Timed, list[npt.NDArray[np.int64]]]:
    """The rows of each contest: one point, run, environment and method."""
    decoded = decode(table)
    own, _ = group(table.select(["run_id", *LIKENESS_COLUMNS, *METHOD_COLUMNS]))
    contest = np.where(decoded.point_of_row >= 0, decoded.point_of_row * (own.max(initial=0) + 1) + own, -1)
    columns = _columns(table)
    timed = timed_rows(table, columns, contest)
    order = np.argsort(contest, kind="stable")
    order = order[np.searchsorted(contest[order], 0) :]
    starts = np.flatnonzero(np.diff(np.concatenate([[-1], contest[order]])))
    return decoded, columns, timed, np.split(order, starts[1:]) if len(order) else []


def _columns(table: pa.Table) -> dict[str, Any]:
    names = (
        "kind", "status", "implementation", "config", "default", "run_id", "source", "device_name", "date",
        "max_sm_mhz",
    )  # fmt: skip
    columns = {name: table[name].to_pandas().to_numpy() for name in names}
    columns["default"] = columns["default"].astype(bool)
    columns["sm_mhz"] = table["sm_mhz"].combine_chunks()
    columns["work_bytes"] = table["work_bytes"].to_numpy()
    columns["work_flops"] = table["work_flops"].to_numpy()
    columns["environment"], first = group(table.select(list(LIKENESS_COLUMNS)))
    seen = table.select(list(LIKENESS_COLUMNS)).take(first).to_pylist()
    columns["environments"] = [tuple(values.values()) for values in seen]
    return columns


def _verdict(
    rows: npt.NDArray[np.int64],
    decoded: Any,
    *,
    columns: dict[str, Any],
    timed: Timed,
    ceilings: dict[str, dict[str, float]],
    margin: float,
) -> Winner:
    tried = rows[columns["kind"][rows] == "candidate"]
    fine = tried[~np.isnan(timed.time[tried])]
    default = next((int(r) for r in tried if columns["default"][r]), None)
    point = decoded.points[decoded.point_of_row[rows[0]]]
    common = {
        **_place(point),
        **_counts(tried, decoded, columns, timed),
        **_origin(rows, columns),
        "default_schedule": _schedule(decoded, default),
        **_peers(rows, columns, timed),
    }
    if not len(fine):
        return Winner(**common, **_NOTHING)
    unsteady = is_unsteady(default, fine, timed)
    best, score = _fastest(fine, timed, paired=not unsteady)
    flags = point_flags(point, rows, best, columns=columns, timed=timed, ceilings=ceilings.get(common["run_id"], {}))
    if unsteady:
        flags = (*flags, "unsteady: the default's repeats jump by themselves, so times are compared unpaired")
    if columns["default"][best]:
        default = best
    decided = (_decide_unpaired if unsteady else _decide)(best, default, timed, margin)
    wins = decided["verdict"] == "win" or default is None
    chosen = best if wins or default is None else default
    # on a tie the default stays: one time stands for it, or the tie would look like a gain or a loss
    time_us = float(timed.time[best]) if wins else decided["default_time_us"]
    close = [_schedule(decoded, int(r)) for r in fine[score <= score.min() * (1 + MARGIN)]]
    return Winner(
        **common,
        **decided,
        schedule=_schedule(decoded, chosen),
        best=_schedule(decoded, best),
        time_us=time_us,
        flags=flags,
        within=tuple(dict.fromkeys(s for s in close if s is not None)),
    )


def _place(point: Point) -> dict[str, Any]:
    return {
        "scenario": point.scenario,
        "projection": point.projection,
        "profile": point.profile,
        "num_tokens": point.num_tokens,
        "routed_m": point.routed_m,
        "num_experts": point.problem.num_experts,
        "draw": point.routing.draw,
        "seed": point.routing.seed,
    }


def _counts(tried: npt.NDArray[np.int64], decoded: Any, columns: dict[str, Any], timed: Timed) -> dict[str, Any]:
    """Candidates and failures; a default may have several records, and counts once."""
    _, first = np.unique(decoded.candidate_of_row[tried], return_index=True)
    once = tried[first]
    statuses, counts = np.unique(columns["status"][once].astype(str), return_counts=True)
    failures = {str(s): int(c) for s, c in zip(statuses, counts, strict=True) if s != "ok"}
    return {"candidates": len(once), "failed": int(np.isnan(timed.time[once]).sum()), "failures": failures}


def _origin(rows: npt.NDArray[np.int64], columns: dict[str, Any]) -> dict[str, Any]:
    """Where the newest of the records comes from, and the environment of all of them."""
    newest = rows[np.argmax(columns["date"][rows].astype(str))]
    names = {"source": "source", "device": "device_name", "date": "date", "run_id": "run_id"}
    origin = {name: str(columns[column][newest]) for name, column in names.items()}
    return {**origin, "environment": columns["environments"][columns["environment"][newest]]}


_NOTHING: dict[str, Any] = {
    "verdict": "none",
    "schedule": None,
    "time_us": None,
    "default_time_us": None,
    "best": None,
    "margin": None,
    "ratio_low": None,
    "ratio_high": None,
    "num_rounds": 0,
}


def _fastest(fine: npt.NDArray[np.int64], timed: Timed, *, paired: bool) -> tuple[int, npt.NDArray[np.float64]]:
    """The fastest row and every row's score; who was timed too few times for a fair comparison does not lead."""
    pairs = timed.pairs[fine] > 0
    score = np.where(pairs, timed.estimate[fine], np.inf) if paired and pairs.any() else timed.time[fine]
    enough = np.minimum(ENOUGH_ROUNDS, timed.pairs[fine].max())
    score = np.where(timed.pairs[fine] >= enough, score, np.inf)
    return int(fine[np.argmin(score)]), score


def _decide(best: int, default: int | None, timed: Timed, margin: float) -> dict[str, Any]:
    """win: the whole interval lies below the default by more than the margin; without a default to beat, a win."""
    if default is None or np.isnan(timed.time[default]):
        return {**_numbers(None, None, None, None, 0), "verdict": "win"}
    mine = (timed.row == best) & ~np.isnan(timed.ratio)
    ratios = timed.ratio[mine]
    if best == default:
        return {**_numbers(float(timed.time[default]), 0.0, 1.0, 1.0, len(ratios)), "verdict": "tie"}
    if not len(ratios):
        default_us = float(timed.time[default])
        ratio = float(timed.time[best]) / default_us
        return {**_numbers(default_us, 1 - ratio, None, None, 0), "verdict": "tie"}
    found = interval(ratios)
    default_us = float(np.median(timed.median[mine] / ratios))
    low, high = (found.low, found.high) if math.isfinite(found.high) else (None, None)
    wins = high is not None and high < 1 - margin
    return {
        **_numbers(default_us, 1 - found.estimate, low, high, found.num_pairs),
        "verdict": "win" if wins else "tie",
    }


def _decide_unpaired(best: int, default: int | None, timed: Timed, margin: float) -> dict[str, Any]:
    """Beside a default that jumps by itself, a win must beat its fastest repeat with its own slowest."""
    assert default is not None
    default_us, theirs, mine = float(timed.time[default]), timed.medians_of(default), timed.medians_of(best)
    if best == default:
        return {**_numbers(default_us, 0.0, 1.0, 1.0, len(mine)), "verdict": "tie"}
    low, high = whole_range(mine, theirs)
    wins = high is not None and high < 1 - margin
    gain = 1 - float(timed.time[best]) / default_us
    return {**_numbers(default_us, gain, low, high, len(mine)), "verdict": "win" if wins else "tie"}


def _numbers(
    default_us: float | None, margin: float | None, low: float | None, high: float | None, rounds: int
) -> dict[str, Any]:
    return {
        "default_time_us": default_us,
        "margin": margin,
        "ratio_low": low,
        "ratio_high": high,
        "num_rounds": rounds,
    }


def _schedule(decoded: Any, row: int | None) -> Schedule | None:
    return None if row is None else decoded.candidates[decoded.candidate_of_row[row]].schedule


def _peers(rows: npt.NDArray[np.int64], columns: dict[str, Any], timed: Timed) -> dict[str, Any]:
    """Times of the others at the point, and the tiles that Humming ran."""
    own, best = (_fastest_of(rows, columns, timed, names) for names in (_OWN_TILE, _ANY_TILE))
    baseline = _fastest_of(rows, columns, timed, ("torch_dequant_bf16",))

    def time(row: int | None) -> float | None:
        return None if row is None else float(timed.time[row])

    def tile(row: int | None) -> str:
        return "" if row is None or not columns["config"][row] else tile_text(str(columns["config"][row]))

    return {
        "humming_us": time(own),
        "humming_tile": tile(own),
        "humming_best_us": time(best),
        "humming_best_tile": tile(best),
        "baseline_us": time(baseline),
    }


_OWN_TILE = ("humming",)
_ANY_TILE = ("humming", "humming_tile", "humming_best_tile")


def _fastest_of(
    rows: npt.NDArray[np.int64], columns: dict[str, Any], timed: Timed, names: tuple[str, ...]
) -> int | None:
    theirs = rows[np.isin(columns["implementation"][rows].astype(str), names)]
    theirs = theirs[~np.isnan(timed.time[theirs])]
    return int(theirs[np.argmin(timed.time[theirs])]) if len(theirs) else None


def _ceilings(columns: dict[str, Any], timed: Timed, none: npt.NDArray[np.bool_]) -> dict[str, dict[str, float]]:
    """Run -> copy bandwidth in GB/s and dense rate in TFLOPS, the best of the run."""
    found: dict[str, dict[str, float]] = {}
    for row in np.flatnonzero(none & (columns["kind"] == "ceiling") & ~np.isnan(timed.time)):
        run = found.setdefault(str(columns["run_id"][row]), {})
        name = str(columns["implementation"][row])
        work, unit = (columns["work_bytes"], 1e3) if name == "copy" else (columns["work_flops"], 1e6)
        run[name] = max(run.get(name, 0.0), float(work[row]) / timed.time[row] / unit)
    return found

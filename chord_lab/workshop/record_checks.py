"""Exercises 3 to 6: judged by the recorded measurements, never by a number written down here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from w4a16_moe.devices import DEVICES
from w4a16_moe.resolve import resolve_schedule
from w4a16_moe.schedule import Schedule

from chord_lab import analysis
from chord_lab.errors import UserError
from chord_lab.routing import parse_draw
from chord_lab.scenarios import get_scenario
from chord_lab.widgets.measurements import Measurements
from chord_lab.workshop import points
from chord_lab.workshop.verdict import Verdict, is_near, judge, missing_parts

# Times closer than this are a tie: repeats of one schedule differ by as much.
TIE = 0.02


def check_turn(answer: Any, measurements: Measurements) -> Verdict:
    """answer: dict(low, high, is_80_inside): the thresholds, in tokens per expert, with the least mean regret."""
    problems = missing_parts(answer, ("low", "high", "is_80_inside"))
    if problems:
        return judge(problems, "")
    info = measurements.crossover(points.TURN_SCENARIO, points.TURN_PROJECTION, points.TURN_DRAW)
    turn = analysis.turn_info(info)
    low, high = answer["low"], answer["high"]
    if not is_near(low, turn.best_low, absolute=0.5):
        problems.append("low: the lowest threshold whose mean regret is the least, as far as the noise can tell")
    if not is_near(high, turn.best_high, absolute=0.5):
        problems.append("high: the highest such threshold (float('inf') if it has no end)")
    if not isinstance(answer["is_80_inside"], bool) or answer["is_80_inside"] != turn.default_is_best:
        problems.append("is_80_inside: True or False: is the default threshold as good as the best, within the noise?")
    return judge(
        problems,
        f"the answer is an interval, {turn.best_low:.0f} to {turn.best_high:.0f}: between two measured points all "
        "thresholds choose alike",
    )


def check_slicing(answer: Any, measurements: Measurements) -> Verdict:
    """answer: dict(few, many): the fastest token slicing at the fewest and at the most tokens per expert measured."""
    problems = missing_parts(answer, ("few", "many"))
    if problems:
        return judge(problems, "")
    info = slicing(measurements)
    for name, point in (("few", 0), ("many", len(info.routed_m) - 1)):
        times = {s: info.time_us[i][point] for i, s in enumerate(info.slicing) if info.time_us[i][point] is not None}
        best = min(times.values())  # type: ignore[type-var]
        given = answer[name]
        if given not in times:
            problems.append(f"{name}: expected one of {', '.join(times)}")
        elif times[given] > best * (1 + TIE):  # type: ignore[operator]
            problems.append(
                f"{name}: at {info.tokens_per_expert[point]:.1f} tokens per expert another slicing is faster "
                f"by more than {TIE:.0%}"
            )
    return judge(problems, "what a slicing can save is the share of 8-token slices that hold no row")


def slicing(measurements: Measurements) -> analysis.SlicingInfo:
    """The measurements behind exercise 4."""
    frame = measurements.of_scenario(points.SLICING_SCENARIO)
    return analysis.slicing_info(frame, projection=points.SLICING_PROJECTION, draw=points.SLICING_DRAW)


FILL_SCHEDULE = Schedule(
    kernel="wgmma", block_m=64, block_n=256, block_k=64, num_warps=8, num_stages=6, swap_ab=True, persistent=True
)


def check_fill(answer: Any) -> Verdict:
    """answer: dict(num_tiles, waves, idle_share) of `FILL_SCHEDULE` for down of `FILL_CARD` on an H200."""
    problems = missing_parts(answer, ("num_tiles", "waves", "idle_share"))
    if problems:
        return judge(problems, "")
    problem = get_scenario(points.FILL_CARD.scenario).problem("down")
    truth = analysis.waves_of(problem, FILL_SCHEDULE, points.FILL_CARD.tok_e(), DEVICES["nvidia_h200"].num_sms)
    if not is_near(answer["num_tiles"], truth.num_tiles):
        problems.append("num_tiles: blocks of rows (each expert rounded up) times blocks of output columns")
    if not is_near(answer["waves"], truth.waves, absolute=0.02):
        problems.append("waves: tiles over the tiles that run at once, SMs times CTAs per SM; keep the fraction")
    if not is_near(answer["idle_share"], truth.idle_share, absolute=0.005):
        problems.append(
            "idle_share: slots without a tile in the last wave, over the slots of all waves, the last one whole "
            "(0.25 for 25 %)"
        )
    return judge(
        problems,
        f"{truth.waves:.2f} waves take the time of {math.ceil(truth.waves)}; stream-K would cut the work evenly",
    )


def beat_draw(measurements: Measurements) -> str:
    """The most skewed routing draw that was recorded; the scenario's own where none is skewed."""
    skews = {text: parse_draw(text).skew for text in measurements.draws(points.BEAT_SCENARIO)}
    if any(skews.values()):
        return max(skews, key=lambda text: skews[text])
    return get_scenario(points.BEAT_SCENARIO).draw


def check_table(answer: Any, measurements: Measurements) -> Verdict:
    """answer: dict routed_m -> Schedule for the gate_up projection of `BEAT_SCENARIO` under `beat_draw`.

    Every schedule must have been measured there, and the traffic-weighted time must beat `present_schedule`'s.
    """
    traffic = points.TRAFFIC
    if not isinstance(answer, Mapping) or set(answer) != set(traffic):
        return judge([f"the answer must be a dict with a Schedule for each of {', '.join(map(str, traffic))}"], "")
    problems, ours, present = [], 0.0, 0.0
    for routed_m, weight in traffic.items():
        schedule = answer[routed_m]
        times = measured_times(measurements, routed_m)
        if not isinstance(schedule, Schedule):
            problems.append(f"{routed_m}: expected a Schedule, not {type(schedule).__name__}")
        elif schedule not in times:
            problems.append(f"{routed_m}: {schedule.label()} was not measured there; choose among the recorded ones")
        else:
            ours += weight * times[schedule]
            present += weight * times[present_schedule(measurements, routed_m)]
    if problems:
        return judge(problems, "")
    gain = 1 - ours / present
    if gain <= 0:
        problems.append(f"weighted time {ours:.1f} us against {present:.1f} us of what you have: not faster")
    return judge(problems, f"{gain:.1%} less time than what you have, on this traffic")


def measured_times(measurements: Measurements, routed_m: int) -> dict[Schedule, float]:
    """Schedule -> recorded time in microseconds at one point of exercise 6, fastest first."""
    frame = measurements.of_scenario(points.BEAT_SCENARIO)
    rows = analysis.candidates(
        analysis.select(frame, projection="gate_up", draw=beat_draw(measurements), routed_m=routed_m)
    ).sort_values("time_us")
    found: dict[Schedule, float] = {}
    for row in rows.to_dict("records"):
        schedule = analysis.schedule_of_row(row)
        if schedule is not None:
            found.setdefault(schedule, float(row["time_us"]))
    return found


def present_schedule(measurements: Measurements, routed_m: int) -> Schedule:
    """What is to be beaten: the shipped table's choice under skew, the untuned default on the table's own draw.

    Raises:
        UserError: that schedule was not recorded there.
    """
    scenario = get_scenario(points.BEAT_SCENARIO)
    times = measured_times(measurements, routed_m)
    if beat_draw(measurements) != scenario.draw:
        resolved = resolve_schedule(scenario.problem("gate_up"), routed_m, scenario.profile, "nvidia_h200")
        if resolved.schedule in times:
            return resolved.schedule  # type: ignore[return-value]
    frame = measurements.of_scenario(points.BEAT_SCENARIO)
    here = analysis.select(frame, projection="gate_up", draw=beat_draw(measurements), routed_m=routed_m, default=True)
    schedule = analysis.schedule_of_row(here.iloc[0].to_dict())
    if schedule is None or schedule not in times:
        raise UserError(f"the default at {routed_m} rows has no recorded time")
    return schedule

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from run_fake_sweep import candidates, plan_of, schedule, sweep
from typer.testing import CliRunner

from chord_lab.cli import app
from chord_lab.cli import winners as winners_command
from chord_lab.measurement.replay import ReplayMeasure
from chord_lab.measurement.rounds import RoundsPolicy, heats
from chord_lab.records import Environment, Method, Record, read_tables, to_table, write_parquet
from chord_lab.records.attempt import Candidate, record_of
from chord_lab.records.decode import decode
from chord_lab.records.intervals import interval, paired_ratio
from chord_lab.sweeps.layers import layers
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.recorded import of_scenario, recorded_plan
from chord_lab.sweeps.run import Budget, run
from chord_lab.sweeps.winners import candidate_times, winners

ENVIRONMENT = Environment(device="nvidia_h200", device_name="NVIDIA H200", num_sms=132, max_sm_mhz=1980.0)
DEFAULT, OTHER, THIRD = schedule(block_m=16), schedule(block_m=32), schedule(block_m=64)


@pytest.fixture(scope="module")
def point():
    return scenario_points("kimi-k2/ep8/decode", tokens=[20], projections=["gate_up"], profile="portable")[0]


def record(point, made, rounds, **over):
    """`rounds` maps a round to a time; a list counts from 0."""
    rounds = dict(enumerate(rounds)) if isinstance(rounds, list) else rounds
    values = {
        "run_id": "r1",
        "date": "2026-11-29T10:00:00+00:00",
        "environment": ENVIRONMENT,
        "times_us": tuple((t, t * 1.002, t * 0.998) for t in rounds.values()),
        "rounds": tuple(rounds),
    }
    return record_of(point, Candidate(schedule=made, default=made == DEFAULT), **{**values, **over})


def failed(point, made, status):
    return record(point, made, [], status=status, reason="why")


def verdict(*records):
    (found,) = winners(to_table(records))
    return found


def test_a_clear_gain_wins_with_its_interval(point):
    w = verdict(record(point, DEFAULT, [300, 301, 300]), record(point, OTHER, [270, 271, 269]))
    assert w.verdict == "win" and w.schedule == OTHER
    assert w.margin == pytest.approx(0.1, abs=0.005)
    assert w.ratio_low < 0.9 < w.ratio_high < 0.92 and w.num_rounds == 3
    assert w.default_time_us == pytest.approx(300, rel=0.01)


def test_a_gain_within_the_noise_is_a_tie_and_the_default_stays(point):
    w = verdict(record(point, DEFAULT, [300, 320, 290]), record(point, OTHER, [295, 300, 296]))
    assert w.verdict == "tie" and w.schedule == DEFAULT and w.best == OTHER


def test_a_gain_below_the_margin_is_a_tie_however_sure(point):
    w = verdict(record(point, DEFAULT, [300.0] * 8), record(point, OTHER, [298.5] * 8))
    assert w.verdict == "tie" and w.ratio_high < 1


def test_one_repeat_proves_nothing(point):
    w = verdict(record(point, DEFAULT, [300]), record(point, OTHER, [200]))
    assert w.verdict == "tie" and w.ratio_low is None and w.best == OTHER


def test_failures_never_win_and_are_counted_by_kind(point):
    """Numbers, nothing, zero and errors mixed: still sorted, and what failed is no winner."""
    w = verdict(
        record(point, DEFAULT, [300, 300, 300]),
        failed(point, OTHER, "crashed"),
        failed(point, THIRD, "wrong_result"),
        failed(point, schedule(block_m=128), "timeout"),
        record(point, schedule(block_m=8), [0.0, 0.0, 0.0]),
    )
    assert w.schedule == DEFAULT and w.candidates == 5 and w.failed == 4
    assert w.failures == {"crashed": 1, "wrong_result": 1, "timeout": 1}


def test_a_wrong_result_with_times_does_not_win(point):
    w = verdict(record(point, DEFAULT, [300] * 3), record(point, OTHER, [100] * 3, status="wrong_result"))
    assert w.schedule == DEFAULT and w.verdict == "tie"


def test_when_everything_failed_there_is_no_winner(point):
    w = verdict(failed(point, DEFAULT, "crashed"), failed(point, OTHER, "timeout"))
    assert (w.verdict, w.schedule, w.time_us, w.failed) == ("none", None, None, 2)


def test_when_the_default_failed_whoever_ran_wins(point):
    w = verdict(failed(point, DEFAULT, "compile_error"), record(point, OTHER, [300, 301, 299]))
    assert w.verdict == "win" and w.schedule == OTHER and w.default_time_us is None


def test_clocks_that_fall_do_not_decide_and_are_flagged(point):
    """15 % over the run. One after the other, the later would look worse; interleaved they are equal."""
    drift = [1 + 0.15 * i / 5 for i in range(6)]
    w = verdict(record(point, DEFAULT, [300 * d for d in drift]), record(point, OTHER, [299.9 * d for d in drift]))
    assert w.verdict == "tie" and any(flag.startswith("drift") for flag in w.flags)
    late = {i + 6: 299.9 * 1.15 for i in range(6)}
    w = verdict(record(point, DEFAULT, [300.0] * 6), record(point, OTHER, late))
    assert w.verdict == "tie" and w.schedule == DEFAULT  # it shares no round with the default: nothing is concluded


def test_a_true_gain_survives_drift(point):
    drift = [1.0, 1.04, 0.97, 1.1, 1.06, 1.15]
    w = verdict(record(point, DEFAULT, [300 * d for d in drift]), record(point, OTHER, [270 * d for d in drift]))
    assert w.verdict == "win" and w.margin == pytest.approx(0.1, abs=0.001)


def test_beside_a_default_that_jumps_alone_times_are_compared_unpaired(point):
    """A win must then beat the default's fastest repeat with its own slowest; the times shown are each one's own."""
    jumping = record(point, DEFAULT, [205, 300, 200, 310, 204])
    slow = record(point, THIRD, [260.0] * 5)
    w = verdict(jumping, slow, record(point, OTHER, [190, 190.5, 190, 190.2, 190.1]))
    assert (w.verdict, w.schedule, w.default_time_us) == ("win", OTHER, 205) and w.time_us == pytest.approx(190.1)
    assert w.ratio_high == pytest.approx(190.5 / 200) and any("unsteady" in flag for flag in w.flags)
    w = verdict(jumping, slow, record(point, OTHER, [199.0] * 5))
    assert (w.verdict, w.schedule, w.best, w.time_us) == ("tie", DEFAULT, OTHER, 205)


def test_who_met_the_bad_repeats_of_a_jumping_default_does_not_lead_for_it(point):
    jumping = record(point, DEFAULT, [200, 200, 400, 400, 400, 200])
    lucky = record(point, THIRD, {2: 250.0, 3: 250.0, 4: 250.0})
    w = verdict(jumping, lucky, record(point, OTHER, [190.0] * 6))
    assert w.best == OTHER and w.verdict == "win" and w.default_time_us == 300
    times = next(iter(candidate_times(to_table([jumping, lucky, record(point, OTHER, [190.0] * 6)])).values()))
    assert times[THIRD].time_us == 250 and times[OTHER].time_us == 190


def test_a_throttled_card_is_flagged(point):
    slow = {"sm_mhz": (1500.0, 1490.0, 1480.0)}
    w = verdict(record(point, DEFAULT, [300] * 3, **slow), record(point, OTHER, [270] * 3, **slow))
    assert any(flag.startswith("throttled") for flag in w.flags)


def test_impossible_times_are_flagged_against_the_runs_own_ceilings(point):
    work = {"run_id": "r1", "date": "2026-11-29T10:00:00+00:00", "environment": ENVIRONMENT, "kind": "ceiling"}
    copy = Record(**work, implementation="copy", times_us=((1000.0,),), work_bytes=4 * 10**9)
    fast = point.num_bytes / 5e6  # 5000 GB/s
    w = verdict(copy, record(point, DEFAULT, [300] * 3), record(point, OTHER, [fast] * 3))
    assert any("impossible" in flag and "a copy reaches 4000" in flag for flag in w.flags)
    w = verdict(replace(copy, run_id="r2"), record(point, DEFAULT, [300] * 3), record(point, OTHER, [fast] * 3))
    assert not any("impossible" in flag for flag in w.flags)  # another run's ceiling says nothing here


def test_a_record_without_rounds_does_not_renumber_the_others(point):
    """Read from an older file: its repeats count from 0, everyone else's rounds stay as they were measured."""
    rows = [record(point, DEFAULT, {0: 300, 1: 301}), record(point, DEFAULT, {7: 400, 8: 401, 9: 402})]
    late = record(point, OTHER, {7: 360, 8: 361, 9: 362})
    alone = verdict(*rows, late)
    assert (alone.verdict, alone.schedule) == ("win", OTHER) and alone.margin == pytest.approx(0.1, abs=0.001)
    beside = verdict(*rows, late, replace(record(point, THIRD, [500, 501, 502]), rounds=()))
    assert (beside.verdict, beside.margin, beside.num_rounds) == ("win", alone.margin, 3)


def test_methods_are_never_ranked_together(point):
    """Hot, cold, and clear-inside of one candidate: three contests, each with its own method."""
    methods = [Method(), Method(l2="warm"), Method(timed="gemm and clear")]
    records = [
        record(point, made, [time] * 3, method=method)
        for method, (made, time) in itertools.product(methods, ((DEFAULT, 300), (OTHER, 250)))
    ]
    records.append(record(point, THIRD, [100] * 3, method=methods[1]))
    found = winners(to_table(records))
    assert len(found) == 3 and sorted(w.candidates for w in found) == [2, 2, 3]
    assert sum(w.schedule == THIRD for w in found) == 1


def test_environments_are_never_ranked_together(point):
    other = replace(ENVIRONMENT, driver="999")
    found = winners(
        to_table(
            [
                record(point, DEFAULT, [300] * 3),
                record(point, OTHER, [100] * 3, environment=other, run_id="r2", date="2026-11-28T00:00:00+00:00"),
            ]
        )
    )
    assert [w.schedule for w in found] == [DEFAULT]


def test_a_prediction_never_takes_the_place_of_a_measurement(point):
    """A sweep with --source predict into the folder of a live run, later: the measured verdict stays."""
    measured = [record(point, DEFAULT, [300] * 3), record(point, OTHER, [270] * 3)]
    guessed = {
        "run_id": "r2",
        "date": "2026-12-24T10:00:00+00:00",
        "source": "predicted",
        "environment": Environment(device="nvidia_h200", device_name="nvidia_h200 (predicted)"),
    }
    w = verdict(*measured, record(point, DEFAULT, [1] * 3, **guessed), record(point, OTHER, [2] * 3, **guessed))
    assert (w.source, w.verdict, w.schedule) == ("live", "win", OTHER)


def test_winners_name_older_runs_and_a_run_cut_short(tmp_path, point, capsys):
    old = record(point, DEFAULT, [300] * 3)
    new = replace(old, run_id="r2", date="2026-12-24T10:00:00+00:00")
    write_parquet([old, new], tmp_path / "records.parquet")
    (tmp_path / "run.json").write_text('{"partial": true}')
    assert len(winners_command.read_winners(tmp_path)) == 1
    said = capsys.readouterr().err
    assert "verdicts are partial" in said and "1 records of older" in said


def test_the_order_of_records_does_not_matter(point):
    made = [record(point, s, [t] * 3) for s, t in ((DEFAULT, 300), (OTHER, 250), (THIRD, 260))]
    results = {(w.schedule, w.verdict) for order in itertools.permutations(made) for w in winners(to_table(order))}
    assert len(results) == 1


def test_peers_and_baseline_stand_beside_every_verdict(point):
    def beside(name, kind, time):
        shown = Candidate(kind=kind, implementation=name, config=name)
        base = {"run_id": "r1", "date": "2026-11-29T10:00:00+00:00", "environment": ENVIRONMENT}
        return record_of(point, shown, **base, times_us=((time,),), rounds=(0,))

    w = verdict(
        record(point, DEFAULT, [300] * 3),
        beside("humming", "peer", 320.0),
        beside("humming_tile", "peer", 310.0),
        beside("torch_dequant_bf16", "baseline", 5000.0),
    )
    assert (w.humming_us, w.humming_best_us, w.baseline_us) == (320.0, 310.0, 5000.0)
    assert w.candidates == 1


def test_the_layer_is_the_sum_of_both_projections(point):
    both = scenario_points("kimi-k2/ep8/decode", tokens=[20], profile="portable")
    table = to_table([r for p in both for r in (record(p, DEFAULT, [300] * 3), record(p, OTHER, [270] * 3))])
    (layer,) = layers(winners(table))
    assert layer.default_time_us == pytest.approx(600) and layer.time_us == pytest.approx(540)
    assert layers([w for w in winners(table) if w.projection == "gate_up"]) == []


@pytest.mark.parametrize("unlike", [{"driver": "999"}, {"kernels": "other"}, {"seed": 1}], ids=str)
def test_a_layer_never_adds_unlike_environments_or_seeds(point, unlike):
    """down measured again elsewhere: there is no layer of the two, and no verdict takes another's place."""
    gate_up, down = scenario_points("kimi-k2/ep8/decode", tokens=[20], profile="portable")
    if "seed" in unlike:
        down = replace(down, routing=replace(down.routing, seed=1))
        unlike = {}
    later = {
        "run_id": "r2",
        "date": "2026-12-01T10:00:00+00:00",
        "environment": replace(ENVIRONMENT, **unlike),
    }
    whole = [record(p, DEFAULT, [300] * 3) for p in (gate_up, replace(down, routing=gate_up.routing))]
    again = record(down, DEFAULT, [200] * 3, **later)
    assert layers(winners(to_table([whole[0], again]))) == []
    if unlike:
        both = winners(to_table([*whole, again, record(gate_up, DEFAULT, [201] * 3, **later)]))
        assert [layer.time_us for layer in layers(both)] == [pytest.approx(401)]
    else:
        assert [layer.time_us for layer in layers(winners(to_table([*whole, again])))] == [pytest.approx(600)]


def test_candidate_times_cancel_drift(point):
    table = to_table(
        [record(point, DEFAULT, [300, 330]), record(point, OTHER, {1: 297}), record(point, THIRD, {0: 285})]
    )
    (found,) = candidate_times(table).values()
    times = {schedule: timed.time_us for schedule, timed in found.items()}
    assert list(found[OTHER].ratios) == pytest.approx([0.9]) and len(found[DEFAULT].ratios) == 2
    assert times[OTHER] / times[DEFAULT] == pytest.approx(0.9) and times[THIRD] / times[DEFAULT] == pytest.approx(0.95)


@pytest.mark.parametrize("count", [2, 3, 5, 6, 7, 9, 15])
def test_intervals_cover_the_true_ratio_as_often_as_they_claim(count):
    generator = np.random.default_rng(count)
    inside = 0
    for _ in range(800):
        found = interval(0.9 * np.exp(generator.normal(0, 0.02, count)))
        inside += found.low <= 0.9 <= found.high
    assert inside / 800 >= 0.93


def test_an_odd_repeat_does_not_widen_an_interval_of_many():
    quiet = interval(np.array([0.90, 0.901, 0.899, 0.9, 0.902, 0.898, 0.9, 0.901, 0.899]))
    odd = interval(np.array([0.90, 0.901, 0.899, 0.9, 0.902, 0.898, 0.9, 0.901, 1.2]))
    assert odd.high - odd.low < 2 * (quiet.high - quiet.low) and odd.estimate == pytest.approx(0.9, abs=0.002)


def test_nothing_pairs_without_a_common_round():
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None
    assert paired_ratio({0: 0.0}, {0: 1.0}) is None
    assert math.isinf(paired_ratio({0: 1.0}, {0: 2.0}).high)


def test_heats_hold_everyone_once_and_the_reference_always():
    keys = [f"k{i}" for i in range(25)]
    orders = set()
    for turn in range(6):
        groups = heats(keys, "k0", 12, turn)
        assert all("k0" in group for group in groups)
        assert sorted(k for g in groups for k in g if k != "k0") == sorted(keys[1:])
        orders.add(tuple(map(tuple, groups)))
    assert len(orders) == 6  # the order changes from round to round


def test_survivors_keep_whoever_may_still_win():
    policy = RoundsPolicy()
    medians = {"d": {0: 100.0}, "a": {0: 95.0}, "b": {0: 110.0}, "c": {0: 300.0}}
    assert policy.survivors(list(medians), medians, "d", 1) == ["a", "d", "b"]
    later = {k: dict.fromkeys(range(3), v[0]) for k, v in medians.items()}
    assert policy.survivors(list(later), later, "d", 3) == ["a", "d"]


def test_replay_gives_back_the_same_verdicts_and_says_recorded(tmp_path):
    plan = plan_of(candidates()[:24], tokens=(20, 30))
    sweep(tmp_path / "live", plan)
    table, _ = read_tables(tmp_path / "live")
    rows, _ = of_scenario(table, "kimi-k2/ep8/decode")
    done = run(recorded_plan(rows), ReplayMeasure(rows), tmp_path / "replay")
    again, _ = read_tables(tmp_path / "replay")
    live, replayed = winners(table), winners(again)
    assert [replace(w, source="live") for w in replayed] == live
    assert {w.source for w in replayed} == {"recorded"} and done.progress.finished == 48
    assert done.environment.device == "nvidia_h200"


def test_a_resumed_replay_adds_what_is_missing_and_loses_nothing(tmp_path):
    sweep(tmp_path / "live", plan_of(candidates()[:20]))
    table, _ = read_tables(tmp_path / "live")
    plan = recorded_plan(of_scenario(table, "kimi-k2/ep8/decode")[0])
    counts = []
    for budget in (Budget(candidates=5), Budget(candidates=5), Budget(), Budget(candidates=3)):
        done = run(plan, ReplayMeasure(table), tmp_path / "replay", resume=True, budget=budget)
        kept, _ = read_tables(tmp_path / "replay")
        counts.append((done.progress.finished, kept["kind"].to_pylist().count("candidate"), done.cut_short))
    # without a budget all is answered anew: what is recorded may have changed since
    assert counts == [(5, 5, True), (5, 10, True), (20, 20, False), (0, 20, False)]
    assert len(kept) == len(table) and [replace(w, source="live") for w in winners(kept)] == winners(table)


def test_replay_answers_the_plan_it_is_given(tmp_path):
    everything = candidates()[:10]
    sweep(tmp_path / "live", plan_of(everything))
    table, _ = read_tables(tmp_path / "live")
    unknown = Candidate(schedule=schedule(num_stages=7))
    done = run(plan_of([everything[0], everything[4], unknown]), ReplayMeasure(table), tmp_path / "replay")
    assert done.progress.finished == 2
    assert any("1 candidates of the plan were never recorded" in note for note in done.progress.notes)


def test_many_replayed_candidates_give_the_winner_that_was_made(point, tmp_path):
    """50000 rows at eight points, columnar all the way; the planted winner of each point is found."""
    points = scenario_points("kimi-k2/ep8/decode", tokens=[20, 30, 40, 50], profile="portable")
    from chord_lab.sweeps.space import schedules

    chosen = list(itertools.islice(schedules("portable", "full"), 800))
    generator = random.Random(0)
    records, planted = [], {}
    for p in points:
        winner = planted[(p.projection, p.routed_m)] = generator.randrange(1, len(chosen))
        for index, made in enumerate(chosen):
            time = 300.0 if index == winner else 400.0 + generator.random() * 100
            shown = Candidate(schedule=made, default=index == 0)
            base = {"run_id": "r", "date": "2026-11-29T10:00:00+00:00", "environment": ENVIRONMENT}
            records.append(record_of(p, shown, **base, times_us=((time,), (time,), (time,)), rounds=(0, 1, 2)))
    rows, _ = of_scenario(to_table(records), "kimi-k2/ep8/decode")
    plan = recorded_plan(rows)
    assert len(plan) == len(records) == 6400
    run(plan, ReplayMeasure(rows), tmp_path)
    found = winners(read_tables(tmp_path)[0])
    assert {(w.projection, w.routed_m): chosen.index(w.schedule) for w in found} == planted


def test_decoding_tells_equal_from_unlike_points(point):
    other = scenario_points("kimi-k2/ep8/decode", tokens=[20], seed=1, projections=["gate_up"], profile="portable")[0]
    decoded = decode(to_table([record(p, s, [1.0]) for p in (point, other) for s in (DEFAULT, OTHER)]))
    assert decoded.points == [point, other] and decoded.point_of_row.tolist() == [0, 0, 1, 1]
    assert decoded.candidate_of_row.tolist() == [0, 1, 0, 1]


def test_winners_on_the_command_line(tmp_path):
    sweep(tmp_path, plan_of(candidates()[:8]))
    result = CliRunner().invoke(app, ["winners", str(tmp_path), "--json"])
    (row,) = json.loads(result.stdout)
    needed = {
        "projection",
        "routed_m",
        "schedule",
        "time_us",
        "default_time_us",
        "verdict",
        "candidates",
        "failed",
        "source",
    }
    assert needed <= set(row) and row["candidates"] == 8 and row["source"] == "live"
    assert "gate_up" in CliRunner().invoke(app, ["winners", str(tmp_path)]).stdout

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from run_fake_sweep import schedule, settings
from typer.testing import CliRunner
from w4a16_moe.resolve import resolve_schedule

from chord_lab.cli import app, tune  # noqa: F401 (registers the command)
from chord_lab.errors import UserError
from chord_lab.measurement.live import LiveMeasure
from chord_lab.records import Environment, read_records, read_tables, to_table, write_parquet
from chord_lab.records.attempt import Candidate, record_of
from chord_lab.sweeps.plan import Plan
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.run import run
from chord_lab.sweeps.traffic import Traffic, read_traffic, traffic_winners

SMALL, LARGE, DEFAULT = schedule(block_m=16), schedule(block_m=32), schedule(block_m=64)
# microseconds by draw: small tiles suit uniform routing, large ones a skewed one
TIMES = {
    "uniform": {SMALL: 90.0, LARGE: 95.0, DEFAULT: 120.0},
    "zipf:1.0": {SMALL: 150.0, LARGE: 110.0, DEFAULT: 130.0},
}


def table_of(tmp_path, tokens=(20, 40), times=None, projections=("gate_up", "down")):
    """Three repeats of each candidate at each point, a thousandth apart."""
    points = scenario_points(
        "kimi-k2/ep8/decode", tokens=list(tokens), draws=list(TIMES), projections=projections, profile="portable"
    )
    environment = Environment(device="nvidia_h200", device_name="NVIDIA H200", num_sms=132)
    records = []
    for point in points:
        for made, time_us in (times or (lambda p: TIMES[p.routing.draw]))(point).items():
            even = isinstance(time_us, float)
            repeats = tuple((time_us * (1 + 0.001 * i),) for i in range(3)) if even else time_us
            records.append(
                record_of(
                    point,
                    Candidate(schedule=made, default=made == DEFAULT),
                    run_id="r",
                    date="2026-11-29T10:00:00+00:00",
                    source="recorded",
                    environment=environment,
                    times_us=repeats,
                    rounds=(0, 1, 2),
                )
            )
    path = write_parquet(to_table(records), tmp_path / "made.parquet")
    return read_tables(path)[0]


def mix(uniform, points=None):
    draws = {"uniform": uniform, "zipf:1.0": 1 - uniform}
    return Traffic(
        scenario="kimi-k2/ep8/decode",
        points=points or {20: 0.5, 40: 0.5},
        draws={draw: share for draw, share in draws.items() if share},
    )


@pytest.mark.parametrize(("uniform", "expected"), [(1.0, SMALL), (0.95, SMALL), (0.5, LARGE), (0.0, LARGE)])
def test_the_mix_of_draws_decides(tmp_path, uniform, expected):
    found = traffic_winners(table_of(tmp_path), mix(uniform))
    assert {w.schedule for w in found} == {expected} and len(found) == 4
    want = sum(share * TIMES[draw][expected] for draw, share in mix(uniform).draws.items())
    assert found[0].time_us == pytest.approx(want, rel=2e-3)


def test_the_verdict_says_for_what_mix(tmp_path):
    found = traffic_winners(table_of(tmp_path), mix(0.5))
    assert {w.draw for w in found} == {"uniform 50%, zipf:1.0 50%"}


def noisy(time_us):
    """Three repeats that a gain of a few percent does not stand out from."""
    return tuple((time_us * factor,) for factor in (1.0, 1.1, 0.92))


def test_the_bound_of_a_mix_holds_for_every_schedule_not_the_best_of_a_draw_alone(tmp_path):
    """LARGE is second under uniform and first under zipf: it beats the default under both, so it is proved."""
    (first, *_) = traffic_winners(table_of(tmp_path), mix(0.5))
    assert (first.schedule, first.verdict) == (LARGE, "win")
    assert first.ratio_high == pytest.approx((95 + 110) / (120 + 130), rel=1e-3)


def test_the_default_stays_where_the_mix_proves_nothing(tmp_path):
    """Faster by less than the repeats differ: no table may change for that, and no row may claim it did not."""

    def times(point):
        return {SMALL: noisy(115.0), LARGE: 118.0, DEFAULT: 120.0}

    table = table_of(tmp_path, times=times)
    for w in traffic_winners(table, mix(0.5)):
        assert (w.schedule, w.verdict, w.margin) == (LARGE, "win", pytest.approx(2 / 120))
    table = table_of(tmp_path, times=lambda point: {**times(point), LARGE: 119.5})
    for w in traffic_winners(table, mix(0.5)):
        assert (w.schedule, w.verdict) == (DEFAULT, "tie")
        assert w.time_us == w.default_time_us and w.margin == 0


def test_what_was_measured_twice_in_unlike_ways_is_not_mixed(tmp_path):
    records = read_records(tmp_path).records if table_of(tmp_path) else []
    twice = [replace(r, routing=replace(r.routing, seed=1)) for r in records]
    with pytest.raises(UserError, match=r"at 20 tokens under uniform was measured twice.*seeds 0 and 1"):
        traffic_winners(to_table([*records, *twice]), mix(1.0))


def test_neighbours_share_a_row_within_the_margin_and_weights_choose_it(tmp_path):
    """At 20 tokens A leads by half the margin, at 40 B does: one row, served by what the frequent count prefers."""

    def times(point):
        lead = SMALL if point.num_tokens == 20 else LARGE
        return {s: (100.0 if s == lead else 100.5) for s in (SMALL, LARGE)} | {DEFAULT: 130.0}

    table = table_of(tmp_path, times=times)
    for points, expected in (({20: 0.9, 40: 0.1}, SMALL), ({20: 0.1, 40: 0.9}, LARGE)):
        found = traffic_winners(table, mix(1.0, points))
        assert {w.schedule for w in found} == {expected}


def test_neighbours_beyond_the_margin_keep_rows_of_their_own(tmp_path):
    def times(point):
        lead = SMALL if point.num_tokens == 20 else LARGE
        return {s: (100.0 if s == lead else 105.0) for s in (SMALL, LARGE)} | {DEFAULT: 130.0}

    found = traffic_winners(table_of(tmp_path, times=times), mix(1.0))
    assert [w.schedule for w in found if w.projection == "gate_up"] == [SMALL, LARGE]


def test_a_point_without_records_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gate_up at 30 tokens under uniform: sweep it first"):
        traffic_winners(table_of(tmp_path), mix(1.0, {20: 0.5, 30: 0.5}))


def test_a_profile_that_lacks_part_of_the_mix_is_left_out_and_named(tmp_path):
    records = read_records(tmp_path).records if table_of(tmp_path) else []
    other = [replace(r, profile="h200_decode_ep8") for r in records if r.routing.draw == "uniform"]
    said = []
    found = traffic_winners(to_table([*other, *records]), mix(0.5), say=said.append)
    assert {w.profile for w in found} == {"portable"}
    (line,) = said
    assert line.startswith("profile h200_decode_ep8 is left out") and "under zipf:1" in line


BAD = {
    "scenario: kimi-k2/ep8/decode\npoints: {20: -1}": "must be a number of at least 0",
    "scenario: kimi-k2/ep8/decode\npoints: {20: 0}": "sum to 0",
    "scenario: kimi-k2/ep8/decode\npoints: [20]": "maps each entry to its weight",
    "scenario: kimi-k2/ep8/decode\npoints: {a: 1}": "token counts",
    "scenario: kimi-k2/ep8/decode\nweights: {20: 1}": "unknown key 'weights'",
    "points: {20: 1}": "scenario is missing",
    "- 1": "must be a mapping",
    "a: [": "not YAML",
    "scenario: nobody/ep8/decode": "unknown scenario",
    "scenario: kimi-k2/ep8/decode\npoints: {20: 5, 20: 1}": "20 twice",
    "scenario: kimi-k2/ep8/decode\ndraws: {zipf:1: 1, zipf:1.0: 2}": "'zipf:1.0' names 'zipf:1' again",
    "scenario: kimi-k2/ep8/decode\npoints: {20: .nan}": "must be a number of at least 0",
    "scenario: kimi-k2/ep8/decode\npoints: {20: .inf}": "must be a number of at least 0",
    f"scenario: kimi-k2/ep8/decode\npoints: {{20: {10**400}}}": "must be a number of at least 0",
    "scenario: kimi-k2/ep8/decode\npoints: {? [1, 2] : 3}": "not YAML",
}


@pytest.mark.parametrize("text", BAD, ids=lambda t: t.replace("\n", " ")[:40])
def test_bad_traffic_files_are_refused_in_one_line(tmp_path, text):
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=BAD[text]) as caught:
        read_traffic(path)
    assert "\n" not in str(caught.value)


def test_weights_become_shares(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text('scenario: kimi-k2/ep8/decode\npoints: {20: 3, 40: 1}\ndraws: {uniform: 7, "zipf:1.0": 3}\n')
    made = read_traffic(path)
    assert made.points == {20: 0.75, 40: 0.25} and made.draws == {"uniform": 0.7, "zipf:1.0": 0.3}


def test_tune_with_a_mix_writes_a_table_that_says_so(tmp_path):
    table_of(tmp_path / "data")
    mix_file = tmp_path / "mix.yaml"
    mix_file.write_text('scenario: kimi-k2/ep8/decode\npoints: {20: 3, 40: 1}\ndraws: {uniform: 1, "zipf:1.0": 9}\n')
    out = tmp_path / "out"
    command = ["tune", "--traffic", str(mix_file), "--data", str(tmp_path / "data"), "--out", str(out), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    tables = json.loads(result.stdout)["tables"]
    header = json.loads((out / "tables" / "nvidia_h200" / "portable.json").read_text())["provenance"]["tuned_for"]
    assert header["traffic"] == {"points": {"20": 0.75, "40": 0.25}, "draws": {"uniform": 0.1, "zipf:1.0": 0.9}}
    assert len(tables) == 1
    problem = scenario_points("kimi-k2/ep8/decode", tokens=[20], profile="portable")[0].problem
    resolved = resolve_schedule(problem, 160, "portable", "nvidia_h200", tables=out / "tables")
    assert resolved.schedule in (LARGE, DEFAULT)


def test_replay_of_two_draws_keeps_them_apart(tmp_path):
    """A live (fake) sweep under two draws gives verdicts draw by draw; only a mix joins them."""
    points = scenario_points(
        "kimi-k2/ep8/decode", tokens=[20], draws=["uniform", "zipf:1.0"], projections=["gate_up"], profile="portable"
    )
    chosen = [Candidate(schedule=DEFAULT, default=True), Candidate(schedule=LARGE)]
    plan = Plan(points, chosen, np.array([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=np.int32))
    run(plan, LiveMeasure(settings()), tmp_path)
    found = traffic_winners(read_tables(tmp_path)[0], mix(0.5, {20: 1.0}))
    assert len(found) == 1 and found[0].candidates == 4

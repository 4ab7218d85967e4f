from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner
from w4a16_moe.devices import DEVICES

from chord_lab.cli import app, predict, sweep, winners  # noqa: F401 (they register their commands)
from chord_lab.errors import UserError
from chord_lab.measurement.features import CONTINUOUS, FLAGS, features, matrix, occupancy
from chord_lab.measurement.predict import PredictMeasure, Sample, evaluate, fit, samples_of
from chord_lab.records import CompileFacts, Environment, read_tables, to_table, write_parquet
from chord_lab.records.attempt import record_of
from chord_lab.sweeps.plan import make_plan
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.run import run
from chord_lab.sweeps.winners import winners as verdicts

H200 = DEVICES["nvidia_h200"]


def true_us(point, schedule):
    """A made-up machine: waves of padded tiles against a memory floor, and knobs that matter a little."""
    tiles = point.routing.num_m_blocks(schedule.block_m) * (point.problem.N // schedule.block_n)
    slots = H200.num_sms * (2 if schedule.num_warps <= 4 else 1)
    step = point.problem.K * (schedule.block_m + 24) * schedule.block_n / 6e6
    memory = point.num_bytes / 4.0e6
    knob = 1 + 0.05 * abs(schedule.num_stages - 4) + (0.04 if schedule.block_k == 64 else 0.0)
    noise = zlib.crc32(f"{schedule}{point.routed_m}".encode()) % 100 / 1e4
    return 6 + math.hypot(memory, math.ceil(tiles / slots) * step / 40) * knob * (1 + noise)


@pytest.fixture(scope="module")
def plan():
    points = scenario_points("kimi-k2/ep8/decode", tokens=[8, 12, 20, 30, 40, 50, 64, 80, 96, 128], profile="portable")
    return make_plan(points, H200)


@pytest.fixture(scope="module")
def samples(plan):
    facts = CompileFacts(registers=120, smem_bytes=60000)
    return [Sample(p, c.schedule, facts, true_us(p, c.schedule)) for p, cs in plan.by_point() for c in cs]


def test_features_have_all_their_names(plan):
    point, candidates = next(plan.by_point())
    row = features(point, candidates[0].schedule, None, H200)
    assert set(row) == {*CONTINUOUS, *FLAGS}
    assert np.isfinite(matrix([row])).all()


def test_occupancy_follows_registers_and_shared_memory(plan):
    schedule = plan.candidates[0].schedule
    few = occupancy(schedule, CompileFacts(registers=32, smem_bytes=1000), H200)
    assert occupancy(schedule, CompileFacts(registers=255, smem_bytes=1000), H200) < few
    assert occupancy(schedule, CompileFacts(registers=32, smem_bytes=200000), H200) == 1


def test_held_out_points_are_predicted_and_their_winner_found(samples):
    result = evaluate(samples, H200)
    assert result.points == 20 and result.records == len(samples)
    assert result.median_error < 0.08
    assert result.median_regret <= 0.05


def test_no_draw_of_a_held_out_token_count_is_fitted_to(samples, monkeypatch):
    few = samples[::7]
    again = [replace(s, point=replace(s.point, routing=replace(s.point.routing, draw="balanced", seed=1))) for s in few]
    fitted = []

    def spy(rest, device):
        fitted.append({s.point.num_tokens for s in rest})
        return fit(rest, device)

    monkeypatch.setattr("chord_lab.measurement.predict.fit", spy)
    evaluate([*few, *again], H200, folds=2)
    assert len(fitted) == 2 and not set.intersection(*fitted)


def test_a_shuffled_target_is_not_predicted(samples):
    """The evaluation can fail: times that have nothing to do with the schedule give a large error."""
    generator = np.random.default_rng(0)
    times = generator.permutation([s.time_us for s in samples])
    shuffled = [Sample(s.point, s.schedule, s.facts, float(t)) for s, t in zip(samples, times, strict=True)]
    assert evaluate(shuffled, H200).median_error > 0.2


def test_order_puts_the_fast_first(samples, plan):
    model = fit(samples, H200)
    point, candidates = next(plan.by_point())
    ordered = model.order(point, [c.schedule for c in candidates])
    times = [true_us(point, s) for s in ordered]
    assert times[0] <= 1.01 * min(times)
    assert np.mean(times[: len(times) // 4]) < np.mean(times[-len(times) // 4 :])


def test_too_few_records_and_unknown_kernels_are_refused(samples):
    with pytest.raises(UserError, match="too few to fit"):
        fit(samples[:5], H200)
    from w4a16_moe.schedule import Schedule

    other = Schedule(kernel="wgmma", block_m=64, block_n=128, block_k=64, num_warps=8, num_stages=4, swap_ab=True)
    with pytest.raises(UserError, match="no records of kernel wgmma"):
        fit(samples, H200).predict_us(samples[0].point, [other])


@pytest.fixture(scope="module")
def data(samples, tmp_path_factory):
    """The made-up machine's measurements as a records file."""
    environment = Environment(device="nvidia_h200", device_name="NVIDIA H200", num_sms=132)
    records = []
    for sample in samples:
        from chord_lab.records.attempt import Candidate

        times = tuple((sample.time_us * (1 + 0.001 * i),) for i in range(3))
        records.append(
            record_of(
                sample.point,
                Candidate(schedule=sample.schedule),
                run_id="r",
                date="2026-11-29T10:00:00+00:00",
                environment=environment,
                times_us=times,
                rounds=(0, 1, 2),
                facts=sample.facts,
            )
        )
    return write_parquet(to_table(records), tmp_path_factory.mktemp("data") / "r.parquet")


def test_samples_come_back_from_a_records_file(data, samples):
    table, _ = read_tables(data)
    found = samples_of(table, H200)
    assert len(found) == len(samples)
    assert {s.schedule for s in found} == {s.schedule for s in samples}
    assert found[0].facts.registers == 120


def test_predict_answers_a_plan_and_says_that_it_predicted(samples, plan, tmp_path):
    run(plan, PredictMeasure(fit(samples, H200), "made-up records"), tmp_path)
    table, _ = read_tables(tmp_path)
    assert len(table) == len(plan)
    found = verdicts(table)
    assert {w.source for w in found} == {"predicted"} and {w.verdict for w in found} == {"tie"}
    assert all("predicted, not measured" in w.flags for w in found)


def test_evaluate_on_the_command_line(data):
    result = CliRunner().invoke(app, ["predict", "--evaluate", "--data", str(data), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["median_regret"] <= 0.05 and report["points"] == 20
    shown = CliRunner().invoke(app, ["predict", "--evaluate", "--data", str(data)])
    assert "regret of the predicted winner: median" in shown.stdout


def test_predict_a_scenario_on_the_command_line(data):
    arguments = ["predict", "kimi-k2/ep8/decode", "--profile", "portable", "--data", str(data), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["points"]
    assert len(rows) == 8 and all(row["source"] == "predicted" for row in rows)
    assert all(row["time_us"] <= row["default_time_us"] for row in rows)

from __future__ import annotations

from collections import Counter

import pytest
from fake_bench import fake_time_us
from run_fake_sweep import settings
from test_sweep_engine import ours
from w4a16_moe.devices import DEVICES

from chord_lab.errors import UserError
from chord_lab.measurement.live import LiveMeasure
from chord_lab.records import read_records, read_tables
from chord_lab.sweeps import space
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.run import Budget, run
from chord_lab.sweeps.search import SearchMeasure, search_plan
from chord_lab.sweeps.space import default_schedule
from chord_lab.sweeps.winners import winners

pytest.importorskip("optuna")
H200 = DEVICES["nvidia_h200"]


def search(directory, per_point=36, resume=False, budget=None, sampler="tpe", kind="full", **bench):
    points = scenario_points("kimi-k2/ep8/decode", tokens=[50], projections=["gate_up"], profile="portable")
    measure = SearchMeasure(
        LiveMeasure(settings(bench_settings=bench)).session,
        H200,
        directory,
        sampler=sampler,
        per_point=per_point,
        seed=1,
        space=kind,
    )
    return run(search_plan(points, H200), measure, directory, resume=resume, budget=budget or Budget())


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("search")
    return directory, search(directory, per_point=48)


def test_a_search_finds_good_schedules_in_a_fraction_of_the_space(searched):
    directory, _ = searched
    records = [r for r in ours(directory) if not r.default]
    assert len({r.schedule for r in records}) == len(records) == 48
    (winner,) = winners(read_tables(directory)[0])
    (point,) = scenario_points("kimi-k2/ep8/decode", tokens=[50], projections=["gate_up"], profile="portable")
    legal = [v.schedule for v in space.candidates(point, H200, "full") if not v.rule]
    times = sorted(fake_time_us(s.to_dict(), 400) for s in legal)
    assert len(legal) > 1000 and winner.time_us <= times[len(times) // 20]
    assert not winner.flags  # every batch was timed beside the default


def test_peers_and_ceilings_are_measured_once_a_search(searched):
    kinds = Counter(r.implementation for r in read_records(searched[0]).records)
    assert kinds["torch_dequant_bf16"] == 1 and kinds["copy"] == 2


def test_proposals_that_may_not_run_are_moved_not_launched(searched):
    directory, done = searched
    assert any("moved to the nearest" in note for note in done.progress.notes)
    assert {r.status for r in ours(directory)} == {"ok"}


def test_a_search_goes_on_where_it_stopped(tmp_path):
    search(tmp_path, per_point=8)
    first = {r.schedule for r in ours(tmp_path)}
    search(tmp_path, per_point=16, resume=True)
    everything = [r for r in ours(tmp_path) if not r.default]
    assert len({r.schedule for r in everything}) == len(everything) == 16
    assert first < {r.schedule for r in ours(tmp_path)}
    assert len({r.run_id for r in read_records(tmp_path).records}) == 1


def test_trials_of_another_environment_do_not_count(tmp_path):
    search(tmp_path, per_point=8)
    search(tmp_path, per_point=8, resume=True, device="NVIDIA H100 80GB HBM3")
    tried = Counter(r.environment.device for r in ours(tmp_path) if not r.default)
    assert tried == {"nvidia_h200": 8, "nvidia_h100_80gb_hbm3": 8}


def test_an_unknown_sampler_is_refused(tmp_path):
    with pytest.raises(UserError, match="legal are tpe, grid"):
        search(tmp_path, sampler="random")


def test_grid_sampler_covers_a_small_space_and_stops(tmp_path):
    search(tmp_path, per_point=1000, sampler="grid", kind="record")
    (point,) = scenario_points("kimi-k2/ep8/decode", tokens=[50], projections=["gate_up"], profile="portable")
    legal = {v.schedule for v in space.candidates(point, H200, "record") if not v.rule}
    assert {r.schedule for r in ours(tmp_path)} == legal | {default_schedule(point, H200)}

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from run_fake_sweep import candidates as fake_candidates
from run_fake_sweep import plan_of
from typer.testing import CliRunner
from w4a16_moe.devices import DEVICES
from w4a16_moe.legality import why_illegal
from w4a16_moe.profiles import get_profile
from w4a16_moe.schedule import Schedule

from chord_lab.cli import app, record, sweep, tune  # noqa: F401 (they register their commands)
from chord_lab.errors import UserError
from chord_lab.measurement import versions
from chord_lab.measurement.nvml import Nvml, visible_gpus
from chord_lab.measurement.versions import kernels_hash
from chord_lab.records import Environment, Method, RoutingRef, write_parquet
from chord_lab.records.attempt import record_of
from chord_lab.sweeps import space
from chord_lab.sweeps.plan import make_plan
from chord_lab.sweeps.points import scenario_points

H200 = DEVICES["nvidia_h200"]


def points(tokens=(20, 50), **over):
    return scenario_points("kimi-k2/ep8/decode", tokens=list(tokens), **{"profile": "portable", **over})


@pytest.mark.parametrize("name", space.SPACES)
@pytest.mark.parametrize("profile", ["portable", "h200_decode_ep8", "h200_prefill_ep8"])
def test_every_space_offers_legal_candidates_and_no_other(profile, name):
    (point,) = points([50], projections=["gate_up"], profile=profile)
    verdicts = list(space.candidates(point, H200, name))
    legal = [v.schedule for v in verdicts if not v.rule]
    assert legal and len(set(legal)) == len(legal)
    assert all(why_illegal(s, point.problem, get_profile(profile), H200) is None for s in legal)
    assert all(v.reason and "\n" not in v.reason for v in verdicts if v.rule)


def test_bad_candidates_among_good_ones_are_refused_by_name():
    (point,) = points([50], projections=["gate_up"])
    good = {"kernel": "portable", "block_m": 16, "block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 3}
    profile = get_profile("portable")

    def rule(**over):
        return space.judge(Schedule(**{**good, "swap_ab": True, **over}), point, profile, H200).rule

    assert rule() == ""
    assert rule(block_k=16) == "block_k"
    assert rule(block_m=128) == space.FITS_LOAD
    assert rule(block_m=8, swap_ab=False) == "MMA shape"
    assert rule(block_n=96) == "block_n"


def test_a_tile_that_the_load_never_fills_is_left_out_and_so_is_one_that_rereads_weights():
    (light,) = points([20], projections=["gate_up"])
    heavy = scenario_points("kimi-k2/ep8/prefill", tokens=[16384], projections=["gate_up"], profile="portable")[0]
    assert {v.schedule.block_m for v in space.candidates(light, H200) if not v.rule} == {8, 16}
    assert min(v.schedule.block_m for v in space.candidates(heavy, H200) if not v.rule) == 64


def test_the_default_is_tried_first_at_every_point():
    plan = make_plan(points(), H200)
    for point, chosen in plan.by_point():
        assert chosen[0].default and chosen[0].schedule == space.default_schedule(point, H200)
        assert sum(c.default for c in chosen) == 1
        assert len({c.schedule for c in chosen}) == len(chosen)


def test_an_order_puts_guesses_behind_the_default():
    plan = make_plan(points([50]), H200, order=lambda _, schedules: sorted(schedules, key=lambda s: -s.num_stages))
    for _, chosen in plan.by_point():
        stages = [c.schedule.num_stages for c in chosen[1:]]
        assert stages == sorted(stages, reverse=True)


def test_a_limited_plan_keeps_every_points_default():
    plan = make_plan(points(), H200)
    small = plan.limited(10)
    assert len(small) == 10
    assert all(chosen[0].default for _, chosen in small.by_point())
    assert len(plan.limited(10**6)) == len(plan)


def test_what_is_done_is_left_out():
    plan = plan_of(fake_candidates()[:6])
    point, chosen = next(plan.by_point())
    rest = plan.without({chosen[1].key_at(point), chosen[4].key_at(point)})
    assert [c for _, cs in rest.by_point() for c in cs] == [chosen[0], chosen[2], chosen[3], chosen[5]]


def test_a_point_without_rows_has_no_candidates():
    (point,) = points([20], projections=["gate_up"])
    empty = RoutingRef(**{**point.routing.__dict__, "num_tokens": 0, "tok_e": (0,) * 48})
    plan = make_plan([replace(point, routing=empty, num_tokens=0)], H200)
    assert len(plan) == 0 and plan.refused["no rows"].count == 1


def test_unknown_spaces_profiles_devices_projections_are_refused():
    (point,) = points([20], projections=["gate_up"])
    with pytest.raises(UserError, match="legal: focus, record, full"):
        list(space.candidates(point, H200, "huge"))
    with pytest.raises(UserError, match="profile portable runs portable, none of wgmma"):
        list(space.candidates(point, H200, kernels=["wgmma"]))
    with pytest.raises(UserError, match="known: nvidia_h200"):
        space.device_named("tesla_t4")
    with pytest.raises(UserError, match="legal: gate_up, down"):
        points([20], projections=["up"])


def test_a_points_routing_depends_on_its_own_seed_alone():
    alone = points([50])[0].routing
    among = next(p for p in points([20, 30, 50, 64]) if p.num_tokens == 50).routing
    assert alone == among and points([50], seed=1)[0].routing != alone


def test_both_projections_share_a_routing():
    gate_up, down = points([20])
    assert gate_up.routing == down.routing and (gate_up.projection, down.projection) == ("gate_up", "down")
    assert (gate_up.problem.top_k, down.problem.top_k) == (8, 1)


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_plan_only_counts_candidates_refusals_and_time():
    result = invoke("sweep", "kimi-k2/ep8/decode", "--plan-only", "--source", "live", "--profile", "portable", "--json")
    plan = json.loads(result.stdout)
    assert plan["points"] == 38 and plan["candidates"] > 500 and plan["num_refused"] > 0
    assert all(r["count"] and r["example"] for r in plan["refused"].values())
    shown = invoke("sweep", "kimi-k2/ep8/decode", "--plan-only", "--source", "live", "--profile", "portable").stdout
    assert "expected time live" in shown and "refused" in shown


BAD = {
    ("sweep", "kimi-k2/ep9/decode"): "does not divide",
    ("sweep", "nobody/ep8/decode"): "unknown scenario",
    ("sweep", "kimi-k2/ep8/decode", "--source", "guess"): "legal are auto, live, replay, predict",
    ("sweep", "kimi-k2/ep8/decode", "--source", "live"): "needs a CUDA GPU",
    ("sweep", "kimi-k2/ep8/decode", "--dask", "local"): "no GPU is visible",
    ("sweep", "kimi-k2/ep8/decode", "--dask", "local", "--source", "replay"): "--dask measures live",
    ("sweep", "kimi-k2/ep8/decode", "--search", "luck"): "legal are grid, optuna, optuna-grid",
    ("sweep", "kimi-k2/ep8/decode", "--budget-seconds", "0"): "must be more than 0",
    ("sweep", "kimi-k2/ep8/decode", "--plan-only", "--source", "live", "--points", "few"): "legal are all, published",
    ("sweep", "kimi-k2/ep8/decode", "--plan-only", "--source", "live", "--device", "gtx"): "known: nvidia_h200",
    ("sweep", "kimi-k2/ep8/decode", "--plan-only", "--source", "live", "--draw", "odd"): "unknown draw",
    ("winners", "/nowhere/at/all"): "does not exist",
    ("tune", "kimi-k2/ep8/decode", "--traffic", "/nowhere.yaml"): "cannot be read",
    ("record",): "needs a CUDA GPU",
}


@pytest.mark.parametrize("arguments", BAD, ids=lambda a: " ".join(a)[:60])
def test_bad_input_is_one_line_and_exit_code_2(arguments, monkeypatch, capsys, tmp_path):
    """Through the entry point itself: no traceback, code 2."""
    from chord_lab import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["chord-lab", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.run()
    assert caught.value.code == 2
    error = capsys.readouterr().err.strip()
    assert BAD[arguments] in " ".join(error.split()) and "Traceback" not in error


def test_without_data_there_is_one_line_that_says_where_was_looked(monkeypatch, tmp_path):
    monkeypatch.setenv("CHORD_LAB_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = invoke("tune", "kimi-k2/ep8/decode", "--source", "replay")
    assert isinstance(result.exception, UserError)
    assert str(tmp_path) in str(result.exception) and "CHORD_LAB_DATA" in str(result.exception)


@pytest.mark.parametrize(
    ("value", "count", "expected"),
    [
        (None, 2, ["0", "1"]),
        ("", 2, []),
        ("-1", 2, []),
        ("1", 2, ["1"]),
        ("1,0", 2, ["1", "0"]),
        ("0,7,1", 2, ["0"]),
        ("GPU-5e3c", 2, ["GPU-5e3c"]),
        ("0", 0, []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(monkeypatch, value, count, expected):
    monkeypatch.setattr(Nvml, "device_count", classmethod(lambda cls: count))
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == expected


def test_recording_begins_with_what_matters_most():
    from chord_lab.cli.measuring import Request
    from chord_lab.cli.record import recording_points

    request = Request(scenario="x", draws=["uniform", "balanced", "zipf:1.0"], tokens="all")
    wanted = recording_points(request, ["kimi-k2/ep8/decode", "kimi-k2/tp8/prefill"], ["portable"])
    assert len({(p.scenario, p.projection, p.routing, p.profile) for p in wanted}) == len(wanted)
    draws = [p.routing.draw for p in wanted]
    assert draws.index("balanced") > max(i for i, d in enumerate(draws) if d == "uniform")
    per_expert = {round(p.routed_m / 384) for p in wanted if "tp8/prefill" in p.scenario}
    assert {40, 60, 70, 80, 90, 100, 120, 160, 352} <= per_expert
    assert np.all([sum(p.routing.tok_e) == p.routed_m for p in wanted])


def test_own_stands_for_each_scenarios_profile():
    from chord_lab.cli.measuring import Request
    from chord_lab.cli.record import recording_points

    request = Request(scenario="x", draws=["uniform"], tokens="published")
    scenarios = ["kimi-k2/ep8/decode", "kimi-k2/tp8/prefill", "kimi-k2/ep8/grouped_decode"]
    profiles = {p.scenario: p.profile for p in recording_points(request, scenarios, ["own"])}
    assert profiles == dict(zip(scenarios, ("h200_decode_ep8", "h200_tp8", "h200_grouped_decode"), strict=True))
    both = {p.profile for p in recording_points(request, scenarios[:1], None)}
    assert both == {p.profile for p in recording_points(request, scenarios[:1], ["portable", "own", "own"])}
    assert both == {"portable", "h200_decode_ep8"}


def test_recording_draws_a_grouped_scenario_as_asked_and_as_its_own_otherwise():
    from chord_lab.cli.measuring import Request
    from chord_lab.cli.record import recording_points

    def draws_of(*draws):
        request = Request(scenario="x", draws=list(draws), tokens="published")
        return {p.routing.draw for p in recording_points(request, ["kimi-k2/ep8/grouped_decode"], ["own"])}

    assert draws_of() == {"balanced"}
    assert draws_of("zipf:1.0") == {"zipf:1.0"}
    assert draws_of("balanced", "zipf:1.0") == {"balanced", "zipf:1.0"}


def planned(*arguments):
    result = invoke("record", "--plan-only", "--points", "published", "--draw", "uniform", "--json", *arguments)
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_a_recording_goes_on_from_records_of_the_same_kernels_point_by_point(tmp_path):
    (point, _) = scenario_points("kimi-k2/ep8/decode", tokens=[20], profile="portable")
    chosen = ["--scenario", "kimi-k2/ep8/decode", "--profile", "portable"]
    everything = planned(*chosen)

    def left(of_kernels, omitted=0):
        environment = Environment(device="nvidia_h200", device_name="NVIDIA H200", kernels=of_kernels)
        tried = [c for _, some in make_plan([point], H200, space="record").by_point() for c in some]
        made = {"run_id": "made", "date": "2026-11-29T12:00:00+00:00", "environment": environment, "method": Method()}
        records = [record_of(point, c, times_us=((1.0,),), rounds=(0,), **made) for c in tried[omitted:]]
        path = write_parquet(records, tmp_path / f"{of_kernels}-{omitted}.parquet")
        return planned("--missing-from", str(path), *chosen), len(tried)

    rest, tried = left(kernels_hash())
    assert (rest["points"], rest["candidates"]) == (everything["points"] - 1, everything["candidates"] - tried)
    assert left(kernels_hash(), omitted=1)[0] == everything  # a point is judged within one run, so it is tried whole
    assert left("of other kernels")[0] == everything
    foreign = str(tmp_path / "of other kernels-0.parquet")
    told = invoke("record", "--plan-only", "--points", "published", "--missing-from", foreign, *chosen).stderr
    assert f"{tried} of {tried} records" in told


def test_the_hash_of_kernels_is_of_their_code_alone_and_the_same_under_every_python():
    code = '"""Why."""\n@jit\ndef f(x, *, n: int = 8):\n    """What."""\n    return f"{x}" + x[1:n]  # how'
    text = (
        "Module(body=[FunctionDef(name='f', args=arguments(args=[arg(arg='x')], kwonlyargs=[arg(arg='n', "
        "annotation=Name(id='int', ctx=Load()))], kw_defaults=[Constant(value=8)]), body=[Return(value=BinOp("
        "left=JoinedStr(values=[FormattedValue(value=Name(id='x', ctx=Load()), conversion=-1)]), op=Add(), "
        "right=Subscript(value=Name(id='x', ctx=Load()), slice=Slice(lower=Constant(value=1), "
        "upper=Name(id='n', ctx=Load())), ctx=Load())))], decorator_list=[Name(id='jit', ctx=Load())])])"
    )
    assert versions.canonical_code(code) == text
    assert versions.canonical_code(code.replace("Why", "Because").replace("# how", "")) == text
    assert versions.canonical_code(code.replace("1:n", "2:n")) != text

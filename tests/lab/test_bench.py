from __future__ import annotations

import numpy as np
import pytest
import torch
from w4a16_moe.problem import MoeProblem
from w4a16_moe.reference import gemm_reference
from w4a16_moe.schedule import Schedule

from chord_lab.measurement.bench import Bench, DoesNotFit, WrongResult
from chord_lab.measurement.launch import GemmTypeMismatch
from chord_lab.measurement.live import LiveMeasure, LiveSettings
from chord_lab.measurement.memory import memory_need
from chord_lab.measurement.peers.humming import forced_tiles, pack_words
from chord_lab.measurement.peers.torch_baseline import launch_baseline
from chord_lab.measurement.tensors import Layer, PointTensors
from chord_lab.measurement.worker import WorkerSettings
from chord_lab.records import read_records
from chord_lab.records.attempt import Candidate, Point, candidate_to_dict, point_to_dict
from chord_lab.sweeps.plan import Plan
from chord_lab.sweeps.points import routing_ref
from chord_lab.sweeps.run import run

METHOD = {"timer": "cuda_event"}
BENCH_SETTINGS = {"timer": "cpu_timer:CpuTimer", "launchers": "cpu_timer:launchers"}


@pytest.fixture
def point():
    problem = MoeProblem(num_experts=6, N=64, K=128, top_k=2)
    routing = routing_ref("uniform", num_tokens=9, num_experts=6, top_k=2, seed=1)
    return Point(
        scenario="toy/ep1/decode",
        projection="gate_up",
        problem=problem,
        profile="portable",
        num_tokens=9,
        routing=routing,
    )


def schedule(num_stages=2, block_m=16):
    return Schedule(kernel="portable", block_m=block_m, block_n=64, block_k=64, num_warps=4, num_stages=num_stages)


@pytest.fixture
def bench(point):
    bench = Bench(**BENCH_SETTINGS)
    bench.open(point_to_dict(point), METHOD)
    return bench


def check(bench, num_stages):
    return bench.check("key", candidate_to_dict(Candidate(schedule=schedule(num_stages))))


def test_weights_hold_every_code_and_are_the_same_each_time(point):
    layer = Layer(point.problem, "cpu")
    codes, scales = layer.expert(3)
    assert sorted(codes.unique().tolist()) == list(range(16))
    assert torch.equal(codes, layer.expert(3)[0]) and torch.equal(scales, layer.expert(3)[1])
    assert not torch.equal(codes, layer.expert(2)[0])


def test_reference_agrees_with_the_kernel_packages_own(point):
    tensors = PointTensors(point, Layer(point.problem, "cpu"), "cpu")
    experts = [tensors.layer.expert(e) for e in range(6)]
    weights = torch.stack([c for c, _ in experts]), torch.stack([s for _, s in experts])
    expected = gemm_reference(tensors.x, weights, tensors.topk_ids, top_k=2)
    assert torch.allclose(tensors.reference, expected, rtol=1e-5, atol=1e-6)


def test_a_good_candidate_is_checked_timed_and_checked_again(bench):
    result = check(bench, 2)
    assert 1e-4 < result["rel_error"] < 3e-3
    assert result["ran_kernel"] == "reference" and result["num_tokens_padded"] % 16 == 0
    assert len(bench.repeat("key", 1, 0)["times_us"]) == 3
    assert bench.recheck("key")["rel_error"] == result["rel_error"]
    bench.drop("key")
    with pytest.raises(KeyError):
        bench.repeat("key", 1, 0)


@pytest.mark.parametrize(("fault", "words"), [(7, "relative error"), (8, "not written")])
def test_wrong_numbers_are_caught_before_timing(bench, fault, words):
    with pytest.raises(WrongResult, match=words):
        check(bench, fault)


def test_wrong_numbers_are_caught_after_timing(bench):
    check(bench, 6)
    bench.repeat("key", 1, 0)
    with pytest.raises(WrongResult, match="relative error"):
        bench.recheck("key")


def test_another_interface_than_asked_for_is_an_error(bench):
    with pytest.raises(GemmTypeMismatch, match="asked for indexed, grouped_masked ran"):
        check(bench, 5)


def test_another_routing_than_the_plans_is_refused(point):
    from dataclasses import replace

    shifted = point.routing.tok_e[1:] + point.routing.tok_e[:1]
    with pytest.raises(ValueError, match="differs from the plan's"):
        PointTensors(replace(point, routing=replace(point.routing, tok_e=shifted)), Layer(point.problem, "cpu"), "cpu")


def test_what_does_not_fit_is_refused_before_allocation(point):
    bench = Bench(timer="cpu_timer:CpuTimer", launchers="cpu_timer:launchers", memory_bytes=10**6)
    with pytest.raises(DoesNotFit, match=r"needs about .* GB, the device has 0.0 GB"):
        bench.open(point_to_dict(point), METHOD)


def test_memory_of_a_large_layer_is_predicted():
    problem = MoeProblem(num_experts=384, N=4096, K=7168, top_k=8)
    routing = routing_ref("balanced", num_tokens=48, num_experts=384, top_k=8, seed=0)
    large = Point(
        scenario="x", projection="gate_up", problem=problem, profile="portable", num_tokens=48, routing=routing
    )
    assert memory_need(large) > 384 * (4096 * 7168 // 2 + 4096 * 224 * 2) > 4 * 10**9


def test_the_bf16_baseline_gives_the_reference(point):
    tensors = PointTensors(point, Layer(point.problem, "cpu"), "cpu")
    tensors.poison()
    launch = launch_baseline(tensors, Candidate(kind="baseline", implementation="torch_dequant_bf16"))
    launch.run()
    assert tensors.error() < 3e-3


def test_error_is_nan_where_a_row_was_not_written(point):
    tensors = PointTensors(point, Layer(point.problem, "cpu"), "cpu")
    tensors.out.copy_(tensors.reference.to(torch.bfloat16))
    assert tensors.error() < 3e-3
    tensors.out[4] = float("nan")
    assert np.isnan(tensors.error())


def test_humming_words_hold_eight_codes_low_nibble_first():
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    words = pack_words(codes)
    assert words.dtype == torch.int32 and [hex(w & 0xFFFFFFFF) for w in words[0].tolist()] == [
        "0x76543210",
        "0xfedcba98",
    ]


def test_forced_tiles_fit_the_routing_and_differ_from_the_peers_own(point):
    own = {"block_shape": [16, 256, 128], "warp_shape": [16, 64, 64], "mma_type": "wgmma", "num_stages": 4}
    tiles = list(forced_tiles(point, own))
    assert 1 <= len(tiles) <= 3
    assert all(t["block_shape"][0] != 16 and t["block_shape"][0] == t["warp_shape"][0] for t in tiles)


def test_the_live_path_on_cpu_tensors(point, tmp_path):
    """Everything but the GPU: real child processes, real tensors, real checks, one wrong candidate."""
    good = [Candidate(schedule=schedule(2, m), default=m == 16) for m in (8, 16, 32)]
    plan = Plan([point], [*good, Candidate(schedule=schedule(7))], np.array([[0, i] for i in range(4)], dtype=np.int32))
    settings = LiveSettings(
        worker=WorkerSettings(bench_settings=BENCH_SETTINGS),
        compile_server="fake_bench:FakeCompiler",
        jobs=1,
        peers="none",
        load_s=0.0,
    )
    run(plan, LiveMeasure(settings), tmp_path)
    records = read_records(tmp_path).records
    status = sorted((r.kind, r.status) for r in records if r.kind != "ceiling")
    assert status == [("baseline", "ok"), *[("candidate", "ok")] * 3, ("candidate", "wrong_result")]
    ok = [r for r in records if r.kind == "candidate" and r.status == "ok"]
    assert all(r.rel_error and r.rel_error_after and r.times_us and r.environment.device == "cpu_of_a_test" for r in ok)

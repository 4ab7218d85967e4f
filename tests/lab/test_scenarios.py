import json

import pytest

from chord_lab.errors import UserError
from chord_lab.scenarios import (
    MODELS,
    PROJECTIONS,
    ModelShape,
    Shard,
    get_scenario,
    make_scenario,
    scenario_names,
    shard_problem,
    shard_table,
)

KIMI = MODELS["kimi-k2"]


def model(**changes):
    return ModelShape(
        **(
            {"name": "small", "num_experts": 16, "top_k": 2, "hidden": 64, "intermediate": 640, "num_moe_layers": 1}
            | changes
        )
    )


@pytest.mark.parametrize(
    ("shard", "num_experts", "gate_up", "down"),
    [
        ("ep8", 48, (4096, 7168), (7168, 2048)),
        ("ep16", 24, (4096, 7168), (7168, 2048)),
        ("ep32", 12, (4096, 7168), (7168, 2048)),
        ("tp8", 384, (512, 7168), (7168, 256)),
    ],
)
def test_kimi_shapes(shard, num_experts, gate_up, down):
    for projection, shape in zip(PROJECTIONS, (gate_up, down), strict=True):
        problem = shard_problem(KIMI, Shard.parse(shard), projection)
        assert (problem.num_experts, problem.N, problem.K, problem.group_size) == (num_experts, *shape, 32)
        assert problem.top_k == (8 if projection == "gate_up" else 1)


@pytest.mark.parametrize(
    ("name", "tokens", "routed_m"),
    [
        ("kimi-k2/ep8/prefill", (1024, 2048, 4096, 8192, 16384), (1024, 2048, 4096, 8192, 16384)),
        ("kimi-k2/ep16/prefill", (1024, 2048, 4096, 8192, 16384), (512, 1024, 2048, 4096, 8192)),
        ("kimi-k2/ep32/prefill", (1024, 2048, 4096, 8192, 16384), (256, 512, 1024, 2048, 4096)),
        ("kimi-k2/tp8/prefill", (1024, 2048, 4096, 8192, 16384), (8192, 16384, 32768, 65536, 131072)),
        ("kimi-k2/ep8/decode", (20, 30, 40, 50), (160, 240, 320, 400)),
        ("kimi-k2/ep8/grouped_prefill", (128, 256, 512), (6144, 12288, 24576)),
        ("kimi-k2/ep8/grouped_decode", (8, 16, 32, 64), (384, 768, 1536, 3072)),
    ],
)
def test_published_points(name, tokens, routed_m):
    published = [p for p in get_scenario(name).points if p.published]
    assert tuple(p.num_tokens for p in published) == tokens
    assert tuple(p.routed_m for p in published) == routed_m


@pytest.mark.parametrize("shard", ["ep8", "tp8"])
def test_sweep_stands_on_both_sides_of_the_turn(shard):
    scenario = get_scenario(f"kimi-k2/{shard}/prefill")
    experts = scenario.problem("down").num_experts
    means = {p.tokens_per_expert(experts) for p in scenario.points}
    assert {40, 60, 70, 80, 90, 100, 120, 160, 352} <= means


def test_decode_sweep_covers_slices_and_the_gap_to_prefill():
    scenario = get_scenario("kimi-k2/ep8/decode")
    means = {p.tokens_per_expert(48) for p in scenario.points}
    assert {4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24} <= means
    assert {400, 512, 640, 768, 896, 1024} <= {p.routed_m for p in scenario.points}


@pytest.mark.parametrize("name", scenario_names())
def test_every_listed_scenario_is_whole(name):
    scenario = get_scenario(name)
    assert scenario.name == name
    assert [p.routed_m for p in scenario.points] == sorted(p.routed_m for p in scenario.points)
    for point in scenario.points:
        assert point.drawn_tokens * scenario.top_k == point.routed_m
    for problem in scenario.problems.values():
        assert problem.K % problem.group_size == 0


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("kimi-k2/ep8/prefil", "kimi-k2/ep8/prefill"),
        ("kimi/ep8/decode", "kimi-k2/ep8/decode"),
        ("?", "chord-lab scenarios"),
    ],
)
def test_unknown_scenario_names_near_matches(name, near):
    with pytest.raises(UserError, match=near) as caught:
        get_scenario(name)
    assert "\n" not in str(caught.value)


def test_tensor_parallel_that_does_not_divide_is_refused_with_the_legal_list():
    for tp in (1, 2, 4, 5):
        shard_problem(model(), Shard(tp=tp), "down")
    for tp in (3, 6, 7, 8):
        with pytest.raises(UserError, match=r"tp must divide 20: 1, 2, 4, 5"):
            shard_problem(model(), Shard(tp=tp), "down")
    with pytest.raises(UserError, match=r"640 .*80|leaves 80"):
        shard_problem(model(), Shard(tp=8), "gate_up")


def test_expert_parallel_that_does_not_divide_is_refused_with_the_legal_list():
    with pytest.raises(UserError, match=r"ep=3 does not divide 16 experts; legal ep: 1, 2, 4, 8, 16"):
        shard_problem(model(), Shard(ep=3), "down")


def test_redundant_experts_count_as_physical_ones():
    problem = shard_problem(model(), Shard.parse("ep8r8"), "down")
    assert problem.num_experts == 3


def test_e_and_n_of_a_model_under_each_parallelism():
    rows = {row.shard: row for row in shard_table(MODELS["qwen3-235b"])}
    assert rows["ep8"].table_key == "E=16,N=1536"
    assert rows["tp4"].table_key == "E=128,N=384"
    assert "tp32" not in rows  # 1536/32 = 48 is not whole groups


@pytest.mark.parametrize("text", ["ep8", "tp8", "ep4tp2", "ep8r16", "ep8r16tp2", "ep1"])
def test_shard_names_round_trip(text):
    assert Shard.parse(text).name == text


@pytest.mark.parametrize("text", ["", "8", "ep", "pp8", "ep0", "tp-1", "ep8 "])
def test_bad_shards_are_refused(text):
    with pytest.raises(UserError):
        Shard.parse(text)


def test_profiles_follow_the_shape():
    assert get_scenario("kimi-k2/tp8/decode").profile == "h200_tp8"
    assert get_scenario("kimi-k2/ep32/grouped_decode").profile == "h200_grouped_decode"
    assert get_scenario("gpt-oss-120b/ep8/decode").profile == "portable"  # K = 2880 is no multiple of 256
    with pytest.raises(UserError, match="no kernel serves grouped_masked"):
        make_scenario(MODELS["gpt-oss-120b"], Shard(ep=8), "grouped_decode")


def test_other_token_counts_of_a_scenario():
    scenario = get_scenario("kimi-k2/ep16/prefill").with_tokens([16, 4096])
    assert [(p.num_tokens, p.routed_m, p.published) for p in scenario.points] == [(16, 8, False), (4096, 2048, True)]
    with pytest.raises(UserError, match=r"2 tokens of a system-wide chunk bring 1 rows .* take a multiple of 16"):
        scenario.point(2)


def test_scenarios_are_plain_data():
    import pickle

    scenario = get_scenario("kimi-k2/ep8/decode")
    assert pickle.loads(pickle.dumps(scenario)) == scenario
    assert json.dumps([p.__dict__ if hasattr(p, "__dict__") else str(p) for p in scenario.points])

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chord_lab import routing
from chord_lab.errors import UserError

DRAWS = ["uniform", "balanced", "zipf:0.5", "zipf:1.2"]


def draw(name, num_tokens=64, num_experts=12, top_k=4, seed=0):
    return routing.draw_topk_ids(name, num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, seed=seed)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(0, 5, 2), (1, 1, 1), (7, 8, 8), (300, 48, 8), (9, 1025, 3)]
)
def test_every_row_holds_distinct_local_experts(name, num_tokens, num_experts, top_k):
    ids = draw(name, num_tokens, num_experts, top_k)
    assert ids.shape == (num_tokens, top_k)
    assert ids.dtype == np.int32
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert not ids.size or (ids.min() >= 0 and ids.max() < num_experts)


@pytest.mark.parametrize("name", DRAWS)
def test_a_point_depends_on_its_own_arguments_only(name):
    first = draw(name, seed=3)
    draw(name, num_tokens=1000)
    assert np.array_equal(draw(name, seed=3), first)
    assert not np.array_equal(draw(name, seed=4), first)
    assert not np.array_equal(draw(name, num_tokens=65, seed=3)[:64], first)


def test_the_stream_is_fixed():
    # Values of generator numpy-pcg64-v1: if they change, recorded routings no longer mean what their records say.
    assert routing.GENERATOR == "numpy-pcg64-v1"
    assert draw("uniform", 2, 8, 3).tolist() == UNIFORM
    assert draw("zipf:1", 2, 8, 3).tolist() == ZIPF
    assert draw("balanced", 2, 8, 3).tolist() == BALANCED


UNIFORM = [[6, 5, 1], [0, 7, 1]]
ZIPF = [[7, 3, 1], [2, 3, 7]]
BALANCED = [[0, 1, 6], [4, 3, 2]]


def test_uniform_is_uniform_and_balanced_is_level():
    counts = routing.draw_tok_e("uniform", num_tokens=20000, num_experts=16, top_k=4)
    expected = 20000 * 4 / 16
    assert abs(counts - expected).max() < 6 * expected**0.5
    level = routing.draw_tok_e("balanced", num_tokens=21, num_experts=16, top_k=4)
    assert level.max() - level.min() <= 1


def test_zipf_ranks_fall_with_the_skew():
    counts = np.sort(routing.draw_tok_e("zipf:1.0", num_tokens=20000, num_experts=64, top_k=1))[::-1]
    share = 1 / np.sum(1 / np.arange(1, 65))
    assert counts[0] == pytest.approx(20000 * share, rel=0.05)
    assert counts[3] == pytest.approx(20000 * share / 4, rel=0.1)
    flat = routing.draw_tok_e("zipf:0", num_tokens=20000, num_experts=64, top_k=1)
    assert flat.max() < 1.4 * flat.mean()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("normal", "unknown draw 'normal'; legal: uniform"),
        ("zipf", "zipf needs a skew"),
        ("zipf:-1", "zipf needs a skew"),
        ("zipf:nan", "zipf needs a skew"),
        ("uniform:1", "unknown draw"),
        ("file:", "unknown draw"),
    ],
)
def test_bad_draws_are_refused(text, reason):
    with pytest.raises(UserError, match=reason):
        draw(text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_tokens": -1}, "tokens must be at least 0"),
        ({"num_experts": 0}, "experts must be at least 1"),
        ({"top_k": 13}, "top_k must be from 1 to the 12 experts"),
        ({"top_k": 0}, "top_k must be from 1"),
    ],
)
def test_bad_counts_are_refused(changes, reason):
    with pytest.raises(UserError, match=reason):
        draw("uniform", **changes)


def test_blocks_of_known_counts():
    ids = np.repeat(np.arange(5), [2, 3, 0, 6, 8])[:, None]
    blocks = routing.align_to_blocks(ids, 5, 4)
    assert blocks.expert_ids.tolist() == [0, 1, 3, 3, 4, 4]
    assert blocks.num_tokens_padded == 24
    assert routing.num_blocks([2, 3, 0, 6, 8], 4) == 6
    assert blocks.sorted_ids[:8].tolist() == [0, 1, 19, 19, 2, 3, 4, 19]


def test_one_token_on_big_blocks_is_nearly_all_padding_and_a_smaller_block_is_offered():
    tok_e = routing.draw_tok_e("uniform", num_tokens=1, num_experts=48, top_k=8)
    row = routing.padding(tok_e, 64)
    assert (row.num_m_blocks, row.num_tokens_padded) == (8, 512)
    assert row.padding_share == pytest.approx(0.984, abs=5e-4)
    smaller = routing.smaller_block(tok_e, 64)
    assert smaller is not None
    assert (smaller.block_m, smaller.num_m_blocks) == (8, 8)
    assert routing.smaller_block([64, 60], 64) is None


@pytest.mark.parametrize("num_experts", [1, 48, 60, 257, 385, 1025])
def test_any_number_of_experts(num_experts):
    ids = draw("uniform", 50, num_experts, min(4, num_experts))
    blocks = routing.align_to_blocks(ids, num_experts, 16)
    real = blocks.sorted_ids < ids.size
    assert np.array_equal(np.sort(blocks.sorted_ids[real]), np.arange(ids.size))
    owner = np.repeat(blocks.expert_ids, 16)
    assert np.array_equal(ids.ravel()[blocks.sorted_ids[real]], owner[real])


def test_foreign_routes_are_counted_apart():
    expert_map = [-1, 0, -1, 1]
    load = routing.local_load([[0, 1], [1, 3], [2, 0]], 2, expert_map)
    assert load.tok_e.tolist() == [2, 1]
    assert load.num_foreign == 3
    blocks = routing.align_to_blocks([[0, 1], [1, 3], [2, 0]], 2, 2, expert_map)
    assert blocks.sorted_ids.tolist() == [1, 2, 3, 6]
    assert blocks.expert_ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ids", "expert_map", "reason"),
    [
        ([[0, 9]], None, "topk_ids holds 9; legal without an expert_map: 0 to 7"),
        ([[-1]], None, "topk_ids holds -1"),
        ([[4]], [0, 1, -1], "topk_ids holds 4; legal with this expert_map: 0 to 2"),
        ([[0]], [8], "expert_map holds 8; legal: -1 to 7"),
        ([[0.5]], None, "whole numbers"),
    ],
)
def test_ids_out_of_range_are_refused_not_dropped(ids, expert_map, reason):
    with pytest.raises(UserError, match=reason):
        routing.local_load(ids, 8, expert_map)


def test_m_indices_pads_each_group():
    assert routing.m_indices([2, 0, 4], 4).tolist() == [0, 0, -1, -1, 2, 2, 2, 2]


@pytest.mark.parametrize(("tok_e", "value"), [([0] * 4, None), ([10, 0, 0, 0], 0.25), ([5] * 4, 1.0), ([], None)])
def test_balancedness(tok_e, value):
    assert routing.balancedness(tok_e) == value


@settings(max_examples=60, deadline=None)
@given(tok_e=st.lists(st.integers(0, 40), min_size=1, max_size=20), top_k=st.integers(1, 4))
def test_counts_become_ids_with_these_counts(tok_e, top_k):
    tok_e = np.array(tok_e)
    rows = int(tok_e.sum())
    if rows % top_k or tok_e.max() > rows // top_k:
        with pytest.raises(UserError):
            routing.ids_from_counts(tok_e, top_k)
        return
    ids = routing.ids_from_counts(tok_e, top_k)
    assert np.array_equal(np.bincount(ids.ravel(), minlength=tok_e.size), tok_e)
    assert all(len(set(row)) == top_k for row in ids.tolist())


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_experts=st.integers(1, 30), block_m=st.sampled_from([1, 8, 16, 64]))
def test_twin_of_the_kernel_package(data, num_experts, block_m):
    torch = pytest.importorskip("torch")
    aligned = pytest.importorskip("w4a16_moe.routing").align_to_blocks
    num_global = data.draw(st.integers(num_experts, 40))
    local = data.draw(st.permutations(range(num_global)))
    expert_map = np.full(num_global, -1, dtype=np.int32)
    expert_map[list(local[:num_experts])] = np.arange(num_experts)
    ids = data.draw(st.lists(st.integers(0, num_global - 1), min_size=0, max_size=60))
    ids = np.array(ids, dtype=np.int32).reshape(-1, 1)
    ours = routing.align_to_blocks(ids, num_experts, block_m, expert_map)
    theirs = aligned(torch.from_numpy(ids), num_experts, block_m, torch.from_numpy(expert_map))
    used = int(theirs.num_tokens_padded)
    assert used == ours.num_tokens_padded
    assert theirs.sorted_ids[:used].tolist() == ours.sorted_ids.tolist()
    assert theirs.expert_ids[: used // block_m].tolist() == ours.expert_ids.tolist()


def test_recorded_ids_from_each_kind_of_file(tmp_path):
    import pandas as pd

    ids = draw("uniform", 30, 12, 4)
    (tmp_path / "a.json").write_text(json.dumps({"topk_ids": ids.tolist()}))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row) for row in ids.tolist()))
    pd.DataFrame(ids, columns=list("wxyz")).to_csv(tmp_path / "c.csv", index=False)
    pd.DataFrame(ids).to_csv(tmp_path / "d.csv", index=False, header=False)
    np.save(tmp_path / "e.npy", ids)
    pd.DataFrame({"topk_ids": ids.tolist()}).to_parquet(tmp_path / "f.parquet")
    counts = np.bincount(ids.ravel(), minlength=12)
    for file in sorted(tmp_path.iterdir()):
        drawn = draw(f"file:{file}", 30)
        assert np.array_equal(np.bincount(drawn.ravel(), minlength=12), counts), file.name
        assert sorted(map(tuple, drawn.tolist())) == sorted(map(tuple, ids.tolist()))
    half = draw(f"file:{tmp_path / 'a.json'}", 15)
    assert len({tuple(row) for row in half.tolist()} - {tuple(row) for row in ids.tolist()}) == 0
    assert len(draw(f"file:{tmp_path / 'a.json'}", 100)) == 100


def test_recorded_counts_are_kept_or_scaled(tmp_path):
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"weight": [[8, 0, 4, 4], [1, 1, 1, 100]]}))
    exact = routing.draw_tok_e(f"file:{file}#0", num_tokens=8, num_experts=4, top_k=2)
    assert exact.tolist() == [8, 0, 4, 4]
    doubled = routing.draw_tok_e(f"file:{file}#0", num_tokens=16, num_experts=4, top_k=2)
    assert doubled.tolist() == [16, 0, 8, 8]
    capped = routing.draw_tok_e(f"file:{file}#1", num_tokens=10, num_experts=4, top_k=2)
    assert capped.sum() == 20
    assert capped[3] == 10  # a token visits an expert once
    with pytest.raises(UserError, match="holds 2 layers; choose one"):
        draw(f"file:{file}", 8, 4, 2)
    with pytest.raises(UserError, match="no layer 7; legal: 0 to 1"):
        draw(f"file:{file}#7", 8, 4, 2)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b"{", "not readable JSON"),
        ("b.json", b'{"topk_ids": [[0, 99]]}', "routes to expert 99"),
        ("c.json", b'{"topk_ids": [[0, 0]]}', "token 0 is routed to one expert twice"),
        ("d.json", b'{"tok_e": [1, -2, 3]}', "a count of -2"),
        ("e.json", b'{"tok_e": [1, 2]}', "holds counts of 2 experts, but 3"),
        ("f.json", b'{"tok_e": [0, 0, 0]}', "zero for every expert"),
        ("g.json", b'{"hello": 1}', "no table of numbers"),
        ("h.pkl", b"x", "a pickle can run code"),
        ("i.npy", b"x", "not readable"),
        ("j.parquet", b"x", "not readable"),
        ("k.csv", b"a,b\nx,y\n", "no table of numbers"),
        ("l.json", b'{"tok_e": [[1, 2, 3], [1, 2]]}', "not readable|no table"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        draw(f"file:{path}", 4, 3, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values", [np.array([[1 + 2j, 2]]), np.array([1, 2, 3], dtype="m8[s]")], ids=["complex", "times"]
)
def test_numbers_that_are_no_counts_are_refused(tmp_path, values):
    np.save(tmp_path / "odd.npy", values)
    with pytest.raises(UserError, match="holds no table of numbers"):
        draw(f"file:{tmp_path / 'odd.npy'}", 4, 3, 2)


def test_only_plain_digits_name_a_layer():
    assert routing.parse_draw("file:a.json#1").layer == 1
    assert routing.parse_draw("file:a.json#²").path == "a.json#²"


def test_an_npy_file_that_holds_a_pickle_is_not_run(tmp_path):
    path = tmp_path / "evil.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="not readable"):
        draw(f"file:{path}", 4, 3, 2)


def test_placement_with_redundant_experts(tmp_path):
    path = tmp_path / "placement.json"
    devices = [[3, 0, 1], [2, 3, 1]]
    entry = {
        "layer_id": 5,
        "device_count": 2,
        "device_list": [{"device_id": i, "device_expert": d} for i, d in enumerate(devices)],
    }
    path.write_text(json.dumps({"moe_layer_count": 1, "layer_list": [entry]}))
    (placement,) = routing.read_expert_placement(path)
    assert (placement.layer, placement.num_logical, placement.num_physical) == (5, 4, 6)
    assert placement.replicas == {1: 2, 3: 2}
    assert placement.expert_map(0).tolist() == [1, 2, -1, 0]
    assert placement.expert_map(1).tolist() == [-1, 2, 0, 1]
    load = routing.local_load([[0, 3], [2, 1]], 3, placement.expert_map(1))
    assert (load.tok_e.tolist(), load.num_foreign) == ([1, 1, 1], 1)


def test_a_placement_with_a_hole_is_refused(tmp_path):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"layer_list": [{"layer_id": 0, "device_list": [{"device_expert": [0, 2]}]}]}))
    with pytest.raises(UserError, match="expert 1 nowhere"):
        routing.read_expert_placement(path)
    for text, reason in (
        ("{}", "no expert placement"),
        ('{"layer_list": [{"layer_id": 1e999, "device_list": []}]}', "no expert placement"),
        ('{"layer_list": []}', "places no layer"),
        ('{"layer_list": [], "layer_list": []}', "the key 'layer_list' stands twice"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=reason):
            routing.read_expert_placement(path)


def test_loads_of_unlike_layers_stay_apart(tmp_path):
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"weight": [[0, 0, 0, 0], [5, 5]]}))
    load = routing.read_expert_load(path)
    assert [routing.balancedness(layer) for layer in load.layers] == [None, 1.0]

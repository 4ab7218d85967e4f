import gzip
import json
from dataclasses import replace

import pytest
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.export.tables import triton_moe
from chord_lab.export.tables.foreign import find_table, lookup_nearest, read_foreign
from chord_lab.export.tables.names import parse_name, sglang_path, tried_names, vllm_name
from chord_lab.export.tables.rows import humming_config, write_t4
from chord_lab.records import to_frame

TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
NAME = "E=48,N=2048,device_name=NVIDIA_H200,dtype=int4_w4a16.json"


def put(folder, name, value):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def test_names_come_from_the_reported_device_name():
    name = vllm_name(E=16, N=1536, device_name="NVIDIA H100 80GB HBM3")
    assert name == "E=16,N=1536,device_name=NVIDIA_H100_80GB_HBM3,dtype=int4_w4a16.json"
    parsed = parse_name(name)
    assert (parsed.E, parsed.N, parsed.device_name, parsed.dtype) == (16, 1536, "NVIDIA_H100_80GB_HBM3", "int4_w4a16")
    assert parsed.remarks() == []
    assert tried_names(E=128, N=384, device_name="Tesla T4", dtype="") == ["E=128,N=384,device_name=Tesla_T4.json"]


def test_sglang_halves_n_and_puts_the_version_in_the_folder():
    path = sglang_path(E=48, N=2048, device_name="NVIDIA H200", triton_version="3.6.0+git1")
    assert path == "triton_3_6_0/E=48,N=1024,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
    assert sglang_path(E=1, N=2, device_name="X", triton_version="3.6").startswith("triton_3_6_0/")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("E=1,N=2,device_name=A,dtype=fp8_w8a8,block_shape=[128,128].json", {"block_shape": (128, 128)}),
        (
            "E=1,N=2,device_name=A,dtype=fp8_w8a8,block_shape=[128, 128]_down.json",
            {"block_shape": (128, 128), "down": True},
        ),
        ("E=1,N=2,device_name=Intel(R)_Arc(TM).json", {"device_name": "Intel(R)_Arc(TM)"}),
        ("H=2048,E=64,N=768,device_name=A.json", {"unknown": {"H": "2048"}}),
        ("something.json", {"E": None, "unknown": {"something": ""}}),
    ],
)
def test_odd_names(name, expected):
    parsed = parse_name(name)
    assert {key: getattr(parsed, key) for key in expected} == expected


def test_a_field_of_a_fork_is_reported(tmp_path):
    found = read_foreign(put(tmp_path, "H=2048,E=64,N=768,device_name=NVIDIA_H200.json", {"1": TILE}))
    assert found.name.E == 64
    assert any("H=2048, which is not part of the format" in r for r in found.remarks)


def test_triton_version_is_taken_out_of_the_rows(tmp_path):
    found = read_foreign(put(tmp_path, NAME, {"triton_version": "3.6.0", "1": TILE, "8": TILE}))
    assert [row.key for row in found.rows] == [1, 8]
    assert found.header["triton_version"] == "3.6.0"
    assert found.remarks == ()
    inside = read_foreign(put(tmp_path, f"triton_3_6_0/{NAME}", {"triton_version": "3.6.0", "1": TILE}))
    assert inside.kind == "sglang"
    assert any("stops at it" in r for r in inside.remarks)
    folder = read_foreign(put(tmp_path, f"triton_3_7_1/{NAME}", {"1": TILE}))
    assert folder.header["triton_version"] == "3.7.1"


def test_nearest_key_and_its_traps(tmp_path):
    found = read_foreign(put(tmp_path, NAME, {"4096": TILE, "16": TILE, "64": TILE}))
    assert any("M = 1 is served by the row of 16" in r for r in found.remarks)
    low = lookup_nearest(found, 1)
    assert (low.row.key, low.rule) == (16, "nearest")
    assert "below the smallest key 16" in low.warning
    assert lookup_nearest(found, 64)[1:] == ("exact", None)
    assert lookup_nearest(found, 40).row.key == 16  # 24 from both: the one listed first
    assert "above the largest" in lookup_nearest(found, 99999).warning
    with pytest.raises(UserError, match="M must be at least 1"):
        lookup_nearest(found, 0)


@pytest.mark.parametrize(
    ("row", "remark"),
    [
        (TILE | {"BLOCK_SIZE_M": 8}, "BLOCK_SIZE_M 8: below 16"),
        (TILE | {"waves_per_eu": 4}, "waves_per_eu is a knob of another backend"),
        (TILE | {"USE_TMA": True}, "USE_TMA"),
        (TILE | {"num_warps": "4"}, "num_warps is '4', not a whole number"),
        (TILE | {"zest": 4}, "unknown knob zest"),
        ({"BLOCK_SIZE_M": 16}, "lacks BLOCK_SIZE_N, BLOCK_SIZE_K"),
    ],
)
def test_odd_rows_import_and_are_remarked_on(tmp_path, row, remark):
    found = read_foreign(put(tmp_path, NAME, {"1": row}))
    assert found.rows[0].values == row
    assert any(remark in r for r in found.remarks)


@pytest.mark.parametrize("key", ["²", "٣", "9" * 5000, "-5", "1.0", ""], ids=lambda k: k[:9])
def test_only_plain_digits_are_a_token_count(tmp_path, key):
    found = read_foreign(put(tmp_path, NAME, {key: TILE, "16": TILE}))
    assert [row.key for row in found.rows] == [16]
    assert any(f"top-level entry {key[:40]!r} is not a token count" in r for r in found.remarks)
    assert parse_name("E=²,N=9,device_name=X.json").E is None


@pytest.mark.parametrize("second", ["16", "016"])
def test_an_entry_that_stands_twice_is_remarked_on_and_the_later_one_counts(tmp_path, second):
    path = tmp_path / NAME
    path.write_text(f'{{"16": {json.dumps(TILE)}, "{second}": {json.dumps(TILE | {"num_warps": 8})}}}')
    found = read_foreign(path)
    assert [row.values["num_warps"] for row in found.rows] == [8]
    assert any("two entries for 16: the later one counts" in r for r in found.remarks)


def test_measured_lines_without_a_number_are_skipped_and_counted(tmp_path):
    path = tmp_path / "measured.csv"
    path.write_text("num_tokens,latency\n8,0.5\ninf,1\n1.5,1\nx,1\n16,nan\n16,inf\n32,-1\n")
    found = read_foreign(path)
    assert [(row.key, row.values["time_us"]) for row in found.rows] == [(8, 500.0)]
    assert found.remarks == ("6 lines without a whole number of tokens and a latency above 0: skipped",)


def test_humming_rows_say_gap_and_overlap(tmp_path):
    found = read_foreign(put(tmp_path, "rows.json", [[0, 16, {}], [16, 64, {}], [65, 128, {}], [100, 1 << 30, {}]]))
    assert found.kind == "humming_rows"
    assert [r.split(" ")[0] for r in found.remarks] == ["gap", "overlap"]


def test_results_of_other_tuners(tmp_path):
    bench = {"problem": {"b_dtype": "int8"}, "device": {}, "result": {"1": {"time": 0.02}, "2": None}}
    found = read_foreign(put(tmp_path, "bench.json", bench))
    assert (found.kind, found.rows[0].values["time_us"]) == ("humming_bench", 20)
    assert len(found.remarks) == 2
    cache = {
        "kernel_name": "k",
        "cache": {"a": {"time": 2.0}, "b": {"time": "CompilationFailedConfig"}, "c": {"time": 1.0}},
    }
    path = tmp_path / "cache.json.gz"
    path.write_bytes(gzip.compress(json.dumps(cache).encode()))
    found = read_foreign(path)
    assert [row.key for row in found.rows] == ["c", "a"]
    assert found.remarks == ("1 of 3 configurations failed",)
    failed = read_foreign(
        put(tmp_path, "none.json", {"cache": {"a": {"time": float("nan")}, "b": {"time": True}, "c": 7}})
    )
    assert failed.remarks[-1] == "no configuration has a time: no winner"
    space = {"ConfigurationSpace": {"TuningParameters": [{"Name": "x", "Values": "__import__('os').abort()"}]}}
    assert read_foreign(put(tmp_path, "t1.json", space)).kind == "t1"  # and the process is still there
    (tmp_path / "m.csv").write_text("framework,num_tokens,latency\nv,8,0.25\nv,16,\n")
    found = read_foreign(tmp_path / "m.csv")
    assert [(row.key, row.values["time_us"]) for row in found.rows] == [(8, 250.0)]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"\x1f\x8bbroken", b"[" * 100000], ids=repr)
def test_unreadable_files_are_one_line(tmp_path, content):
    path = tmp_path / NAME
    path.write_bytes(content)
    with pytest.raises(UserError, match="not readable JSON") as caught:
        read_foreign(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value", [[], {}, 3, None, "x", [1, 2], {"a": 1}, {"1": 2}, {"meta": {}, "configs": {}}], ids=repr
)
def test_any_json_gives_a_result(tmp_path, value):
    assert read_foreign(put(tmp_path, "x.json", value)).kind == "unknown"


def portable(block_m, **knobs):
    values = {"kernel": "portable", "block_m": block_m, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
    return Schedule(**values | knobs)


def both(made, schedule, gate_up, down, routed_m=1024):
    return [
        made.record(t, projection=p, schedule=schedule, routed_m=routed_m, profile="portable")
        for p, t in (("gate_up", gate_up), ("down", down))
    ]


def test_vllm_entries_serve_both_projections(made, tmp_path):
    records = [
        *both(made, portable(16), 100, 90),
        *both(made, portable(32), 80, 100),
        *both(made, portable(64), 70, 130),  # fastest gate_up, slow layer
        *both(made, portable(16, swap_ab=True), 10, 10),  # no knob says this
        *both(made, portable(8, swap_ab=True), 10, 10, routed_m=64),
    ]
    (table,) = triton_moe.build_triton_tables(to_frame(records))
    assert (table.E, table.N) == (48, 2048)
    assert table.entries == {128: portable(32)}
    assert table.layer_us == {128: 180}
    assert table.left_out == ("8 tokens: no schedule of both projections can be expressed",)
    path = triton_moe.write_vllm(table, tmp_path)
    assert path.name == NAME
    body = json.loads(path.read_text())
    assert body.pop("triton_version") == "3.6.0"
    assert body["128"] == {**TILE, "BLOCK_SIZE_M": 32, "SPLIT_K": 1}
    again = read_foreign(path)
    assert (again.kind, [row.key for row in again.rows]) == ("vllm", [128])
    packed = triton_moe.write_sglang(table, tmp_path)
    assert str(packed.relative_to(tmp_path)) == "triton_3_6_0/E=48,N=1024,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
    assert [int(key) for key in json.loads(packed.read_text())] == [128]  # every key is a number


def test_scenarios_of_one_shape_share_one_file(made):
    """Prefill and decode of a sharding have one E and N, so one file name: neither may take the other's place."""
    decode = [replace(r, scenario="kimi-k2/ep8/decode") for r in both(made, portable(16), 30, 20, routed_m=160)]
    (table,) = triton_moe.build_triton_tables(to_frame([*both(made, portable(32), 80, 100), *decode]))
    assert table.entries == {20: portable(16), 128: portable(32)}


def test_small_batches_are_warned_of_and_can_be_pinned(made):
    (table,) = triton_moe.build_triton_tables(to_frame(both(made, portable(32), 80, 100)))
    assert "gives its tile to M = 1" in triton_moe.small_batch_warning(list(table.entries))
    problem = MoeProblem(num_experts=48, N=4096, K=7168, top_k=8)
    pinned = triton_moe.pinned(table, problem, 8)
    assert sorted(pinned.entries) == [1, 128]
    assert triton_moe.expressible(pinned.entries[1])
    assert pinned.left_out == ("1 token: pinned to the untuned tile, not measured",)
    assert triton_moe.small_batch_warning(list(pinned.entries)) is None


def test_hopper_winners_never_go_into_a_triton_table(made):
    with pytest.raises(UserError, match=r"no record of the portable kernel \(recorded: wgmma\)"):
        triton_moe.build_triton_tables(to_frame(made.sweep()))
    one_sided = [r for r in both(made, portable(32), 80, 100) if r.projection == "gate_up"]
    with pytest.raises(UserError, match="both projections are needed"):
        triton_moe.build_triton_tables(to_frame(one_sided))


def test_humming_config_has_its_words(made):
    schedule = made.schedule(96, stream_k=True, persistent=True, ctas_per_sm=2)
    assert humming_config(schedule) == {
        "block_shape": [96, 256, 64],
        "warp_shape": [96, 32, 64],
        "num_stages": 4,
        "num_ctas_per_sm": 2,
        "use_stream_k": True,
        "swap_ab": False,
    }


def test_t4_keeps_failures_with_their_kind(made, tmp_path):
    failed = made.record(schedule=made.schedule(256), status="compile_error", reason="x")
    results, metadata = write_t4(to_frame([*made.sweep(routed=(1024,)), failed, *made.ceilings()]), tmp_path)
    document = json.loads(results.read_text())
    assert document["schema_version"] == "1.0.0"
    assert len(document["results"]) == 9
    for entry in document["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= set(entry)
        assert entry["invalidity"] in ("timeout", "compile", "runtime", "correctness", "constraints", "correct")
    kinds = [entry["invalidity"] for entry in document["results"]]
    assert (kinds.count("correct"), kinds.count("compile")) == (8, 1)
    assert "triton==3.6.0" in json.loads(metadata.read_text())["metadata"]["environment"]["requirements"]
    assert read_foreign(results).kind == "t4"


def test_entries_that_do_not_beat_the_untuned_schedule_are_marked(made):
    records = [
        *both(made, portable(32), 80, 100),
        *(made.record(t, projection=p, schedule=portable(64), profile="portable", default=True)
          for p, t in (("gate_up", 80.5), ("down", 100.5))),
        *both(made, portable(32), 60, 60, routed_m=2048),
        *(made.record(t, projection=p, schedule=portable(64), profile="portable", default=True, routed_m=2048)
          for p, t in (("gate_up", 80), ("down", 100))),
    ]  # fmt: skip
    (table,) = triton_moe.build_triton_tables(to_frame(records))
    assert table.default_us == {128: 181, 256: 180}
    assert table.not_faster() == [128]


def test_a_shape_without_a_table_is_no_error_and_lists_every_path(tmp_path):
    put(tmp_path, NAME, {"1": TILE})
    put(tmp_path, "triton_3_6_0/E=48,N=1024,device_name=NVIDIA_L4,dtype=int4_w4a16.json", {"1": TILE})
    assert find_table(tmp_path, E=48, N=2048, device_name="NVIDIA H200").path == tmp_path / NAME
    assert find_table(tmp_path, E=48, N=2048, device_name="NVIDIA L4").path.parent.name == "triton_3_6_0"
    nothing = find_table(tmp_path, E=128, N=384, device_name="Tesla T4")
    assert nothing.path is None
    assert [p.name for p in nothing.tried[:2]] == [
        "E=128,N=384,device_name=Tesla_T4,dtype=int4_w4a16.json",
        "E=128,N=384,device_name=Tesla_T4.json",
    ]


def test_lookup_in_a_folder(tmp_path):
    import subprocess
    import sys

    put(tmp_path, NAME, {"1": TILE})
    command = [sys.executable, "-m", "chord_lab", "table", "lookup", str(tmp_path), "--m", "4", "--json"]

    def run(*more):
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=False)

    found = json.loads(run("--shape", "48,2048", "--device-name", "NVIDIA H200").stdout)
    assert (found["rule"], found["row"]) == ("nearest", {"key": 1})
    none = run("--shape", "128,384", "--device-name", "Tesla T4")
    assert none.returncode == 0
    result = json.loads(none.stdout)
    assert result["rule"] == "default"
    assert "using default; tried" in result["warning"]
    assert len(result["tried"]) == 2
    assert run().returncode == 2

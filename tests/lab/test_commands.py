import json
import subprocess
import sys

import pytest


def chord_lab(*arguments):
    command = [sys.executable, "-m", "chord_lab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_routing_json_has_the_promised_keys():
    arguments = ("--experts", "48", "--top-k", "8", "--tokens", "1", "--block-m", "64")
    done = chord_lab("routing", *arguments, "--json")
    result = json.loads(done.stdout)
    assert {"tok_e", "num_m_blocks", "num_tokens_padded", "padding_share", "active_experts"} <= set(result)
    assert (sum(result["tok_e"]), result["num_m_blocks"], result["num_tokens_padded"]) == (8, 8, 512)
    assert result["padding_share"] == 1 - 8 / 512
    assert result["smaller_block"]["block_m"] == 8
    shown = chord_lab("routing", *arguments).stdout
    assert "98.4%" in shown
    assert "block_m 8 needs 8 blocks" in shown


def test_one_gpus_share_of_a_placement_counts_foreign_routes_apart(tmp_path):
    path = tmp_path / "placement.json"
    devices = [{"device_id": i, "device_expert": e} for i, e in enumerate(([3, 0, 1], [2, 3, 1]))]
    path.write_text(json.dumps({"layer_list": [{"layer_id": 0, "device_list": devices}]}))
    options = ("routing", "--experts", "4", "--top-k", "2", "--tokens", "100", "--placement", str(path))
    shares = [json.loads(chord_lab(*options, "--gpu", str(gpu), "--json").stdout) for gpu in (0, 1)]
    everyone = json.loads(chord_lab(*options[:-2], "--json").stdout)["tok_e"]
    assert shares[0]["tok_e"] == [everyone[e] for e in (3, 0, 1)]
    assert shares[1]["num_foreign"] == everyone[0]
    assert chord_lab(*options, "--gpu", "2").returncode == 2


def test_scenarios_json():
    listed = json.loads(chord_lab("scenarios", "--json").stdout)
    assert "kimi-k2/ep8/decode" in [s["name"] for s in listed]
    one = json.loads(chord_lab("scenarios", "kimi-k2/ep8/prefill", "--json").stdout)
    assert one["problems"]["gate_up"] == {"num_experts": 48, "N": 4096, "K": 7168, "group_size": 32, "top_k": 8}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("scenarios", "kimi-k2/ep8/decod"), "did you mean kimi-k2/ep8/decode"),
        (("scenarios", "./none.json"), "no such file"),
        (("scenarios", "kimi-k2/tp7/decode"), "tp must divide 64"),
        (("routing", "--experts", "4", "--tokens", "1"), "top_k must be from 1 to the 4 experts"),
        (("routing", "--experts", "9", "--tokens", "1", "--block-m", "0"), "block_m must be at least 1"),
        (("routing", "--experts", "9", "--tokens", "1", "--draw", "x"), "unknown draw"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, line):
    done = chord_lab(*arguments)
    assert done.returncode == 2
    assert line in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


MOE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 640,
}


def test_a_config_file_shows_where_e_and_n_come_from(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MOE))
    result = json.loads(chord_lab("scenarios", str(path), "--json").stdout)
    keys = {row["shard"]: row["table_key"] for row in result["shards"]}
    assert keys["ep8"] == "E=2,N=640"
    assert keys["tp4"] == "E=16,N=160"
    assert "tp8" not in keys  # 640 / 8 = 80 is not whole groups of 32
    one = json.loads(chord_lab("scenarios", str(path), "--shard", "ep2", "--phase", "prefill", "--json").stdout)
    assert one["problems"]["down"]["num_experts"] == 8
    assert one["weights"] == "not quantized"
    shown = chord_lab("scenarios", str(tmp_path))
    assert shown.returncode == 0
    assert "as if it were int4" in shown.stdout


def test_a_checkpoint_of_another_kind_is_refused_unless_only_its_shapes_are_wanted(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MOE | {"quantization_config": {"quant_method": "fp8"}}))
    refused = chord_lab("scenarios", str(path))
    assert refused.returncode == 2
    assert "fp8 weights: not this kernel" in refused.stderr
    assert "--shapes-only" in refused.stderr
    allowed = chord_lab("scenarios", str(path), "--shapes-only", "--json")
    assert allowed.returncode == 0
    assert json.loads(allowed.stdout)["why_not"].startswith("fp8 weights")
    assert chord_lab("scenarios", str(path), "--shapes-only", "--shard", "tp8").returncode == 2


def test_every_command_explains_itself():
    listed = chord_lab("--help")
    assert listed.returncode == 0
    for command in ("doctor", "scenarios", "routing", "export", "table", "report"):
        assert command in listed.stdout
        helped = chord_lab(command, "--help")
        assert helped.returncode == 0, command

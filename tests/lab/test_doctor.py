import json
import subprocess
import sys

import pytest

from chord_lab import capabilities
from chord_lab.capabilities import Check, Gpu, diagnose, select_visible, version_tuple
from chord_lab.errors import UserError
from chord_lab.records.places import recorded_devices

GPUS = [Gpu(0, "NVIDIA H200", "GPU-aaaa1111-0000", 1), Gpu(1, "NVIDIA H200", "GPU-bbbb2222-0000", 1)]


@pytest.mark.parametrize(
    ("value", "chosen", "problem"),
    [
        (None, [0, 1], ""),
        ("0,1", [0, 1], ""),
        ("1", [1], ""),
        (" 1 , 0 ", [1, 0], ""),
        ("GPU-bbbb2222-0000", [1], ""),
        ("GPU-bbbb", [1], ""),  # CUDA takes any unambiguous beginning
        ("", [], "hides every GPU"),
        ("7", [], "'7' names no GPU"),
        ("0,7,1", [0], "'7' names no GPU"),
        ("-1", [], "-1 hides every GPU"),
        ("GPU-cccc", [], "'GPU-cccc' names no GPU"),
        ("NoDevFiles", [], "names no GPU"),
        ("0,0", [], "named twice"),
    ],
)
def test_visible_devices(value, chosen, problem):
    gpus, line = select_visible(value, GPUS)
    assert [gpu.ordinal for gpu in gpus] == chosen
    assert (problem in line) if problem else line == ""
    assert "\n" not in line


def test_visible_devices_without_any_gpu():
    assert select_visible("0", []) == ([], "CUDA_VISIBLE_DEVICES=0: '0' names no GPU; there are: none")


@pytest.mark.parametrize(
    ("text", "version"),
    [("2025.3.1.0", (2025, 3, 1, 0)), ("Version 2026.2.1 (build 3)", (2026, 2, 1)), ("none", ()), ("7", ())],
)
def test_version_tuple(text, version):
    assert version_tuple(text) == version


def fake_ncu(tmp_path, monkeypatch, script):
    path = tmp_path / "ncu"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("script", "ok", "remark"),
    [
        ("echo 'Version 2025.3.1.0 (build 123)'", True, ""),
        ("echo 'Version 2021.2.0.0 (build 1)'", False, "too old"),
        ("echo nonsense", False, "does not say its version"),
        ("exit 3", False, "does not say its version"),
    ],
)
def test_ncu_of_any_kind(tmp_path, monkeypatch, script, ok, remark):
    fake_ncu(tmp_path, monkeypatch, script)
    check = next(c for c in diagnose().checks if c.name == "ncu")
    assert check.ok is ok
    assert remark in check.remark


def test_nsight_python_is_held_back_by_an_old_ncu(tmp_path, monkeypatch):
    monkeypatch.setattr(capabilities, "_package", lambda name, remark, module="": Check(name, True, "1.1.0"))
    fake_ncu(tmp_path, monkeypatch, "echo 'Version 2025.3.1.0'")
    assert capabilities._nsight_python() == Check(
        "nsight-python", False, "1.1.0", "needs ncu 2026.2.1 or newer; found 2025.3.1.0"
    )
    fake_ncu(tmp_path, monkeypatch, "echo 'Version 2026.2.1.0'")
    assert capabilities._nsight_python().ok


def test_every_missing_thing_says_why():
    report = diagnose()
    assert all(check.remark for check in report.checks if not check.ok)
    assert all(c.why_not for c in report.capabilities if not c.available)
    names = {check.name for check in report.checks}
    assert {"driver", "GPU", "torch", "triton", "ncu", "nsight-python", "humming-kernels", "records"} <= names


def test_records_are_looked_for_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("CHORD_LAB_DATA", str(tmp_path))
    with pytest.raises(UserError, match="no recorded measurements found"):
        recorded_devices()
    assert not next(c for c in diagnose().checks if c.name == "records").ok
    (tmp_path / "nvidia_h200").mkdir()
    (tmp_path / "nvidia_h200" / "x.parquet").touch()
    assert recorded_devices() == ["nvidia_h200"]


def chord_lab(*arguments):
    command = [sys.executable, "-m", "chord_lab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_doctor_speaks_json():
    done = chord_lab("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"chord_lab", "gpus", "visible", "checks", "capabilities"} <= set(report)


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

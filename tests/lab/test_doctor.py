import json
import subprocess
import sys

import pytest

from chord_lab import capabilities
from chord_lab.capabilities import Check, Gpu, diagnose, select_visible, version_tuple
from chord_lab.errors import UserError
from chord_lab.records.parquet import write_parquet
from chord_lab.records.places import described_recordings, shipped_scenarios

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


def test_records_are_looked_for_where_the_user_says(tmp_path, monkeypatch, made):
    monkeypatch.setenv("CHORD_LAB_DATA", str(tmp_path))
    with pytest.raises(UserError, match="no recorded measurements found"):
        described_recordings()
    assert not next(c for c in diagnose().checks if c.name == "records").ok
    assert shipped_scenarios() == set()
    (tmp_path / "nvidia_h200").mkdir()
    (tmp_path / "nvidia_h200" / "x.parquet").touch()  # empty: no records file
    with pytest.raises(UserError, match="not a records file"):
        described_recordings()
    write_parquet(made.sweep(), tmp_path / "nvidia_h200" / "y.parquet")
    assert described_recordings() == ["nvidia_h200: 32 records of 1 scenarios, 2026-11-29"]
    assert shipped_scenarios() == {"kimi-k2/ep8/prefill"}


def chord_lab(*arguments):
    command = [sys.executable, "-m", "chord_lab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_doctor_speaks_json():
    done = chord_lab("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"chord_lab", "gpus", "visible", "checks", "capabilities"} <= set(report)

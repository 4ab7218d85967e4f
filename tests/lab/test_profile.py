"""`chord-lab profile`: refusals with stand-in executables, collectors, schedules by name."""

import inspect
import json
import os
import sys
import types

import pytest
from stand_in_ncu import TO_EXPORT, chord_lab, shell_ncu
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.traces import collectors

FORBIDDEN = 'echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"; exit 1'
IN_USE = 'echo "==ERROR== Profiling failed because a driver resource was unavailable."; exit 1'


# Refusals: the right line, exit code 2, nothing half written


@pytest.mark.parametrize(
    ("version", "then", "words"),
    [
        (None, "", "no ncu on PATH"),
        ("2023.3.1.0", "", "Nsight Compute 2023.3.1.0, too old: 2024.1 or newer is needed"),
        ("none", "", "does not say its version"),
        ("2025.3.1.0", FORBIDDEN, "forbade the GPU's performance counters (ERR_NVGPUCTRPERM): a setting of the host"),
        ("2025.3.1.0", 'echo "==WARNING== No kernels were profiled."; exit 0', "profiled no kernel"),
        ("2025.3.1.0", IN_USE, "another profiler"),
        ("2025.3.1.0", 'echo "==ERROR== Cuda driver is not compatible."; exit 1', "Cuda driver is not compatible"),
        ("2025.3.1.0", "exit 9", "ended with code 9"),
        ("2025.3.1.0", "echo done; exit 0", "wrote no report: done"),
        ("2024.1.0.0", f'{TO_EXPORT}; shift 2; exec "$@"', "no CUDA device is visible"),
    ],
    ids=["absent", "old", "no-version", "forbidden", "no-kernel", "in-use", "other", "crash", "no-report", "no-gpu"],
)  # fmt: skip
def test_refusals_are_one_line_and_leave_nothing(tmp_path, version, then, words):
    folder = tmp_path / "bin"
    folder.mkdir()
    os.symlink("/bin/sh", folder / "sh")
    if version is not None:
        shell_ncu(folder, version, then)
    done = chord_lab("profile", "kimi-k2/ep8/decode", "--tokens", 20, "--out", "out", path=folder, cwd=tmp_path)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("profiling ")]
    assert len(lines) == 1, done.stderr
    assert words in lines[0]
    assert done.stdout == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bin"]
    if version is None or "too old" in words:
        assert "--collector events" in lines[0]


def test_events_need_a_gpu_and_say_so(tmp_path):
    done = chord_lab("profile", "kimi-k2/ep8/decode", "--collector", "events", path="/nonexistent", cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "needs a CUDA GPU" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--schedule", "block_m=7"], "legal for"),
        (["--schedule", "wgmma fast"], "'fast' is no part of a label"),
        (["--schedule", "{bad"], "legal: default, a label"),
        (["--schedule", "speed=9"], "unknown field speed"),
        (["--collector", "nvprof"], "legal are auto, ncu, nsight-python, cupti, events"),
        (["--projection", "up"], "unknown projection 'up'"),
        (["--tokens", "0"], "legal are 1 to"),
    ],
)
def test_bad_requests(tmp_path, options, words):
    done = chord_lab("profile", "kimi-k2/ep8/decode", *options, path="/nonexistent", cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_metrics_option():
    assert collectors.ncu_options("full") == ["--set", "full"]
    assert "WarpStateStats" in collectors.ncu_options("lab")
    assert collectors.ncu_options("dram__bytes_read.sum") == [
        "--metrics",
        "dram__bytes_read.sum,gpu__time_duration.sum",
    ]
    for wrong in ("", "fast", "--set", "dram__bytes_read.sum;rm"):
        with pytest.raises(UserError, match="legal are lab, time, full"):
            collectors.ncu_options(wrong)


def test_a_gpu_without_some_metric_is_asked_again_for_sections_alone(tmp_path):
    once = 'case "$*" in *--metrics*) echo "==ERROR== Failed to find metric smsp__x"; exit 1;; esac'
    ncu = collectors.Ncu(str(shell_ncu(tmp_path, "2025.1.0.0", f"{once}; {TO_EXPORT}")), (2025, 1))
    collectors.run_ncu(ncu, ["true"], tmp_path / "r.ncu-rep")
    assert (tmp_path / "r.ncu-rep").exists()
    with pytest.raises(UserError, match="Failed to find metric smsp__x"):  # what was asked for by name is not dropped
        collectors.run_ncu(ncu, ["true"], tmp_path / "s.ncu-rep", metrics="smsp__x.sum")


def test_ncu_is_stopped_at_its_limit(tmp_path):
    ncu = collectors.Ncu(str(shell_ncu(tmp_path, "2025.1.0.0", "sleep 60")), (2025, 1, 0, 0))
    with pytest.raises(UserError, match="more than 1 s and was stopped"):
        collectors.run_ncu(ncu, ["true"], tmp_path / "r.ncu-rep", limit_s=1)


def test_clocks_are_left_alone_and_only_the_marked_launch_is_recorded(tmp_path):
    path = shell_ncu(tmp_path, "2025.1.0.0", f'echo "$@" > {tmp_path}/arguments; {TO_EXPORT}')
    collectors.run_ncu(collectors.Ncu(str(path), (2025, 1)), ["target"], tmp_path / "r.ncu-rep")
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("--clock-control") + 1] == "none"
    assert arguments[arguments.index("--profile-from-start") + 1] == "off"
    assert "--nvtx" in arguments and arguments[-1] == "target"


# Collectors by capability


def test_capabilities_say_why_not(tmp_path, monkeypatch):
    monkeypatch.delenv("CHORD_LAB_NCU", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {c.name: c for c in collectors.capabilities()}
    assert list(found) == list(collectors.COLLECTORS)
    assert found["events"].available
    assert not found["ncu"].available and "no ncu on PATH" in found["ncu"].why_not
    assert not found["nsight-python"].available and found["nsight-python"].why_not


def test_nsight_python_passes_its_gate_only_with_a_new_ncu(tmp_path, monkeypatch):
    monkeypatch.delenv("CHORD_LAB_NCU", raising=False)
    os.symlink("/bin/sh", tmp_path / "sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    versions = {"nsight-python": "1.1.0", "ncu-report": "2026.3.1"}
    monkeypatch.setattr(collectors, "_version", versions.get)
    shell_ncu(tmp_path, "2025.3.1.0", "exit 1")
    gate = {c.name: c for c in collectors.capabilities()}["nsight-python"]
    assert not gate.available and "needs ncu 2026.2.1 or newer, found 2025.3.1.0" in gate.why_not
    shell_ncu(tmp_path, "2026.3.0.0", "exit 1")
    assert {c.name: c for c in collectors.capabilities()}["nsight-python"].available
    versions["ncu-report"] = "2026.1.0"
    gate = {c.name: c for c in collectors.capabilities()}["nsight-python"]
    assert not gate.available and "needs ncu-report 2026.3" in gate.why_not


def test_a_tool_that_gives_up_is_named_with_what_else_there_is(monkeypatch):
    """CUPTI newer than the driver answers with a bare code (seen on an H200 with driver 580)."""
    from chord_lab.measurement.profiled_nsight import NsightTool

    def refuse(_tool):
        raise RuntimeError("ERROR_INVALID_PARAMETER (1)")

    stand_in = types.SimpleNamespace(Tool=types.SimpleNamespace(CUPTI="cupti"), activate=refuse)
    monkeypatch.setitem(sys.modules, "nsight", stand_in)
    monkeypatch.setenv("NSPY_NCU_INIT_AT_IMPORT", "1")
    message = "cupti of nsight-python gave up .ERROR_INVALID_PARAMETER .1.*: use --collector ncu or events"
    with pytest.raises(RuntimeError, match=message):
        NsightTool("cupti", [])


def test_the_calls_fit_the_installed_nsight_python():
    nsight = pytest.importorskip("nsight")
    parameters = inspect.signature(nsight.analyze.kernel).parameters
    wanted = {"configs", "runs", "metrics", "clock_control", "cache_control", "thermal_mode", "verbosity"}
    assert wanted <= set(parameters)
    assert hasattr(nsight.VerbosityLevel, "SILENT") and hasattr(nsight.Tool, "CUPTI")
    assert "none" in str(parameters["clock_control"].annotation)
    assert "off" in str(parameters["thermal_mode"].annotation)


@pytest.mark.parametrize(
    "knobs",
    [
        {"kernel": "mma_sync", "num_stages": 2, "ctas_per_sm": 3, "stream_k": True},
        {"kernel": "wgmma", "num_stages": 4, "swap_ab": True, "persistent": True, "tile_order": "dynamic"},
        {"kernel": "portable", "num_stages": 3, "group_m": 8, "split_k": 4, "token_slicing": "branched"},
        {"kernel": "portable", "num_stages": 3, "dequant": "exponent"},
    ],
)
def test_a_label_reads_back_as_its_schedule(knobs):
    from chord_lab.cli.schedule_text import parse_schedule

    schedule = Schedule(block_m=16, block_n=256, block_k=128, num_warps=4, **knobs)
    default = Schedule(kernel="portable", block_m=16, block_n=64, block_k=64, num_warps=4, num_stages=3)
    assert parse_schedule(schedule.label(), default) == schedule
    assert parse_schedule(json.dumps(schedule.to_dict()), default) == schedule
    assert parse_schedule("default", default) is default
    assert (
        parse_schedule("block_m=32,swap_ab=true,token_slicing=dynamic", default).label()
        == "portable 32x64x64 w4 s3 swap dynamic"
    )

"""`chord-lab profile`: refusals with stand-in executables, and the whole way on CPU tensors with a stand-in ncu."""

import inspect
import json
import os
import stat
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.traces import collectors, read_trace

FORBIDDEN = 'echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"; exit 1'
IN_USE = 'echo "==ERROR== Profiling failed because a driver resource was unavailable."; exit 1'
TO_EXPORT = 'while [ "$1" != "--export" ]; do shift; done; : > "$2"'  # leaves an empty report
TAIL = ":none:none:none:none:none:none"


def executable(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def shell_ncu(folder, version, then):
    """An ncu that says this version and does ``then`` otherwise."""
    about = f'if [ "$1" = --version ]; then echo "Version {version} (build 1)"; exit 0; fi'
    return executable(folder, "ncu", f"#!/bin/sh\n{about}\n{then}\n")


def chord_lab(*arguments, path, cwd):
    environment = {**os.environ, "PATH": str(path), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("CHORD_LAB_NCU", None)
    return subprocess.run(
        [sys.executable, "-m", "chord_lab", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=120, env=environment, cwd=cwd,
    )  # fmt: skip


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


def test_the_calls_fit_the_installed_nsight_python():
    nsight = pytest.importorskip("nsight")
    parameters = inspect.signature(nsight.analyze.kernel).parameters
    wanted = {"configs", "runs", "metrics", "clock_control", "cache_control", "thermal_mode", "verbosity"}
    assert wanted <= set(parameters)
    assert hasattr(nsight.VerbosityLevel, "SILENT") and hasattr(nsight.Tool, "CUPTI")
    assert "none" in str(parameters["clock_control"].annotation)
    assert "off" in str(parameters["thermal_mode"].annotation)


# The whole way on CPU tensors

FAKE_NCU = """
    #!{python}
    import json, subprocess, sys
    from pathlib import Path
    arguments = sys.argv[1:]
    if arguments[0] == "--version":
        print("Version 2025.3.1.0")
        sys.exit(0)
    if arguments[0] == "--import":
        print(Path(arguments[1]).read_text())
        sys.exit(0)
    report = Path(arguments[arguments.index("--export") + 1])
    target = arguments[arguments.index("--export") + 2 :]
    done = subprocess.run(target)
    if done.returncode:
        print("==ERROR== The application returned an error code (%d)." % done.returncode)
        sys.exit(1)
    from chord_lab.measurement.profiled import range_names
    from chord_lab.records.attempt import candidate_from_dict, point_from_dict
    jobs = json.loads(Path(target[-2]).read_text())["jobs"]
    header = ["ID", "Kernel Name", "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"]
    header += ["gpu__time_duration.sum", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"]
    lines = [header, ["", "", "", "ns", "%"]]
    for i, job in enumerate(jobs):
        names = range_names(point_from_dict(job["point"]), candidate_from_dict(job["candidate"]))
        path = "1  " + "  ".join('""<default domain>:%s{tail}""' % name for name in names)
        lines.append([str(2 * i), "moe", path, str(100000 + i), "80.5"])
        lines.append([str(2 * i + 1), "moe_sum", path, "1000", "10.5"])
    text = chr(10).join(",".join('"' + cell + '"' for cell in line) for line in lines)
    report.write_text("==PROF== Connected" + chr(10) + text)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Two schedules of a tiny point, a stand-in ncu, and timing on the CPU."""
    from chord_lab.measurement.live import LiveSettings
    from chord_lab.measurement.rounds import RoundsPolicy
    from chord_lab.measurement.worker import WorkerSettings
    from chord_lab.records.attempt import Candidate, Point
    from chord_lab.sweeps.points import routing_ref
    from chord_lab.traces import ncu_report

    folder = tmp_path / "bin"
    folder.mkdir()
    fake = textwrap.dedent(FAKE_NCU).strip().format(python=sys.executable, tail=TAIL)
    monkeypatch.setenv("CHORD_LAB_NCU", str(executable(folder, "ncu", fake)))
    monkeypatch.setattr(ncu_report, "available", lambda: "no ncu-report on this machine")
    here = os.path.dirname(__file__)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *sys.path]))
    monkeypatch.syspath_prepend(here)
    point = Point(
        scenario="toy/ep1/decode",
        projection="gate_up",
        problem=MoeProblem(num_experts=6, N=64, K=128, top_k=2),
        profile="portable",
        num_tokens=9,
        routing=routing_ref("uniform", num_tokens=9, num_experts=6, top_k=2, seed=1),
    )
    schedules = [
        Schedule(kernel="portable", block_m=16, block_n=64, block_k=64, num_warps=4, num_stages=s) for s in (2, 3)
    ]
    jobs = [(point, Candidate(schedule=s, default=i == 0)) for i, s in enumerate(schedules)]
    live = LiveSettings(
        worker=WorkerSettings(bench_settings={"timer": "cpu_timer:CpuTimer", "launchers": "cpu_timer:launchers"}),
        policy=RoundsPolicy(min_rounds=3, keep=(2,)),
        compile_server="fake_bench:FakeCompiler",
        jobs=1,
        peers="none",
        baseline=False,
        load_s=0.0,
    )
    return jobs, live


def test_profile_joins_counters_time_schedule_and_load_in_one_row(toy, tmp_path):
    from chord_lab.cli.profile import point_rows
    from chord_lab.cli.profiling import run_profile
    from chord_lab.records import read_records
    from chord_lab.traces.join import points_frame

    jobs, live = toy
    out = tmp_path / "deep" / "out"
    done = run_profile(jobs, out, collector="ncu", live=live)
    stem = "toy-ep1-decode-gate_up-18-uniform"
    assert sorted(p.name for p in out.iterdir()) == [f"{stem}.ncu-rep", f"{stem}.pq", f"{stem}.records.parquet"]
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["out"]

    frame = points_frame([read_trace(out / f"{stem}.pq")])
    assert len(frame) == 2
    for row, (point, candidate) in zip(frame.to_dict("records"), jobs, strict=True):
        assert row["key"] == candidate.key_at(point)
        assert row["schedule"] == candidate.schedule
        assert tuple(row["tok_e"]) == point.routing.tok_e
        assert (row["routed_m"], row["projection"]) == (18, "gate_up")
        assert row["num_kernels"] == 2 and row["name"] == "moe"  # the longer of the launch's two kernels
        assert row["profiled_us"] == pytest.approx(101, abs=0.01)
        assert row["dram_pct"] == 80.5
        assert row["record_time_us"] > 0
        assert row["num_bytes"] == point.num_bytes and row["flops"] == point.flops
    records = [r for r in read_records(out).records if r.kind == "candidate"]
    assert {r.key() for r in records} == set(frame["key"])
    rows = point_rows(done)
    assert all(r["profiled_over_time"] == pytest.approx(r["profiled_us"] / r["time_us"]) for r in rows)


def test_without_nvtx_the_order_of_launches_tells():
    from captures import capture, point, slicing

    from chord_lab.traces.join import with_identity
    from chord_lab.traces.table import kernel_frame

    made = capture([(point(), slicing(how), {"time_us": time}) for how, time in (("static", 2.0), ("dynamic", 1.0))])
    bare = replace(made, kernels=kernel_frame({"name": ["a", "b"], "time_us": [2.0, 1.0]}), identity=())
    rows = [row for row in made.identity if row]
    keys = [row["key"] for row in rows]
    joined = with_identity(bare, rows[::-1], keys)
    assert [row["key"] for row in joined.identity] == keys
    assert "by the order of launches" in joined.notes[-1]
    assert with_identity(bare, rows, keys[:1]).identity == (None, None)  # two kernels for one key: nobody can tell


def test_a_wrong_kernel_is_not_profiled(toy, tmp_path):
    from chord_lab.cli.profiling import run_profile

    jobs, live = toy
    point, candidate = jobs[0]
    wrong = replace(candidate, schedule=replace(candidate.schedule, num_stages=7))  # the CPU launcher's fault
    with pytest.raises(UserError, match="cannot profile here: relative error"):
        run_profile([(point, wrong)], tmp_path / "out", collector="ncu", live=live)
    assert not (tmp_path / "out").exists()


def test_times_by_events_alone(toy, tmp_path):
    from chord_lab.cli.profile import point_rows
    from chord_lab.cli.profiling import run_profile

    jobs, live = toy
    done = run_profile(jobs, tmp_path / "out", collector="events", live=live)
    assert [f.name for f in done.files] == ["toy-ep1-decode-gate_up-18-uniform.records.parquet"]
    assert all(row["time_us"] > 0 and row["profiled_us"] != row["profiled_us"] for row in point_rows(done))


def test_rows_of_nsight_python_become_a_trace(tmp_path):
    from chord_lab.traces.nsight_rows import trace_of_rows

    rows = [
        {"kernel": "moe", "metric": "gpu__time_duration.sum", "value": 12.5, "unit": "us", "device": "NVIDIA H200"},
        {"kernel": "moe", "metric": "dram__bytes_read.sum", "value": 3.0, "unit": "Mbyte", "device": "NVIDIA H200"},
    ]
    trace = trace_of_rows({"done": [{"key": "abc", "rows": rows}]}, tmp_path / "x.json", "nsight-python")
    assert (trace.kernels["time_us"][0], trace.device) == (12.5, "NVIDIA H200")
    assert trace.metrics_of(0)["dram__bytes_read.sum"] == {"value": 3e6, "unit": "byte"}
    from chord_lab.traces.identity import key_in_path

    assert key_in_path(trace.kernels["nvtx"][0]) == "abc"


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


@pytest.mark.gpu
def test_profile_of_a_decode_point_agrees_with_its_event_times(tmp_path):
    from chord_lab.cli.profile import point_rows
    from chord_lab.cli.profiling import chosen_collector, chosen_jobs, run_profile

    try:
        collector = chosen_collector("ncu")
    except UserError as error:
        pytest.skip(str(error))
    jobs = chosen_jobs("kimi-k2/ep8/decode", ["default"], tokens=50)
    try:
        done = run_profile(jobs, tmp_path / "out", collector=collector)
    except UserError as error:
        if "ERR_NVGPUCTRPERM" in str(error):
            pytest.skip(str(error))
        raise
    (row,) = point_rows(done)
    assert 0.9 < row["profiled_over_time"] < 1.1
    assert row["dram_pct"] > 60 and row["pipe_tensor_pct"] > 1

"""`chord-lab profile` the whole way: on CPU tensors with a stand-in ncu, ended half-way, and on a GPU."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest
from stand_in_ncu import executable, shell_ncu
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.traces import read_trace

TAIL = ":none:none:none:none:none:none"

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
    stem = done.name
    assert stem.startswith("toy-ep1-decode-gate_up-18-uniform-")
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


def test_a_second_run_in_the_folder_keeps_the_first_and_its_point_is_shown_once(toy, tmp_path):
    from chord_lab.cli.profiling import file_stem, run_profile
    from chord_lab.traces.captures import load_library

    jobs, live = toy
    run_profile(jobs, tmp_path / "out", collector="ncu", live=live)
    run_profile(jobs[:1], tmp_path / "out", collector="ncu", live=live)  # other schedules of the same point
    run_profile(jobs[:1], tmp_path / "out", collector="ncu", live=live)  # the same again: its files are replaced
    library = load_library(tmp_path / "out")
    assert set(library.counters) == {file_stem(jobs), file_stem(jobs[:1])}
    assert len(library.points) == len(jobs) and library.points["key"].is_unique
    dates = dict(zip(library.points["key"], library.points["date"], strict=True))
    again, once = (candidate.key_at(point) for point, candidate in jobs)
    assert dates[again] > dates[once]


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_leaves_neither_files_nor_ncu(tmp_path, ended_by):
    folder = tmp_path / "bin"
    folder.mkdir()
    os.symlink("/bin/sh", folder / "sh")
    shell_ncu(folder, "2025.3.1.0", f"echo $$ > {tmp_path}/started; exec /bin/sleep 60")
    process = subprocess.Popen(
        [sys.executable, "-m", "chord_lab", "profile", "kimi-k2/ep8/decode", "--tokens", "20", "--out", "out"],
        env={**os.environ, "PATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path,
    )  # fmt: skip
    wait_for(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text().strip())
    process.send_signal(ended_by)
    assert process.wait(timeout=30) == 128 + ended_by
    wait_for(lambda: not running(int((tmp_path / "started").read_text())))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bin", "started"]


def wait_for(condition, seconds=30):
    for _ in range(seconds * 20):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"not within {seconds} s")


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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
    assert [f.name for f in done.files] == [f"{done.name}.records.parquet"]
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


@pytest.mark.gpu
@pytest.mark.alone
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

"""Telling files apart, refusing what is no profile in one line, and `chord-lab trace`."""

import gzip
import json
import os
import random
import sqlite3
import subprocess
import sys
import zipfile

import pandas as pd
import pytest
from typer.testing import CliRunner

from chord_lab.cli import app
from chord_lab.cli import trace as trace_command  # noqa: F401 (registers the command)
from chord_lab.errors import UserError
from chord_lab.traces import KERNEL_COLUMNS, read_trace
from chord_lab.traces.compare import counter_changes, kernel_changes, kernel_totals
from chord_lab.traces.stored import write_stored
from chord_lab.traces.table import shorten

NCU_RAW = (
    '"ID","Process ID","Kernel Name","Stream","Block Size","Grid Size","Device","gpu__time_duration.sum",'
    '"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","launch__registers_per_thread",'
    '"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","device__attribute_display_name"\n'
    '"","","","","","","","ns","%","register/thread","inst",""\n'
    '"0","1","moe_kernel","7","(128, 1, 1)","(396, 1, 1)","0","{time}","{dram}","122","{wait}","NVIDIA H200"\n'
)


def ncu_file(path, time="192192", dram="87.4", wait="0.77"):
    path.write_text(NCU_RAW.replace("{time}", time).replace("{dram}", dram).replace("{wait}", wait))
    return path


def torch_file(path, count=3):
    events = [
        {"ph": "X", "cat": "kernel", "name": f"k{i % 2}", "pid": 0, "tid": 7, "ts": 10.0 * i, "dur": 5.0,
         "args": {"device": 0, "stream": 7, "correlation": i, "grid": [i + 1, 1, 1], "block": [128, 1, 1]}}
        for i in range(count)
    ]  # fmt: skip
    events.append({"ph": "X", "cat": "user_annotation", "name": "step", "pid": 9, "tid": 9, "ts": 0.0, "dur": 99.0})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def chord_lab(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "chord_lab", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done


# Refusals


def _zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("trace.json", "{}")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.csv", b"", "an empty file"),
        ("white.csv", b"  \n\n", "nothing but white space"),
        ("run.nsys-rep", b"QDSTRM anything", "nsys export --type sqlite run.nsys-rep"),
        ("old.qdrep", b"\x00\x01", "nsys export"),
        ("a.zip", _zip, "zip archive"),
        ("kernel.cubin", b"\x7fELF\x02\x01\x01", "ELF binary"),
        ("weights.bin", bytes(range(256)), "binary file of no known kind"),
        (
            "notes.txt",
            b"the kernel was slow on tuesday\n",
            "no kernel table .*first line: 'the kernel was slow on tuesday'",
        ),
        ("table.csv", b"a,b\n1,2\n", "no kernel table"),
        ("pickle.pkl", b"\x80\x04\x95", "never loaded"),
        ("log.txt", b"==PROF== Connected\n==WARNING== No kernels were profiled.\n", "no kernels were profiled"),
        (
            "log.txt",
            b"==PROF== Connected\n==ERROR== The application returned an error code (1).\n",
            "failed: The application",
        ),
        ("t.json.gz", gzip.compress(b"", mtime=0), "nothing in it"),
        ("x.sqlite.gz", gzip.compress(b"SQLite format 3\x00more", mtime=0), "unpack it first"),
        ("x.sqlite", b"SQLite format 3\x00" + b"\x00" * 50, "SQLite"),
        ("r.ncu-rep", b"NVR\x00\x02\x00", "cut-off report"),
        ("p.parquet", b"PAR1not really", "Parquet"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(tmp_path, name, content, words):
    path = tmp_path / name
    content(path) if callable(content) else path.write_bytes(content)
    if name.endswith(".ncu-rep"):
        pytest.importorskip("ncu_report")
    with pytest.raises(UserError, match=words) as refusal:
        read_trace(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_missing_file_folder_and_foreign_parquet(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(UserError, match="a folder"):
        read_trace(tmp_path)
    pd.DataFrame({"routed_m": [1], "time_us": [2.0]}).to_parquet(tmp_path / "records.parquet")
    with pytest.raises(UserError, match=r"not a stored trace .its columns: routed_m, time_us"):
        read_trace(tmp_path / "records.parquet")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it: opening it would wait for ever
    with pytest.raises(UserError, match="a pipe or a device, not a file: write it to a file first"):
        read_trace(tmp_path / "pipe")


def test_forbidden_counters_are_a_host_policy_said_once(tmp_path):  # B90
    path = tmp_path / "log.txt"
    path.write_text(
        "==PROF== Connected to process 7 (/usr/bin/bench)\n"
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n" * 3
    )
    done = chord_lab("trace", path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.count("ERR_NVGPUCTRPERM") == 1
    assert "host, not of this image" in line
    assert "times by CUDA events" in line


def test_a_report_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    path = tmp_path / "r.ncu-rep"
    path.write_bytes(b"NVR\x00\x02\x00\x00\x00\x08\x07")
    with pytest.raises(UserError, match=r"chord-lab\[nsight\].*ncu --import"):
        read_trace(path)


# Damage of every kind: one line, never a traceback


def _seeds(tmp_path):
    database = sqlite3.connect(tmp_path / "seed.sqlite")
    database.execute("CREATE TABLE StringIds(id INTEGER PRIMARY KEY, value TEXT)")
    database.execute("CREATE TABLE META_DATA_EXPORT(name TEXT, value TEXT)")
    database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start, end, shortName, streamId, gridX, gridY, gridZ)")
    database.executemany("INSERT INTO StringIds VALUES(?, ?)", [(i, f"kernel {i}") for i in range(50)])
    rows = [(i * 10, i * 10 + 5, i % 50, 7, 1, 1, 1) for i in range(400)]
    database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES(?,?,?,?,?,?,?)", rows)
    database.commit()
    database.close()
    ncu_file(tmp_path / "seed.csv")
    torch_file(tmp_path / "seed.json", 60)
    (tmp_path / "seed.json.gz").write_bytes(gzip.compress((tmp_path / "seed.json").read_bytes()))
    write_stored(read_trace(tmp_path / "seed.csv"), tmp_path / "seed.parquet")
    return [tmp_path / f"seed.{suffix}" for suffix in ("sqlite", "csv", "json", "json.gz", "parquet")]


def test_damaged_files_end_in_one_line_or_a_table(tmp_path):
    chance = random.Random(20261129)
    outcomes = {"read": 0, "refused": 0}
    for seed in _seeds(tmp_path):
        whole = seed.read_bytes()
        assert len(read_trace(seed).kernels) > 0
        for turn in range(60):
            damaged = bytearray(whole)
            if turn % 3 == 0:
                del damaged[chance.randrange(1, len(damaged)) :]
            for _ in range(chance.choice((0, 1, 5, 50)) if turn % 3 == 0 else chance.choice((1, 5, 50))):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            path = tmp_path / f"damaged{''.join(seed.suffixes)}"
            path.write_bytes(damaged)
            try:
                trace = read_trace(path)
            except UserError as refusal:
                assert "\n" not in str(refusal), refusal
                assert str(path) in str(refusal)
                outcomes["refused"] += 1
            else:
                assert list(trace.kernels.columns) == list(KERNEL_COLUMNS)
                outcomes["read"] += 1
    assert outcomes["refused"] > 50 and outcomes["read"] > 20


# The command


def test_json_of_a_trace(tmp_path):
    done = chord_lab("trace", ncu_file(tmp_path / "page.csv"), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"kind", "device", "kernels", "nvtx", "notes"} <= set(found)
    (kernel,) = found["kernels"]
    assert (kernel["name"], kernel["time_us"], kernel["grid"], kernel["block"]) == (
        "moe_kernel",
        192.192,
        [396, 1, 1],
        [128, 1, 1],
    )
    assert (kernel["registers"], kernel["smem_bytes"], kernel["stream"]) == (122, None, 7)
    assert kernel["metrics"]["gpu__time_duration.sum"] == {"value": 192192.0, "unit": "ns"}
    limited = json.loads(chord_lab("trace", torch_file(tmp_path / "t.json"), "--json", "--limit", 2).stdout)
    assert (len(limited["kernels"]), limited["num_kernels"], limited["nvtx"][0]["name"]) == (2, 3, "step")


def test_shown_on_a_terminal(tmp_path):
    done = chord_lab("trace", ncu_file(tmp_path / "page.csv"))
    assert done.returncode == 0
    assert "moe_kernel" in done.stdout and "NVIDIA H200" in done.stdout and "87.4" in done.stdout
    assert "note: no start times" in done.stdout
    refused = chord_lab("trace", tmp_path / "none.json")
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1


def test_chrome_and_parquet_files_are_whole_or_absent(tmp_path):
    page = ncu_file(tmp_path / "page.csv")
    done = chord_lab("trace", page, "--chrome", tmp_path / "nowhere" / "out.json")
    assert done.returncode == 2 and "cannot be written" in done.stderr
    done = chord_lab("trace", page, "--parquet", tmp_path / "nowhere" / "out.parquet")
    assert done.returncode == 2 and "cannot be written" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.csv"]


def test_stored_trace_is_the_same_trace(tmp_path):
    trace = read_trace(ncu_file(tmp_path / "page.csv"))
    write_stored(trace, tmp_path / "page.parquet")
    again = read_trace(tmp_path / "page.parquet")
    pd.testing.assert_frame_equal(again.kernels, trace.kernels, check_categorical=False)
    assert again.metrics_of(0) == trace.metrics_of(0)
    assert (again.kind, again.device, again.notes, again.facts) == (trace.kind, trace.device, trace.notes, trace.facts)


def test_what_changed_between_two_reports(tmp_path):
    before = read_trace(ncu_file(tmp_path / "static.csv", time="216000", dram="75.0", wait="1.19"))
    after = read_trace(ncu_file(tmp_path / "semi.csv"))
    (kernel,) = kernel_changes(before, after)
    assert (kernel.name, kernel.delta_us) == ("moe_kernel", pytest.approx(-23.808))
    changes = {c.name: (c.before, c.after) for c in counter_changes(before, after)}
    assert changes == {"time_us": (216.0, 192.192), "dram_pct": (75.0, 87.4), "stall_wait": (1.19, 0.77)}
    done = chord_lab("trace", before.path, "--against", after.path, "--json")
    assert json.loads(done.stdout)["kernels"][0]["delta_us"] == pytest.approx(-23.808)
    done = chord_lab("trace", before.path, "--against", after.path)
    assert "-23.8" in done.stdout and "-0.42" in done.stdout
    with pytest.raises(UserError, match="no kernel 3; it has 1"):
        counter_changes(before, after, (0, 3))


def test_kernels_that_differ_in_their_last_words_look_different(tmp_path):
    start = "sm80_gemm_" + "f32" * 40
    path = torch_file(tmp_path / "t.json")
    text = path.read_text().replace('"k0"', f'"{start}_execute"')
    path.write_text(text.replace('"k1"', f'"{start}_execute_split_k"'))
    shown = CliRunner().invoke(app, ["trace", str(path)], env={"COLUMNS": "200"}).output
    assert "_execute_split_k" in shown and "_execute " in shown
    assert [len(shorten("x" * n, 100)) for n in (99, 100, 101, 500)] == [99, 100, 100, 100]


def test_totals_by_kernel(tmp_path):
    totals = kernel_totals(read_trace(torch_file(tmp_path / "t.json")))
    assert [(t.name, t.launches, t.total_us, round(t.share, 3)) for t in totals] == [
        ("k0", 2, 10.0, 0.667),
        ("k1", 1, 5.0, 0.333),
    ]

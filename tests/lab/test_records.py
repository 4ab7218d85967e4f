from __future__ import annotations

import enum
import errno
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.records import (
    CompileFacts,
    Environment,
    Journal,
    Method,
    Record,
    RoutingRef,
    candidate_key,
    from_row,
    is_too_short,
    lock,
    median_us,
    num_bytes,
    plain,
    read_frame,
    read_journal,
    read_records,
    read_tables,
    to_frame,
    to_row,
    write_parquet,
)
from chord_lab.records.attempt import Candidate, record_of
from chord_lab.sweeps.points import scenario_points

ENVIRONMENT = Environment(device="nvidia_h200", device_name="NVIDIA H200", num_sms=132, triton="3.6.0", ptxas="12.9")
PROBLEM = MoeProblem(num_experts=4, N=64, K=128, top_k=2)
SCHEDULE = Schedule(kernel="portable", block_m=16, block_n=64, block_k=32, num_warps=4, num_stages=2)
ROUTING = RoutingRef(
    draw="uniform", generator="numpy", seed=3, num_tokens=4, num_experts=4, top_k=2, tok_e=(0, 3, 5, 0)
)


def record(**over) -> Record:
    values = {
        "run_id": "r1",
        "date": "2026-11-29T00:00:00+00:00",
        "scenario": "toy/ep1/decode",
        "projection": "gate_up",
        "profile": "portable",
        "problem": PROBLEM,
        "schedule": SCHEDULE,
        "num_tokens": 4,
        "routed_m": 8,
        "routing": ROUTING,
        "environment": ENVIRONMENT,
        "times_us": ((10.0, 11.0, 12.0), (20.0,), (12.0, 14.0)),
        "rounds": (0, 1, 2),
        "sm_mhz": (1980.0, 1900.0, 1980.0),
        "facts": CompileFacts(registers=128),
    }
    return Record(**{**values, **over})


def test_row_round_trip_keeps_everything():
    original = record(rel_error=1e-3, rule="", reason="")
    assert from_row(json.loads(json.dumps(to_row(original)))) == original


def test_row_round_trip_of_records_without_schedule_or_problem():
    ceiling = record(kind="ceiling", implementation="copy", problem=None, schedule=None, routing=None, work_bytes=7)
    assert from_row(to_row(ceiling)) == ceiling
    peer = record(kind="peer", implementation="humming", schedule=None, config='{"block_shape": [8, 128, 64]}')
    assert from_row(to_row(peer)) == peer


def test_median_is_that_of_the_median_repeat():
    assert median_us(record()) == 13.0


def test_zero_elapsed_is_too_short_to_time_and_has_no_rate():
    zero = record(times_us=((0.0, 0.0), (0.0,)))
    frame = to_frame([zero, record()])
    assert is_too_short(zero) and median_us(zero) is None
    assert frame.time_us.isna().tolist() == [True, False]
    assert frame.bandwidth_gbps.isna().tolist() == [True, False]


def test_key_ignores_the_order_of_its_parts():
    schedule_a = Schedule(num_stages=2, num_warps=4, block_k=32, block_n=64, block_m=16, kernel="portable")
    assert record(schedule=schedule_a).key() == record().key()
    assert candidate_key(a=1, b=(2, 3)) == candidate_key(b=[2, 3], a=1) != candidate_key(a=2, b=[2, 3])
    assert record(schedule=replace(SCHEDULE, block_m=32)).key() != record().key()
    assert record(routing=replace(ROUTING, tok_e=(8, 0, 0, 0))).key() != record().key()


def test_enums_and_nested_dataclasses_become_plain():
    class Colour(enum.Enum):
        RED = "red"

    assert plain({"c": Colour.RED, "deep": [{"x": (Colour.RED, PROBLEM)}], "nan": float("nan")}) == {
        "c": "red",
        "deep": [{"x": ["red", PROBLEM.to_dict()]}],
        "nan": None,
    }


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("date", 5), ("run_id", 5), ("default", "yes"), ("block_m", 1e9), ("routed_m", 1 << 40), ("seed", 1 << 70),
        ("num_sms", True), ("tok_e", [-1]), ("tok_e", "zz"), ("rounds", ["a"]), ("rounds", [10**30]), ("times_us", [5]),
        ("times_us", [["x"]]), ("sm_mhz", 7), ("format", "x"), ("routing_top_k", "x"),
    ],
    ids=str,
)  # fmt: skip
def test_a_line_of_another_type_is_a_miss_and_nothing_else_is_lost(tmp_path, column, value):
    """The whole file becomes one table with one type a column: a single odd value would stop all of it."""
    lines = [to_row(record()), to_row(record()) | {column: value}, to_row(record(run_id="r2"))]
    path = tmp_path / "journal-x.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table, notices = read_tables(path)
    assert table["run_id"].to_pylist() == ["r1", "r2"]
    assert len(notices) == 1 and f"line 2: {column} must be " in notices[0]


@pytest.mark.parametrize("status", ["fine", "", None])
def test_unknown_status_is_refused(status):
    with pytest.raises(ValueError, match="legal are ok, invalid"):
        record(status=status)


def test_frame_derives_times_and_rates(tmp_path):
    failed = record(status="crashed", times_us=(), rounds=(), sm_mhz=())
    path = write_parquet([record(), failed], tmp_path / "a.parquet")
    frame, notices = read_frame(path)
    assert notices == []
    assert frame.time_us[0] == 13.0 and frame.time_us.isna()[1]
    assert frame.active_experts.tolist() == [2, 2]
    assert frame.num_bytes[0] == PROBLEM.num_bytes(8, 2)
    assert frame.tflops[0] == pytest.approx(PROBLEM.flops(8) / 13.0 / 1e6)
    assert frame.num_rounds.tolist() == [3, 0]
    assert [str(s) for s in frame.status] == ["ok", "crashed"]


@pytest.mark.parametrize("name", ["kimi-k2/ep8/prefill", "kimi-k2/ep8/grouped_prefill", "kimi-k2/ep8/grouped_decode"])
def test_bytes_follow_the_rows_that_the_interface_reads(name):
    """Indexed gate_up reads a token's row of x once for all its routes; grouped rows were copied out by expert."""
    point = scenario_points(name, tokens="published", projections=["gate_up"])[0]
    made = record_of(
        point,
        Candidate(schedule=SCHEDULE),
        run_id="r",
        date="2026-11-29",
        environment=ENVIRONMENT,
        times_us=((10.0,),),
        rounds=(0,),
    )
    x_rows = point.routed_m // point.problem.top_k if point.interface == "indexed" else point.routed_m
    weights = point.routing.active_experts * 4096 * (7168 // 2 + 7168 // 32 * 2)
    want = weights + (x_rows * 7168 + point.routed_m * 4096) * 2
    frame = to_frame([made])
    assert (point.num_bytes, num_bytes(made), frame.num_bytes[0]) == (want, want, want)


def test_parquet_round_trip(tmp_path):
    ceiling = record(kind="ceiling", implementation="copy", problem=None, schedule=None, routing=None)
    records = [record(), record(status="invalid", rule="smem", schedule=replace(SCHEDULE, block_m=8)), ceiling]
    write_parquet(records, tmp_path / "x.parquet")
    assert read_records(tmp_path).records == records
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


BROKEN = {
    "truncated": (b'{"run_id": "r1", "sta', "torn"),
    "not_utf8": (b"\xff\xfe\xff\n", "not UTF-8"),
    "foreign": (b'{"name": "somebody else\'s line"}\n', "not a record of this project"),
    "list": (b"[1, 2]\n", "not a record of this project"),
    "bad_field": (b'{"run_id": "x", "status": "ok", "date": "d"}\n', "incomplete record"),
    "newer": (b'{"run_id": "x", "status": "ok", "format": 99}\n', "format 99"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_costs_itself_alone(tmp_path, name):
    line, words = BROKEN[name]
    good = (json.dumps(plain(to_row(record()))) + "\n").encode()
    path = tmp_path / "journal-r1.jsonl"
    path.write_bytes(good + line if name == "truncated" else good + line + good)
    result = read_journal(path)
    assert len(result.records) == (1 if name == "truncated" else 2)
    assert len(result.notices) == 1 and words in result.notices[0] and "line 2" in result.notices[0]


def test_a_tail_of_nul_bytes_and_an_empty_file(tmp_path):
    good = (json.dumps(plain(to_row(record()))) + "\n").encode()
    (tmp_path / "journal-a.jsonl").write_bytes(good + b"\0" * 512)
    (tmp_path / "journal-b.jsonl").write_bytes(b"")
    (tmp_path / "other.parquet").write_bytes(b"PAR1 not really")
    result = read_records(tmp_path)
    assert len(result.records) == 1
    assert len(result.notices) == 2
    assert any("journal-b.jsonl: empty" in n for n in result.notices)
    assert any("other.parquet: not a records file" in n for n in result.notices)


def test_journal_is_on_disk_after_each_record(tmp_path):
    journal = Journal(tmp_path, "r1")
    for count in range(1, 4):
        journal.append(record(reason=str(count)))
        assert len(read_journal(journal.path).records) == count
    journal.close()


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    journal = Journal(tmp_path, "r1")
    journal.append(record())

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="1 records of this run are kept"):
        journal.append(record())
    result = read_journal(journal.path)
    assert len(result.records) == 1 and result.notices == []


def test_two_runs_cannot_share_a_directory(tmp_path):
    with lock(tmp_path):
        code = (
            "import sys, pathlib; from chord_lab.records import lock\n"
            "from chord_lab.errors import UserError\n"
            "try:\n    lock(pathlib.Path(sys.argv[1])).__enter__()\n"
            "except UserError as error: print(error); sys.exit(2)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"in use by process {os.getpid()}" in done.stdout
    with lock(tmp_path):
        pass


def test_an_older_file_without_a_column_still_reads(tmp_path):
    import pyarrow.parquet as pq

    table, _ = read_tables(write_parquet([record()], tmp_path / "x.parquet"))
    pq.write_table(table.drop_columns(["dequant", "peak_memory_bytes"]), tmp_path / "x.parquet")
    result = read_records(tmp_path)
    assert result.notices == [] and result.records == [record()]


def test_records_import_no_torch():
    code = "import sys, chord_lab.records; print([m for m in ('torch', 'triton', 'ipywidgets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_methods_and_environments_have_a_likeness():
    assert Method(rep_ms=20).likeness() == Method(rep_ms=40).likeness() != Method(l2="warm").likeness()
    assert replace(ENVIRONMENT, python="3.12").likeness() == ENVIRONMENT.likeness()
    assert replace(ENVIRONMENT, triton="3.7").likeness() != ENVIRONMENT.likeness()

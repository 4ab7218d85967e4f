"""Bad input of every kind: one line that says what is wrong, exit code 2, no traceback, nothing half written."""

import os
import pathlib
import re
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from w4a16_moe.resolve import BUNDLED

from chord_lab import cli
from chord_lab.errors import UserError
from chord_lab.records import to_table
from chord_lab.records.decode import decode
from chord_lab.records.journal import lock, read_journal
from chord_lab.records.parquet import read_tables, write_parquet
from chord_lab.sweeps.recorded import of_scenario
from chord_lab.sweeps.winners import winners

DECODE = "kimi-k2/ep8/decode"
TABLE = str(BUNDLED / "nvidia_h200" / "h200_decode_ep8.json")


@pytest.fixture
def refused(monkeypatch, capsys):
    """Run a command line that must be refused; its one line."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["chord-lab", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.run()
        said = capsys.readouterr()
        assert end.value.code == 2, said.out + said.err
        assert len(said.err.strip().splitlines()) == 1 and said.err.startswith("chord-lab: "), said.err
        return said.err

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nosuch",), "No such command 'nosuch'"),
        (("--nosuch",), "No such option"),
        (("routing",), r"Missing option '--experts'.*see `chord-lab routing --help`"),
        (("routing", "--experts", "x", "--tokens", "1"), "Invalid value for '--experts'"),
        (("routing", "--experts", "48", "--tokens", "99999999999"), "tokens must be at most"),
        (("routing", "--experts", "999999999", "--tokens", "1"), "experts must be at most"),
        (("routing", "--experts", "65536", "--tokens", "16777216"), "too many to draw"),
        (
            ("routing", "--experts", "48", "--tokens", "1", "--block-m", "9" * 30),
            "block_m must be at least 1",
        ),
        (("scenarios", DECODE, "--shard", "ep4"), "named kimi-k2/ep4/decode"),
        (("scenarios", "--phase", "prefill"), "go with a config.json"),
        (("sweep", DECODE, "--points", "9" * 20), "legal are all, published, or token counts"),
        (("sweep", DECODE, "--points", "-5"), "legal are all, published, or token counts"),
        (("sweep", DECODE, "--kernel", "nope"), "legal are mma_sync, portable, wgmma"),
        (("sweep", DECODE, "--profile", "nope"), "--profile 'nope': legal are portable"),
        (("sweep", DECODE, "--space", "nope"), "legal are focus, record, full"),
        (("sweep", DECODE, "--peers", "nope"), "legal are none, own, tiles"),
        (("sweep", DECODE, "--draw", "nope"), "unknown draw 'nope'"),
        (("sweep", DECODE, "--device", "nope", "--plan-only"), "device 'nope' is unknown"),
        (("sweep", DECODE, "--jobs", "0"), "--jobs must be more than 0"),
        (("sweep", DECODE, "--rep-ms", "nan"), "--rep-ms must be more than 0"),
        (("sweep", DECODE, "--budget-seconds", "nan"), "--budget-seconds must be more than 0"),
        (("tune", DECODE, "--source", "predict", "--into-package"), "predicted times do not go into the package"),
        (("record", "--plan-only", "--profile", "nope"), "--profile 'nope'"),
        (("sweep", DECODE, "--seed", "9" * 30), "--seed must be below"),
        (("sweep", DECODE, "--dask", ""), "--dask is empty; legal: local, cuda"),
        (("record", "--budget-seconds", "nan"), "--budget-seconds must be more than 0"),
        (("record", "--dask", " "), "--dask is empty"),
        (("table", "lookup", ".", "--m", "4", "--shape", "²,3", "--device-name", "X"), "say which table with --shape"),
        (("record", "--plan-only", "--points", "20"), "legal are all, published"),
        (("predict", DECODE, "--profile", "nope"), "--profile 'nope'"),
        (("table", "lookup", TABLE, "--m", "x"), "Invalid value for '--m'"),
        (("table", "check", TABLE, "--to", "0"), "Invalid value for '--to'"),
        (("winners",), "Missing argument"),
        (("winners", "none"), "none does not exist"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_a_command_line_that_means_nothing(arguments, words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.search(words, refused(*arguments))
    assert list(tmp_path.iterdir()) == []


FILES = {
    "empty": b"", "binary": bytes(range(256)) * 20, "torn": b'{"a": [1, 2', "latin": '{"a": "é"}'.encode("latin1"),
    "list": b"[1, 2, 3]", "deep": b"[" * 50_000, "number": b'{"a": ' + b"9" * 5_000 + b"}", "parquet": b"PAR1xxxxPAR1",
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["json", "parquet", "jsonl"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "command", [["winners"], ["export"], ["report"], ["trace"], ["table", "check"]], ids=lambda c: c[-1]
)
def test_a_file_of_another_kind(command, name, suffix, refused, tmp_path, monkeypatch):
    """Empty, binary, cut off, not UTF-8, nested without end, a number without end: never a traceback nor a crash."""
    path = tmp_path / f"{name}.{suffix}"
    path.write_bytes(FILES[name])
    assert str(path) in refused(*command, path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", FILES)
def test_a_routing_file_of_another_kind(name, refused, tmp_path):
    for suffix in ("json", "jsonl", "csv", "npy"):
        path = tmp_path / f"{name}.{suffix}"
        path.write_bytes(FILES[name])
        assert str(path) in refused("routing", "--experts", 48, "--tokens", 1, "--draw", f"file:{path}")
    for path in (tmp_path, tmp_path / "none.json"):
        assert str(path) in refused("routing", "--experts", 48, "--tokens", 1, "--draw", f"file:{path}")


def test_a_traffic_file_nested_without_end(refused, tmp_path):
    (tmp_path / "mix.yaml").write_bytes(FILES["deep"])
    assert "is not YAML" in refused("tune", "--traffic", tmp_path / "mix.yaml")


@pytest.mark.parametrize("depth", [10, 50_000])
def test_a_trace_nested_inside_its_events(depth, refused, tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + "[" * depth)
    assert ("cut" if depth < 20 else "levels deep") in refused("trace", path)


def test_a_place_that_cannot_be_written(refused, tmp_path, made):
    (tmp_path / "file").write_text("x")
    write_parquet([*made.sweep(swap_ab=True, persistent=True), *made.ceilings()], tmp_path / "run" / "records.parquet")
    below = tmp_path / "file" / "below"
    for arguments in (
        ("export", tmp_path / "run", "--out", below),
        ("export", tmp_path / "run", "--to", "t4", "--out", below),
        ("report", tmp_path / "run", "-o", below),
        ("report", tmp_path / "run", "-o", tmp_path / "run"),
        ("sweep", "kimi-k2/ep8/prefill", "--data", tmp_path / "run", "--out", tmp_path / "file"),
        ("tune", "kimi-k2/ep8/prefill", "--data", tmp_path / "run", "--out", below),
    ):
        refused(*arguments)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "records.parquet", "run"]


def test_a_run_needs_a_directory(tmp_path):
    (tmp_path / "file").touch()
    for place, words in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "x", "cannot hold a run")):
        with pytest.raises(UserError, match=words), lock(place):
            pass


def test_a_foreign_journal_is_told_in_few_lines(tmp_path):
    path = tmp_path / "journal-x.jsonl"
    path.write_text('{"hello": 1}\n' * 1000)
    notices = read_journal(path).notices
    assert len(notices) == 6 and "995 more lines are no records" in notices[-1]


def damaged(made, tmp_path, **changes):
    """A records file whose rows have other values in some columns."""
    table = to_table(made.sweep())
    for name, value in changes.items():
        column = table.schema.field(name)
        values = pa.array([value] * len(table), column.type if value is None else None)
        table = table.set_column(table.schema.get_field_index(name), column, values.cast(column.type))
    pq.write_table(table, tmp_path / "records.parquet")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_m": -3}, "block_m must be a whole number"),
        ({"kernel": "nope"}, "kernel='nope'"),
        ({"tok_e": None}, "has no routing"),
        ({"scenario": ""}, "has no scenario"),
        ({"routed_m": None}, "has no routed_m"),
    ],
    ids=str,
)
def test_a_value_that_no_record_can_have(changes, words, made, tmp_path, refused):
    damaged(made, tmp_path, **changes)
    for command in ("winners", "export", "report"):
        assert words in refused(command, tmp_path)
    with pytest.raises(UserError, match="damaged"):
        decode(read_tables(tmp_path)[0])


@pytest.mark.parametrize(
    ("changes", "words"), [({"profile": "nope"}, "profile 'nope'"), ({"device_name": ""}, "no device")]
)
def test_records_that_no_table_can_be_made_from(changes, words, made, tmp_path, refused):
    damaged(made, tmp_path, **changes)
    assert words in refused("export", tmp_path)
    assert not (tmp_path / "tables").exists()


@pytest.mark.parametrize("column", ["tok_e", "profile", "times_us", "device_name", "default"])
def test_a_file_without_an_essential_column(column, made, tmp_path, refused):
    pq.write_table(to_table(made.sweep()).drop_columns([column]), tmp_path / "records.parquet")
    assert f"it lacks the columns {column}" in refused("winners", tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -5.0, 0.0])
def test_times_that_are_no_times_never_win(bad, made, tmp_path, refused):
    good = made.sweep(routed=(1024,), projections=("gate_up",))
    records = [*good, made.record([bad] * 3, schedule=made.schedule(8)), *made.ceilings()]
    (w,) = winners(to_table(records))
    assert w.failed == 1 and w.schedule.block_m != 8
    write_parquet(records, tmp_path / "records.parquet")
    for command in (["winners"], ["report"], ["export", "--to", "t4"]):
        done = subprocess.run(
            [sys.executable, "-m", "chord_lab", command[0], str(tmp_path), *command[1:]],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr


def test_a_kernel_chosen_in_a_replay_is_obeyed(made):
    """Silently replaying every kernel would be a wrong answer; the default stays to be beaten."""
    other = made.schedule(16, kernel="mma_sync", block_k=64)
    records = [*made.sweep(), *made.peers(), *(made.record(99.0, routed_m=m, schedule=other) for m in (1024, 2048))]
    rows, _ = of_scenario(to_table(records), "kimi-k2/ep8/prefill", kernels=["mma_sync"])
    kept = rows.to_pylist()
    ours = [r for r in kept if r["kind"] == "candidate"]
    assert {r["kernel"] for r in ours if not r["default"]} == {"mma_sync"} and any(r["default"] for r in ours)
    assert any(r["kind"] == "peer" for r in kept)


def test_a_seed_that_was_not_recorded_is_refused(made):
    with pytest.raises(UserError, match=r"at 5; recorded: .*seed 0"):
        of_scenario(to_table(made.sweep()), "kimi-k2/ep8/prefill", seed=5)
    assert len(of_scenario(to_table(made.sweep()), "kimi-k2/ep8/prefill", seed=0)[0]) == 32


def test_one_draw_has_one_name(made):
    records = [replace(r, routing=replace(r.routing, draw="zipf:1.0")) for r in made.sweep()]
    assert len(of_scenario(to_table(records), "kimi-k2/ep8/prefill", draws=["zipf:1"])[0]) == 32


def test_a_terminal_that_knows_no_unicode(made, tmp_path):
    write_parquet([*made.sweep(), *made.ceilings()], tmp_path / "records.parquet")
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for arguments in (["winners", str(tmp_path)], ["routing", "--experts", "48", "--tokens", "40"], ["scenarios"]):
        done = subprocess.run(
            [sys.executable, "-m", "chord_lab", *arguments], env=environment, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        done.stdout.decode("ascii")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_closed_streams_are_no_traceback(closed):
    command = f"{sys.executable} -m chord_lab scenarios --json {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_prediction_beats_the_card(made):
    """Far from what was recorded a fit extrapolates: below the bytes' copy time it would be an impossible promise."""
    import numpy as np
    from w4a16_moe.devices import DEVICES

    from chord_lab.measurement.features import least_us
    from chord_lab.measurement.predict import fit, samples_of

    device = DEVICES["nvidia_h200"]
    samples = samples_of(to_table(made.sweep()), device)
    model = fit(samples, device)
    model.weights[0] -= 2.0  # a fit gone astray: e^2 too fast
    point = samples[0].point
    times = model.predict_us(point, [made.schedule(m) for m in (8, 16, 32, 256)])
    assert (times >= least_us(point)).all() and len(np.unique(times)) == 4  # the order stays


def test_what_was_measured_is_shown_even_if_a_file_cannot_be_written(made, tmp_path, monkeypatch, capsys):
    write_parquet([*made.sweep(swap_ab=True, persistent=True), *made.ceilings()], tmp_path / "data" / "r.parquet")
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    arguments = ["tune", "kimi-k2/ep8/prefill", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["chord-lab", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.run()
    said = capsys.readouterr()
    assert end.value.code == 2 and "report.html cannot be written: Is a directory" in said.err
    assert "95 % interval" in said.out and "kimi-k2/ep8/prefill" in said.out


@pytest.mark.skipif(os.name == "nt", reason="names are text on Windows")
def test_a_name_that_is_not_utf_8(made, tmp_path):
    folder = pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xffd"))
    path = write_parquet(made.sweep(), folder / "records.parquet")
    assert len(read_tables(folder)[0]) == 32 and read_tables(path)[1] == []


def test_ctrl_c_while_modules_load_is_no_traceback():
    code = "import sys, chord_lab.__main__ as m\ndef stop(): raise KeyboardInterrupt\nm._main = stop\nm.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")

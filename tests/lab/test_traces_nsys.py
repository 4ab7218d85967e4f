"""Nsight Systems: SQLite exports of any schema, and the CSV of `nsys stats`."""

import math
import sqlite3
import time

import pytest

from chord_lab.errors import UserError
from chord_lab.traces import read_trace

PID = 4242 << 24  # globalPid: the thread's bits are zero
TID = PID | 7
KERNEL_COLUMNS = (
    "start, end, deviceId, contextId, streamId, correlationId, globalPid, demangledName, shortName, "
    "registersPerThread, gridX, gridY, gridZ, blockX, blockY, blockZ, staticSharedMemory, dynamicSharedMemory"
)


class Export:
    """A small export, built table by table: real ones lack whatever was not recorded."""

    def __init__(self, path):
        self.path, self.database = path, sqlite3.connect(path)
        self.strings = {}

    def text(self, value):
        return self.strings.setdefault(value, len(self.strings) + 10)

    def metadata(self, table, schema):
        self.database.execute(f"CREATE TABLE {table}(name TEXT, value TEXT)")
        self.database.execute(f"INSERT INTO {table} VALUES('EXPORT_SCHEMA_VERSION', ?)", (schema,))
        return self

    def gpu(self, index=0, name="NVIDIA H200"):
        self.database.execute("CREATE TABLE IF NOT EXISTS TARGET_INFO_GPU(id INTEGER, name TEXT)")
        self.database.execute("INSERT INTO TARGET_INFO_GPU VALUES(?, ?)", (index, name))
        return self

    def kernels(self, rows, columns=KERNEL_COLUMNS):
        """Rows of (start ns, end ns, correlation, name, pid)."""
        self.database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL({columns})")
        marks = ",".join("?" * (columns.count(",") + 1))
        for start, end, correlation, name, pid in rows:
            full = (
                start,
                end,
                0,
                1,
                7,
                correlation,
                pid,
                self.text(name),
                self.text(name.split("<")[0]),
                64,
                132,
                2,
                1,
                128,
                1,
                1,
                16,
                1024,
            )
            have = [c.strip() for c in columns.split(",")]
            named = dict(zip([c.strip() for c in KERNEL_COLUMNS.split(",")], full, strict=True))
            self.database.execute(
                f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES({marks})", [named.get(c) for c in have]
            )
        return self

    def calls(self, rows, table="CUPTI_ACTIVITY_KIND_RUNTIME"):
        """Rows of (start ns, globalTid, correlation)."""
        self.database.execute(f"CREATE TABLE {table}(start, end, globalTid, correlationId, nameId)")
        self.database.executemany(f"INSERT INTO {table} VALUES(?, ?, ?, ?, 0)", [(s, s + 5, t, c) for s, t, c in rows])
        return self

    def ranges(self, rows, registered=False):
        """Rows of (start ns, end ns, text, globalTid, event type)."""
        self.database.execute("CREATE TABLE NVTX_EVENTS(start, end, eventType, text, globalTid, domainId, textId)")
        for start, end, text, tid, kind in rows:
            own, text_id = (None, self.text(text)) if registered else (text, None)
            self.database.execute(
                "INSERT INTO NVTX_EVENTS VALUES(?, ?, ?, ?, ?, 0, ?)", (start, end, kind, own, tid, text_id)
            )
        return self

    def done(self):
        if self.strings:
            self.database.execute("CREATE TABLE StringIds(id INTEGER PRIMARY KEY, value TEXT)")
            self.database.executemany("INSERT INTO StringIds VALUES(?, ?)", [(i, t) for t, i in self.strings.items()])
        self.database.commit()
        self.database.close()
        return self.path


@pytest.fixture
def export(tmp_path):
    return Export(tmp_path / "run.sqlite")


@pytest.mark.parametrize(("table", "schema"), [("EXPORT_META_DATA", "2.9.0"), ("META_DATA_EXPORT", "3.25.0")])
@pytest.mark.parametrize("registered", [False, True])
def test_kernels_of_either_schema(export, table, schema, registered):
    export.metadata(table, schema).gpu()
    export.kernels([(2000, 5500, 1, "moe<int>(float*)", PID), (9000, 9500, 2, "fill", PID)])
    export.calls([(1500, TID, 1), (8000, TID, 2)])
    export.ranges([(1000, 6000, "decode", TID, 59), (1200, 3000, "gate_up", TID, 59)], registered=registered)
    trace = read_trace(export.done())
    assert (trace.kind, trace.device, trace.facts["schema"]) == ("nsys-sqlite", "NVIDIA H200", schema)
    first, second = trace.kernels.to_dict("records")
    assert first["name"] == "moe<int>(float*)"
    assert (first["start_us"], first["time_us"]) == (1.0, 3.5)  # from the first range
    assert (first["grid"], first["block"], first["registers"], first["smem_bytes"]) == ("132x2x1", "128x1x1", 64, 1040)
    assert first["nvtx"] == "decode > gate_up"
    assert isinstance(second["nvtx"], float)  # NaN: nothing was open
    assert trace.nvtx["path"].tolist() == ["decode", "decode > gate_up"]
    assert trace.nvtx["depth"].tolist() == [0, 1]


def test_start_end_ranges_overlap_and_span_threads(export):
    export.metadata("META_DATA_EXPORT", "3.24.0").gpu()
    export.kernels([(20, 30, 1, "a", PID), (60, 70, 2, "b", PID), (90, 95, 3, "c", PID)])
    export.calls([(15, TID, 1), (55, PID | 9, 2), (85, TID, 3)])
    export.ranges([(10, 50, "outer", TID, 60), (12, 80, "late", TID, 60), (14, 18, "inner", TID, 59)])
    trace = read_trace(export.done())
    assert trace.kernels["nvtx"].astype(object).tolist()[:2] == ["outer > late > inner", "late"]
    assert trace.kernels["nvtx"].isna().tolist() == [False, False, True]


def test_correlation_ids_restart_in_each_process(export):
    other = 99 << 24
    export.metadata("META_DATA_EXPORT", "3.25.0").gpu()
    export.kernels([(20, 30, 1, "a", PID), (25, 35, 1, "b", other)])
    export.calls([(10, TID, 1), (12, other | 3, 1)])
    export.ranges([(5, 40, "mine", TID, 59), (5, 40, "theirs", other | 3, 59)])
    assert read_trace(export.done()).kernels["nvtx"].tolist() == ["mine", "theirs"]


def test_what_is_missing_is_said(export):
    trace = read_trace(export.kernels([(2000, 5500, None, "moe", None)]).done())
    assert len(trace.kernels) == 1
    text = " | ".join(trace.notes)
    for words in ("no metadata table", "does not name its GPU", "no NVTX ranges", "no hardware counters"):
        assert words in text
    assert trace.device is None


def test_no_kernel_table_is_an_empty_trace(export):
    trace = read_trace(export.metadata("META_DATA_EXPORT", "3.25.0").ranges([(1, 2, "x", TID, 59)]).done())
    assert len(trace.kernels) == 0
    assert any("no kernels" in n for n in trace.notes)


def test_old_schema_without_process_or_demangled_names(export):
    columns = "start, end, deviceId, streamId, correlationId, shortName, gridX, gridY, gridZ, blockX, blockY, blockZ"
    export.metadata("EXPORT_META_DATA", "1.3").kernels([(20, 30, 1, "a", None)], columns)
    export.calls([(10, TID, 1)]).ranges([(5, 40, "mine", TID, 59)])
    row = read_trace(export.done()).kernels.iloc[0]
    assert (row["name"], row["grid"], row["nvtx"]) == ("a", "132x2x1", "mine")
    assert row["registers"] is not None and str(row["registers"]) == "<NA>"
    assert str(row["smem_bytes"]) == "<NA>"


def test_ranges_open_at_the_end_and_kernels_that_end_before_they_start(export):
    export.metadata("META_DATA_EXPORT", "3.25.0").gpu().kernels([(20, 30, 1, "a", PID), (50, 40, 2, "b", PID)])
    export.calls([(10, TID, 1)]).ranges([(5, None, "open", TID, 59)])
    trace = read_trace(export.done())
    assert trace.kernels["nvtx"].astype(object).tolist()[0] == "open"
    assert math.isnan(trace.nvtx["end_us"][0])
    assert math.isnan(trace.kernels["time_us"][1])
    text = " | ".join(trace.notes)
    assert "still open" in text and "end before they start" in text and "1 of 2 kernels have no launch call" in text


def test_kernels_come_in_order_of_start_and_names_without_a_row_are_numbered(export):
    export.metadata("META_DATA_EXPORT", "3.25.0").gpu().kernels([(50, 60, 2, "b", PID), (20, 30, 1, "a", PID)])
    export.strings.pop("a")
    trace = read_trace(export.done())
    assert trace.kernels["start_us"].tolist() == [0.0, 0.03]
    assert trace.kernels["name"].tolist()[0].startswith("<string ")


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["CREATE TABLE users(id, name)"], "not an Nsight Systems export .*users"),
        (["CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(begin, finish)"], "no column end, start"),
        (["CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start, end)"], "no column demangledName"),
        (
            [
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start, end, shortName)",
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES('soon', 'later', 1)",
            ],
            "other than whole numbers",
        ),
        ([], "its tables: none"),
    ],
)
def test_other_databases_are_refused_by_name(tmp_path, statements, words):
    path = tmp_path / "other.sqlite"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 1")
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()
    with pytest.raises(UserError, match=words):
        read_trace(path)


def test_a_cut_off_database_is_refused(export):
    export.metadata("META_DATA_EXPORT", "3.25.0").gpu().kernels([(i, i + 1, i, f"k{i}", PID) for i in range(3000)])
    path = export.done()
    whole = path.read_bytes()
    for size in (100, 4096, len(whole) // 2, len(whole) - 4096):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="SQLite"):
            read_trace(path)


def test_a_damaged_schema_is_refused_in_one_line(export):
    export.metadata("META_DATA_EXPORT", "3.25.0").kernels([(0, 1, 1, "k", PID)])
    path = export.done()
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"_ACTIVITY_KIND_KERNEL(", b"_ACTIVITY_KIND\n\n, \n((("))
    with pytest.raises(UserError, match="malformed database schema") as refusal:
        read_trace(path)
    assert "\n" not in str(refusal.value)


def test_a_million_rows_stay_quick_and_small(export):
    """A tenth of the promise (10 million rows in 60 s and 4 GB), at a rate that leaves it room."""
    resource = pytest.importorskip("resource")
    export.metadata("META_DATA_EXPORT", "3.25.0").gpu().kernels([])
    rows = (
        (i * 10, i * 10 + 7, i % 2, 1, 7, i, PID, 10 + i % 50, 10, 32 + i % 3, 1 + i % 400, 1, 1, 128, 1, 1, 0, 0)
        for i in range(300_000)
    )
    export.database.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES({','.join('?' * 18)})", rows)
    path = export.done()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    trace = read_trace(path)
    seconds = time.process_time() - began
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(trace.kernels) == 300_000
    assert seconds < 60 / 10e6 * 300_000 * 3  # three times the promised rate: shared machines are slow at times
    assert grown_kb < 400_000  # one chunk of Python rows and the arrays


# nsys stats

TRACE_HEADER = (
    "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),"
    "Bytes (MB),Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name"
)


def write(path, text):
    path.write_text(text)
    return path


def test_gpu_trace_csv_with_chatter_and_copies(tmp_path):
    text = (
        "\nNOTICE: Existing SQLite export found: run.sqlite\n\nProcessing [run.sqlite] with [cuda_gpu_trace.py]...\n"
        f"{TRACE_HEADER}\n"
        "1000,66,1,,,,,,,,,,4.194,6337.593,Pinned,Device,NVIDIA H200 (0),1,,13,[CUDA memcpy Host-to-Device]\n"
        '5000,2500,2,132,1,1,256,1,1,168,0.000,0.197,,,,,NVIDIA H200 (0),1,,7,"moe(int *, float)"\n'
        "9000,1500,3,132,1,1,256,1,1,168,0.000,0.197,,,,,NVIDIA H200 (0),1,,7,fill\n"
    )
    trace = read_trace(write(tmp_path / "stats.csv", text))
    assert (trace.kind, trace.device) == ("nsys-csv-trace", "NVIDIA H200")
    first = trace.kernels.iloc[0]
    assert (first["name"], first["time_us"], first["start_us"], first["grid"]) == (
        "moe(int *, float)",
        2.5,
        0.0,
        "132x1x1",
    )
    assert (first["registers"], first["smem_bytes"], first["stream"], first["correlation"]) == (168, 197000, 7, 2)
    assert any("1 memory copies" in n for n in trace.notes)


@pytest.mark.parametrize(
    "header",
    [
        "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name",
        "Time(%),Total Time (ns),Instances,Average,Minimum,Maximum,StdDev,Extra,Name",
    ],
)
def test_kernel_summary_csv_old_and_new(tmp_path, header):
    rows = ['60.0,30000,3,10000.0,9000.0,8000,12000,100.0,"moe<(int)4>(int *)"', "40.0,20000,2,10000.0,1,1,1,1,fill"]
    text = "\n".join([header, *rows])
    trace = read_trace(write(tmp_path / "sum.csv", text))
    assert trace.kind == "nsys-csv-summary"
    assert trace.kernels["time_us"].tolist() == [10.0, 10.0]
    assert trace.kernels["launches"].tolist() == [3, 2]
    assert any("mean of the launches" in n for n in trace.notes)


def test_times_in_other_units_and_damaged_cells(tmp_path):
    header = TRACE_HEADER.replace("(ns)", "(us)")
    row = "5,2.5,2,132,1,1,256,1,1,168,0.000,0.197,,,,,GPU (1),1,,7,moe\n"
    assert read_trace(write(tmp_path / "us.csv", f"{header}\n{row}")).kernels["time_us"][0] == 2.5
    endless = read_trace(write(tmp_path / "inf.csv", f"{header}\n{row.replace('2.5', '1e400').replace('132', 'inf')}"))
    assert endless.kernels["time_us"].isna()[0] and endless.kernels["grid"].isna()[0]
    with pytest.raises(UserError, match="'soon', which is not a number"):
        read_trace(write(tmp_path / "bad.csv", f"{header}\n{row.replace('2.5', 'soon')}"))

"""PyTorch profiler JSON: versions, vendors, damage; read as a stream."""

import gzip
import json
import tracemalloc

import pytest

from chord_lab.errors import UserError
from chord_lab.traces import read_trace

KERNEL_ARGS = {
    "device": 0,
    "stream": 7,
    "correlation": 35,
    "registers per thread": 16,
    "shared memory": 512,
    "grid": [4, 2, 1],
    "block": [128, 1, 1],
}


BARE = {"ph": "X", "name": "moe", "ts": "1000.500", "dur": 12.25}  # times as text, as some versions wrote them


def event(name, cat, ts, dur, *, pid=0, tid=7, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name="moe", ts=1000.5, dur=12.25, cat="kernel", **changes):
    return event(name, cat, ts, dur, **KERNEL_ARGS | changes)


def launch(ts=990.0, correlation=35, tid=11, cat="cuda_runtime", name="cudaLaunchKernel"):
    return event(name, cat, ts, 4.0, pid=10, tid=tid, correlation=correlation)


@pytest.fixture
def read(tmp_path):
    def _read(events, raw=None, name="trace.json", **top):
        path = tmp_path / name
        text = raw if raw is not None else json.dumps({"schemaVersion": 1, **top, "traceEvents": events})
        blob = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(blob) if name.endswith(".gz") else blob)
        return read_trace(path)

    return _read


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_kernels_with_their_annotation(read, name):
    events = [
        event("layer 3", "user_annotation", 900.0, 200.0, pid=10, tid=11),
        event("gate_up", "user_annotation", 950.0, 100.0, pid=10, tid=11),
        event("elsewhere", "user_annotation", 900.0, 500.0, pid=10, tid=12),
        launch(),
        kernel(),
        event("Memcpy HtoD", "gpu_memcpy", 800.0, 3.0, device=0, stream=7),
    ]
    trace = read(
        events,
        name=name,
        deviceProperties=[{"id": 0, "name": "NVIDIA H200"}, {"id": 1, "name": "idle"}],
        distributedInfo={"rank": 3, "world_size": 8},
    )
    assert (trace.kind, trace.device, trace.facts["rank"]) == ("torch-profiler", "NVIDIA H200", 3)
    row = trace.kernels.iloc[0]
    assert (row["name"], row["time_us"], row["start_us"]) == ("moe", 12.25, 100.5)
    assert (row["grid"], row["block"], row["registers"], row["smem_bytes"]) == ("4x2x1", "128x1x1", 16, 512)
    assert row["nvtx"] == "layer 3 > gate_up"
    assert any("1 memory copies" in n for n in trace.notes)


def test_cpu_only_profile_is_no_error(read):
    trace = read([event("aten::mm", "cpu_op", 1.0, 2.0), event("step", "user_annotation", 0.0, 5.0)])
    assert len(trace.kernels) == 0
    assert trace.nvtx["name"].tolist() == ["step"]
    assert any("CPU-only" in n for n in trace.notes)
    assert any("which rank" in n for n in trace.notes)
    assert trace.device is None


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([kernel(cat="Kernel"), launch(cat="Runtime")], ("4x2x1", 7, None)),  # before 2022
        ([kernel(), launch(name="hipExtModuleLaunchKernel")], ("4x2x1", 7, "ROCm")),
        ([kernel(), launch(cat="xpu_runtime", name="urEnqueueKernelLaunch")], ("4x2x1", 7, "XPU")),
        ([BARE | {"pid": "CUDA functions", "tid": "stream 7", "args": {}}], (None, None, None)),  # before Kineto
        ([BARE | {"pid": 3, "tid": 1, "args": {"Task Type": "AI_CORE", "Stream Id": 7}}], (None, 7, None)),  # Ascend
    ],
)
def test_versions_and_vendors(read, events, expected):
    trace = read(events)
    row = trace.kernels.iloc[0]
    assert (row["name"], row["time_us"]) == ("moe", 12.25)
    grid, stream, vendor = expected
    assert (row["grid"] if grid else None) == grid
    assert (None if str(row["stream"]) == "<NA>" else row["stream"]) == stream
    assert trace.facts["vendor"] == vendor


def test_array_form_may_lack_its_closing_bracket(read):
    whole = json.dumps([kernel(), kernel(ts=2000.0)])
    assert len(read(None, raw=whole).kernels) == 2
    trace = read(None, raw=whole[:-1] + ",\n")
    assert len(trace.kernels) == 2
    assert any("ends inside" in n for n in trace.notes)


def test_device_names_after_the_events_are_found(read):
    raw = json.dumps({"traceEvents": [kernel()], "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]})
    assert read(None, raw=raw).device == "NVIDIA H200"


def test_bare_nan_and_bytes_that_are_not_utf8_are_mended_and_said(read):
    raw = json.dumps({"traceEvents": [kernel(name="a: nan, b"), kernel(name="odd?", ts=2000.0)]})
    raw = raw.replace('"device": 0', '"est. achieved occupancy %": nan, "bandwidth": -inf, "device": 0')
    trace = read(None, raw=raw.encode().replace(b"odd?", b"odd\xff"))
    assert trace.kernels["name"].tolist() == ["a: nan, b", "odd\ufffd"]
    text = " | ".join(trace.notes)
    assert "4 bare nan or inf" in text and "not UTF-8" in text


@pytest.mark.parametrize(
    "odd",
    [
        {"ts": "soon"},
        {"dur": -1},
        {"ts": None},
        {"dur": float(10**30)},
        {"ts": [1]},
    ],
)
def test_odd_events_are_left_out_and_counted(read, odd):
    trace = read([kernel(), kernel() | odd, "text", 7, None, {"ph": "X"}])
    assert len(trace.kernels) == 1
    assert any("5 events with odd" in n for n in trace.notes)


@pytest.mark.parametrize("huge", [10**30, -(10**30), 2**63, "many", None, [1], 1e400])
def test_numbers_that_are_no_64_bit_integers_are_absent(read, huge):
    args = KERNEL_ARGS | {"correlation": huge, "stream": huge, "shared memory": huge, "grid": [huge, 1, 1]}
    raw = json.dumps({"traceEvents": [kernel() | {"args": args}]})
    row = read(None, raw=raw.replace("Infinity", "1e999")).kernels.iloc[0]
    assert [str(row[c]) for c in ("correlation", "stream", "smem_bytes", "grid")] == ["<NA>", "<NA>", "<NA>", "nan"]
    assert row["time_us"] == 12.25


def test_a_device_number_too_large_for_a_device_is_absent(read):
    row = read([kernel(device=2**40)]).kernels.iloc[0]
    assert str(row["device_index"]) == "<NA>"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ('{"traceEvents": []}', "its list of events is empty"),
        ('{"traceEvents": 5}', "no list of events"),
        ('{"traceEvents": {"a": 1}}', "no list of events"),
        ('{"model_type": "kimi", "n": 3}', "no traceEvents .its keys: model_type, n"),
        ("{}", "its keys: none"),
        ("[]", "its list of events is empty"),
        ("[1, 2]", "none of its 2 events has a time"),
        ('{"traceEvents": [{"ph": "M", "name": "x"}]}', "none of its 1 events has a time"),
        ('{"traceEvents": [{"ph": "X", "ts": 1, "dur": 2}, {"ph": "X', "cut-off JSON: it ends after 1 whole events"),
        ('{"traceEvents": [{"ph": "X", "ts": 1, "dur": 2}, {"ph": X}]}', "damaged JSON"),
        ('{"traceEvents', "cut-off JSON"),
        ("{", "cut-off JSON"),
        ('{"a": \x00}', "damaged"),
    ],
)
def test_other_json_is_refused_by_what_it_is(read, raw, words):
    with pytest.raises(UserError, match=words) as refusal:
        read(None, raw=raw)
    assert "\n" not in str(refusal.value)


def test_damaged_gzip(tmp_path):
    whole = gzip.compress(json.dumps({"traceEvents": [kernel(ts=float(i)) for i in range(5000)]}).encode())
    path = tmp_path / "t.json.gz"
    for damaged in (
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:12],
        whole[:5],
        whole[:-6] + b"\0\0\0\0\0\0",
        whole[:200] + b"\xff" * 50 + whole[250:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"gzip|JSON"):
            read_trace(path)


def test_memory_does_not_grow_with_the_events_read(tmp_path):
    """A quarter of a million events that are no kernels: read as a stream, nothing of them stays."""
    path = tmp_path / "long.json"
    one = json.dumps(event("aten::empty with a name long enough to matter", "cpu_op", 1.0, 2.0, shapes="x" * 100))
    with open(path, "w") as out:
        out.write('{"traceEvents": [' + json.dumps(kernel()))
        out.writelines(f",\n{one}" for _ in range(100_000))
        out.write("]}")
    read_trace(path)  # imports done before the memory is watched
    tracemalloc.start()
    trace = read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert trace.facts["events"] == 100_001
    assert peak < 12e6 < path.stat().st_size

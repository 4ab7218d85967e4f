"""Chrome traces: what Perfetto asks of them (https://perfetto.dev/docs/faq), and that they read back as they were."""

import json

import pandas as pd
from test_traces_reading import NCU_RAW, torch_file

from chord_lab.traces import KERNEL_COLUMNS, read_trace
from chord_lab.traces.chrome import write_chrome_trace


def test_chrome_trace_opens_again_as_the_same_kernels(tmp_path):
    trace = read_trace(torch_file(tmp_path / "t.json"))
    count = write_chrome_trace(trace, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert len(written) == count
    kernels = [e for e in written if e.get("cat") == "kernel"]
    assert [(e["name"], e["ts"], e["dur"], e["tid"]) for e in kernels] == [
        ("k0", 0.0, 5.0, 7),
        ("k1", 10.0, 5.0, 7),
        ("k0", 20.0, 5.0, 7),
    ]
    assert [e["name"] for e in written if e.get("cat") == "range"] == ["step"]
    again = read_trace(tmp_path / "out.json")
    same = [column for column in KERNEL_COLUMNS if column != "nvtx"]  # read from launches, which are not written
    pd.testing.assert_frame_equal(again.kernels[same], trace.kernels[same], check_categorical=False)
    assert again.device == trace.device


def test_chrome_trace_of_counters_lays_kernels_one_after_another(tmp_path):
    two = NCU_RAW.replace("{time}", "1000").replace("{dram}", "1.5").replace("{wait}", "0.1")
    path = tmp_path / "two.csv"
    path.write_text(two + two.splitlines()[2].replace('"0"', '"1"', 1) + "\n")
    write_chrome_trace(read_trace(path), tmp_path / "out.json")
    written = [e for e in json.loads((tmp_path / "out.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in written] == [(0.0, 1.0), (1.0, 1.0)]


def overlapping(path):
    """Two kernels of one stream that overlap, and ranges: nested, and overlapping without nesting."""

    def event(category, name, ts, dur, tid, **args):
        return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}

    events = [event("kernel", f"k{i}", 10.0 * i, 15.0, 7, device=0, stream=7, correlation=i) for i in range(3)]
    spans = [("outer", 0.0, 20.0), ("inner", 0.0004, 19.9996), ("crossing", 10.0, 20.0), ("after", 20.0, 1.0)]
    events += [event("user_annotation", name, ts, dur, 9) for name, ts, dur in spans]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_events_of_a_lane_follow_each_other_or_nest(tmp_path):
    write_chrome_trace(read_trace(overlapping(tmp_path / "t.json")), tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    lanes = {}
    for e in written:
        if e["ph"] == "X":
            assert e["pid"] > 0 and e["dur"] >= 0
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], round(e["ts"] + e["dur"], 3), e["name"]))
    for spans in lanes.values():
        for start, end, _ in spans:
            assert all(b <= start or a >= end or (a - start) * (b - end) <= 0 for a, b, _ in spans)  # apart, or nested
    named = {e["args"]["name"]: (e["pid"], e["tid"]) for e in written if e["name"] == "thread_name"}
    assert [n for *_, n in lanes[named["stream 7"]]] == ["k0", "k2"]
    assert [n for *_, n in lanes[named["stream 7, overlapping"]]] == ["k1"]
    assert [n for *_, n in lanes[named["thread 0 / 9"]]] == ["outer", "inner", "after"]
    assert set(named.values()) == set(lanes)


def test_a_time_that_no_kernel_takes_is_no_time(tmp_path):
    """A damaged cell such as 1e400 reads as infinite: neither a figure nor JSON can hold it."""
    for i, time in enumerate(("1e400", "inf", "-5")):
        path = tmp_path / f"{i}.csv"
        path.write_text(NCU_RAW.replace("{time}", time).replace("{dram}", "1.5").replace("{wait}", "0.1"))
        trace = read_trace(path)
        assert trace.kernels["time_us"].isna().all() and any("is no time" in note for note in trace.notes)
        assert write_chrome_trace(trace, tmp_path / "out.json") == 1  # the GPU's name

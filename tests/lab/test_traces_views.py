"""What the Nsight figures show: exact numbers from made captures."""

import math
from dataclasses import replace

import pandas as pd
import pytest
from captures import point, slicing, write_captures

from chord_lab.errors import UserError
from chord_lab.traces import read_trace
from chord_lab.traces.captures import load_library
from chord_lab.traces.counters import counter, glossary
from chord_lab.traces.views import PIPES, SHARES, roofline_info, side_by_side, timeline_info


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return load_library(write_captures(tmp_path_factory.mktemp("nsight") / "nvidia_h200"))


def test_a_point_is_one_row_with_counters_time_schedule_and_load(library):
    frame = library.points
    assert len(frame) == 11
    assert list(frame["label"][:2]) == [slicing("static").label(), slicing("semi_static").label()]
    row = frame.iloc[0]
    assert row["schedule"] == slicing("static")
    assert tuple(row["tok_e"]) == point().routing.tok_e
    assert (row["profiled_us"], row["dram_pct"], row["stall_wait"]) == (216.0, 75.0, 1.19)
    assert row["record_time_us"] == pytest.approx(216 * 1.02)
    assert row["num_bytes"] == point().num_bytes
    assert library.ceilings() == {"copy": 4240.0, "dense_bf16": 700.0}
    assert library.source() == "recorded on NVIDIA H200, 2026-11-29, Nsight Compute 2025.3.1.0"
    assert library.notices == ()


def test_damaged_captures_are_notices_and_an_empty_folder_says_so(library, tmp_path):
    (tmp_path / "bad.pq").write_bytes(b"PAR1 nothing")
    broken = load_library(tmp_path)
    assert len(broken.points) == 0 and "bad.pq" in broken.notices[0]
    assert "no captures in" in broken.source()
    with pytest.raises(UserError, match="no folder of captures"):
        load_library(tmp_path / "none")
    with pytest.raises(UserError, match=r"'x' is no timeline .*layer\.pt\.trace\.json"):
        library.timeline("x")


def test_shipped_captures_are_named_when_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("CHORD_LAB_DATA", str(tmp_path))
    with pytest.raises(UserError, match="make nsight"):
        load_library()


def test_timeline_lanes(library):
    trace = library.timeline("layer.pt.trace.json.gz")
    info = timeline_info(trace)
    names = [lane.name for lane in info.lanes]
    assert names == ["thread 4242 / 4242, depth 0", "thread 4242 / 4242, depth 1", "GPU 0, stream 7"]
    kernels = info.lanes[-1]
    # kernels of a record are named by it: both GEMMs are one kernel; those of the layer's other steps by themselves
    gate_up, down = (f"{projection} {slicing('semi_static').label()}" for projection in ("gate_up", "down"))
    assert kernels.label[:2] == ["_align_in_one_launch_kernel", gate_up] and kernels.label[6] == down
    assert kernels.time_us[:2] == [5.5, 186.0]
    assert len(kernels.row) == 2 * 3 * (1 + 1 + 4 + 1 + 16) and info.num_merged == 0
    row = trace.kernels.iloc[kernels.row[1]]
    assert row["name"] == "mma_sync_kernel" and row["nvtx"].split(" > ")[1] == gate_up


def test_zoom_shows_only_what_the_window_holds(library):
    trace = library.timeline("layer.pt.trace.json.gz")
    gemm = trace.kernels.iloc[1]
    start, end = gemm["start_us"] + 10, gemm["start_us"] + 60
    info = timeline_info(trace, (start, end))
    (labels,) = [lane.label for lane in info.lanes if lane.kind == "kernel"]
    assert labels == [f"gate_up {slicing('semi_static').label()}"]
    assert info.busy_share == pytest.approx(1.0)
    with pytest.raises(UserError, match="smaller to a larger"):
        timeline_info(trace, (5.0, 5.0))


def test_too_many_bars_are_merged_and_said(library):
    trace = library.timeline("layer.pt.trace.json.gz")
    info = timeline_info(trace, most=10, pixels=20)
    lane = info.lanes[-1]
    assert sum(lane.merged) == len(trace.kernels)
    assert info.num_merged == info.num_shown - sum(len(lane.row) for lane in info.lanes) > 0
    assert any("merged" in n for n in info.notes)
    assert max(lane.merged) > 1 and any("longest" in text for text in lane.label)
    whole = timeline_info(trace).lanes[-1]
    assert lane.start_us[-1] + lane.time_us[-1] == whole.start_us[-1] + whole.time_us[-1]


def test_counters_without_start_times_lie_one_after_another(library):
    info = timeline_info(library.counters["decode"])
    (lane,) = info.lanes
    assert (lane.name, lane.start_us[:3], lane.time_us[:2]) == ("kernels", [0.0, 216.0, 402.0], [216.0, 186.0])
    assert "no start times" in info.notes[0] and math.isnan(info.busy_share)


def test_roofline_from_counted_traffic(library):
    info = roofline_info(library.points, library.ceilings())
    first = info.points[0]
    moved = point().num_bytes * 1.05 + 8e6
    assert first.intensity == pytest.approx(point().flops / moved)
    assert first.tflops == pytest.approx(point().flops / 216e-6 / 1e12)
    assert first.dram_gbps == pytest.approx(moved / 216e-6 / 1e9)
    assert first.traffic_over_need == pytest.approx(moved / point().num_bytes)
    assert (info.copy_gbps, info.dense_tflops) == (4240.0, 700.0)
    bare = library.points.assign(dram_read_bytes=math.nan)
    with pytest.raises(UserError, match="collect --metrics lab"):
        roofline_info(bare, {})
    rate = roofline_info(bare.assign(dram_gbps=4000.0), {})
    assert rate.points[0].intensity == pytest.approx(point().flops / (4000e9 * 216e-6))
    partly = pd.concat([library.points, bare])
    assert roofline_info(partly, {}).notes == ("11 captures without DRAM bytes are left out",)


def test_static_against_semi_static_slicing(library):
    keys = library.points["key"].tolist()
    info = side_by_side(library.points, keys[:2])
    assert info.profiled_us == [216.0, 186.0]
    assert info.names == ["token_slicing static", "token_slicing semi_static"]
    assert info.stalls.name == ["long_scoreboard", "wait", "selected", "barrier"]  # misc is felt by nobody
    assert info.stalls.values[0][1] == 1.19 and info.stalls.values[1][1] == 0.77
    assert info.pipes.name == ["pipe_tensor_pct", "pipe_alu_pct"]
    assert info.finding == (
        "token_slicing semi_static is 1.16 times as fast as token_slicing static; its warps wait less for a fixed "
        "number of cycles after the last instruction (wait: 0.77 against 1.19 cycles an instruction)"
    )
    assert info.notes == ()
    mixed = side_by_side(library.points, [keys[0], keys[-1]])
    assert any("not comparable" in n for n in mixed.notes) and "compare reasons" in mixed.finding
    with pytest.raises(UserError, match="no capture of nothing"):
        side_by_side(library.points, [])
    with pytest.raises(UserError, match="no capture of abc"):
        side_by_side(library.points, ["abc"])


@pytest.mark.parametrize(
    ("slower", "faster", "reason"),
    [
        # three reasons changed: the one that costs most cycles over all instructions is named, not the largest ratio
        ({"barrier": 0.8, "wait": 0.5, "n": 10}, {"barrier": 0.2, "wait": 0.1, "n": 10}, "(barrier: 0.20 against 0.80"),
        (
            {"barrier": 0.5, "selected": 1, "n": 12},
            {"barrier": 0.5, "selected": 1, "n": 9},
            "fewer instructions (9.0 aga",
        ),
        # waiting more, and yet faster: no reason
        ({"barrier": 0.5, "wait": 0.5, "n": 10}, {"barrier": 0.9, "wait": 0.4, "n": 10}, "(wait: 0.40 against 0.50"),
        ({"barrier": 0.5, "wait": 0.5, "n": 10}, {"barrier": 0.5, "wait": 0.5, "n": 10}, "their warps wait alike"),
        # another warp was chosen: that is no loss
        ({"not_selected": 9, "wait": 0.5, "n": 10}, {"not_selected": 1, "wait": 0.1, "n": 10}, "(wait: 0.10 against"),
    ],
)
def test_the_reason_explains_the_faster_one(library, slower, faster, reason):
    pair = library.points.iloc[:2].copy()
    for i, figures in enumerate((slower, faster)):
        for column in [c for c in pair if c.startswith("stall_")]:
            pair.iloc[i, pair.columns.get_loc(column)] = float(figures.get(column.removeprefix("stall_"), 0))
        pair.iloc[i, pair.columns.get_loc("instructions")] = figures["n"] * 1e6
    finding = side_by_side(pair, pair["key"].tolist()).finding
    assert reason in finding and finding.startswith("token_slicing semi_static is 1.16 times as fast")
    same = pair.assign(profiled_us=200.0)
    assert "take the same time" in side_by_side(same, same["key"].tolist()).finding


def test_switches_are_on_or_off(library):
    keys = library.points[library.points["routed_m"] == 400]["key"].tolist()
    assert side_by_side(library.points, keys).names == ["stream_k off, persistent off", "stream_k on, persistent on"]


def test_every_figure_that_is_drawn_is_explained():
    words = glossary()["meaning"]
    assert words.index.is_unique and all(len(text) > 10 for text in words)
    assert {counter(name).label for name in (*PIPES, *SHARES)} <= set(words.index)


def test_a_trace_with_nothing_to_draw_is_refused(tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 1, "dur": 2}]}')
    with pytest.raises(UserError, match="neither kernels nor ranges"):
        timeline_info(read_trace(path))


def test_a_first_look_opens_a_timeline_and_else_says_that_none_is_there(library, tmp_path):
    whole = library.opening()
    assert whole.path.name in library.timelines
    alone = replace(library, timelines={}).opening()
    assert alone.path.name == f"{next(iter(library.counters))}.pq"
    assert "no trace of a whole layer" in alone.notes[0] and len(alone.kernels)
    with pytest.raises(UserError, match="no captures in"):
        replace(library, timelines={}, counters={}).opening()

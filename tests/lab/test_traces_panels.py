"""The Nsight panels and figures without a browser: what they show, what they say when they cannot."""

import subprocess
import time

import pytest

pytest.importorskip("ipywidgets")
from captures import write_captures

from chord_lab.errors import UserError
from chord_lab.export.nsight_figures import draw_nsight_roofline, draw_nsight_timeline, draw_stalls, draw_uses
from chord_lab.traces.captures import load_library
from chord_lab.traces.views import roofline_info, side_by_side, timeline_info
from chord_lab.widgets.nsight_collect import NsightCollect
from chord_lab.widgets.nsight_counters import NsightCounters
from chord_lab.widgets.nsight_timeline import NsightTimeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_captures(tmp_path_factory.mktemp("nsight") / "nvidia_h200")


def title(live):
    return live.figure.layout.title.text


def test_figures_name_their_finding_units_and_source(folder):
    library = load_library(folder)
    pair = side_by_side(library.points, library.points["key"].tolist()[:2])
    figures = {
        "ran": draw_nsight_timeline(timeline_info(library.counters["decode"]), source=library.source()),
        "TFLOPS": draw_nsight_roofline(roofline_info(library.points, library.ceilings()), source=library.source()),
        "wait": draw_stalls(pair, source=library.source()),
        "38 to 50 % (integer and logic)": draw_uses(pair, source=library.source()),
    }
    for words, figure in figures.items():
        assert words in figure.layout.title.text
        assert "NVIDIA H200, 2026-11-29" in figure.layout.title.text
    assert figures["wait"].layout.xaxis.title.text == "cycles that a warp waits, for each instruction it issues"
    assert figures["TFLOPS"].layout.xaxis.title.text == "FLOPs per byte of DRAM traffic"
    ceiling = figures["TFLOPS"].data[0]
    assert (
        ceiling.name == "measured ceilings: copy 4,240 GB/s, dense bf16 product 700 TFLOPS" and max(ceiling.y) == 700.0
    )


def test_a_selected_kernel_shows_its_schedule_and_the_rows_of_its_experts(folder):
    panel = NsightTimeline(folder)
    assert panel.message.value == ""
    assert "Select a kernel" in panel.story.value
    panel._clicked("kernels", 20.0, [1, 1])
    assert panel.kernel.value == 1
    assert "semi_static" in panel.story.value and "400 routed rows" in panel.story.value
    assert sum(panel.live.figure.data[0].y) == 400
    panel.kernel.value = 2  # an activation belongs to no record
    assert "routed rows" not in panel.story.value
    assert sum(panel.live.figure.data[0].y) == 0


def test_bars_carry_what_fits_on_them(folder):
    library = load_library(folder)
    trace = library.timeline("layer.pt.trace.json.gz")

    def texts(window):
        figure = draw_nsight_timeline(timeline_info(trace, window), source="")
        return dict(zip((row for row, _ in figure.data[2].customdata), figure.data[2].text, strict=True))

    gate_up = trace.kernels["start_us"][1]
    assert texts((gate_up, gate_up + 200))[1] == "gate_up mma_sync 24x256x128 w8 s2 c2 swap semi_static"
    assert (
        texts((gate_up, gate_up + 1000))[1].startswith("gate_up mma") and "..." in texts((gate_up, gate_up + 1000))[1]
    )
    assert texts((gate_up, gate_up + 2000))[1] == "gate_up"
    assert texts(None)[0] == ""  # a kernel of 5 us among 3,500


def test_zooming_by_button_and_by_mouse(folder):
    panel = NsightTimeline(folder)
    whole = panel.live.figure.layout.xaxis2.range
    panel.zoom_in.click()
    low, high = panel.live.figure.layout.xaxis2.range
    assert high - low == pytest.approx((whole[1] - whole[0]) / 2)
    panel.live.figure.layout.xaxis2.range = (20.0, 100.0)  # what a drag in the browser does
    assert panel.window == (20.0, 100.0)
    assert len(panel.live.figure.data[2].base) == 1
    panel.zoom_out.click()
    panel.whole.click()
    assert panel.live.figure.layout.xaxis2.range == whole


def test_another_capture_and_a_single_file(folder):
    panel = NsightTimeline(folder)
    panel.file.value = "prefill"
    assert "5 kernels" in title(panel.live)
    single = NsightTimeline(folder / "layer.pt.trace.json.gz")
    assert list(single.file.options) == ["layer.pt.trace.json.gz"]


def test_a_damaged_capture_is_one_line_and_the_figure_stays(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "torn.json").write_text('{"traceEvents": [')
    panel = NsightTimeline(tmp_path)
    before = title(panel.live)
    panel.file.value = "torn.json"
    assert "cut-off JSON" in panel.message.value
    assert title(panel.live) == before


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds nothing with kernels"):
        NsightTimeline(tmp_path)
    with pytest.raises(UserError, match="chord-lab profile"):
        NsightCounters(tmp_path)


def test_counters_side_by_side(folder):
    panel = NsightCounters(folder)
    assert "semi_static is 1.16 times as fast" in title(panel.figures[0])
    assert "All counters" in panel.table.value and "tensor cores" in panel.table.value
    first, second = panel.first.value, panel.second.value
    panel.swap.click()
    assert (panel.first.value, panel.second.value) == (second, first)
    panel._picked("gate_up", 1.0, panel.library.points["key"].iloc[2])
    assert "token_slicing dynamic" in title(panel.figures[0])
    panel.second.value = panel.first.value
    assert panel.message.value == ""  # one schedule alone is fine


def test_collecting_says_what_is_missing_and_its_command_is_a_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    finished = []
    panel = NsightCollect(finished=finished.append, out=tmp_path / "out")
    assert "no ncu on PATH" in panel.state.value
    panel.scenario.value = "kimi-k2/ep8/decode"
    panel.schedules.value = "default\nblock_m=16"
    command = panel.command()
    assert command[2:5] == ["chord_lab", "profile", "kimi-k2/ep8/decode"]
    assert command.count("--schedule") == 2
    panel.go.click()
    assert panel.process is not None
    panel.process.wait(timeout=60)
    for _ in range(100):
        if not panel.go.disabled:
            break
        time.sleep(0.05)
    assert "no ncu on PATH" in panel.progress.value
    assert finished == [] and not (tmp_path / "out").exists()


def test_a_run_can_be_stopped(tmp_path, monkeypatch):
    panel = NsightCollect(out=tmp_path / "out")
    monkeypatch.setattr(panel, "command", lambda: ["sleep", "60"])
    panel.go.click()
    panel.stop.click()
    assert panel.process.wait(timeout=10) != 0
    assert isinstance(panel.process, subprocess.Popen)

"""Panels without a browser: they follow one selection, redraw in place, refuse in one line, survive a restart."""

from __future__ import annotations

import subprocess
import sys
import time

import plotly.graph_objects as go
import pytest
from w4a16_moe.profiles import get_profile
from w4a16_moe.schedule import Schedule
from w4a16_moe.tables import ProblemTable, TuningFile, TuningRow

from chord_lab.export.tables.points import TablePoint
from chord_lab.export.tables.withhold import withhold
from chord_lab.records import Environment, read_records
from chord_lab.records.attempt import record_of
from chord_lab.records.journal import now
from chord_lab.scenarios import get_scenario
from chord_lab.sweeps.plan import make_plan
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.space import device_named
from chord_lab.widgets import (
    ExportPanel,
    LayoutExplorer,
    LoadExplorer,
    Measurements,
    ScheduleExplorer,
    Selection,
    SweepPanel,
    ThresholdExplorer,
    TimelineExplorer,
    live_figure,
    out_folder,
)
from chord_lab.widgets.figure_widget import carry_script, make_figure_widget
from chord_lab.widgets.live_figure import LiveFigure
from chord_lab.widgets.schedule_knobs import nearest_in_space, values_on_offer

DECODE, PREFILL = "kimi-k2/ep8/decode", "kimi-k2/ep8/prefill"


@pytest.fixture(scope="module")
def data():
    return Measurements.recorded()


def title(shown):
    return shown.figure.layout.title.text


# ---- figures


def test_figure_is_redrawn_in_place():
    shown = LiveFigure(go.Figure([go.Bar(y=[1, 2])], layout={"title": {"text": "first"}}))
    trace = shown.figure.data[0]
    shown.show(go.Figure([go.Bar(y=[3, 4])], layout={"title": {"text": "second"}}))
    assert shown.figure.data[0] is trace
    assert tuple(trace.y) == (3, 4)
    assert title(shown) == "second"


def test_figure_takes_other_traces_and_drops_old_properties():
    shown = LiveFigure(go.Figure([go.Bar(y=[1], name="old")], layout={"shapes": [{"type": "line"}]}))
    shown.show(go.Figure([go.Bar(y=[2]), go.Scatter(y=[5])]))
    assert [t.type for t in shown.figure.data] == ["bar", "scatter"]
    assert shown.figure.data[0].name is None
    assert not shown.figure.layout.shapes


def test_plotly_script_is_carried_once():
    one, two = (make_figure_widget(go.Figure([go.Bar(y=[n])])) for n in (1, 2))
    assert len(one.get_state()["_esm"]) + len(two.get_state()["_esm"]) < 2000
    assert len(carry_script().script) > 1_000_000
    assert carry_script() is carry_script()


def test_without_anywidget_a_plain_figure_and_one_line(monkeypatch, data):
    def missing(_figure):
        raise ImportError("Please install anywidget")

    monkeypatch.setattr(live_figure, "make_figure_widget", missing)
    panel = LoadExplorer(Selection(scenario=DECODE, num_tokens=40), data)
    note, output = panel.load.widget.children
    assert "anywidget is not installed" in note.value
    [shown] = output.outputs
    first = shown["data"]["application/vnd.plotly.v1+json"]
    assert first["data"][0]["type"] == "bar"
    panel.selection.num_tokens = 50
    assert output.outputs[0]["data"]["application/vnd.plotly.v1+json"] != first


# ---- panels follow the selection


def test_panels_share_a_selection(data):
    look = Selection(scenario=DECODE, num_tokens=40)
    panels = [panel(look, data) for panel in (LoadExplorer, ScheduleExplorer, TimelineExplorer)]
    before = [title(panels[0].load), title(panels[1].ranking), title(panels[2].figure)]
    panels[0].point.tokens.value = 20
    after = [title(panels[0].load), title(panels[1].ranking), title(panels[2].figure)]
    assert look.num_tokens == 20
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert {panel.point.tokens.value for panel in panels} == {20}
    assert not any(panel.message.value for panel in panels)


def test_another_scenario_keeps_a_legal_point(data):
    look = Selection(scenario=DECODE, num_tokens=40)
    panel = LoadExplorer(look, data)
    panel.point.scenario.value = PREFILL
    assert look.num_tokens in [point.num_tokens for point in get_scenario(PREFILL).points]
    assert panel.point.tokens.value == look.num_tokens
    assert not panel.message.value


def test_threshold_moves_rows(data):
    look = Selection(scenario=PREFILL)
    panel = ThresholdExplorer(look, data)
    before = title(panel.times)
    panel.threshold.value = 8
    assert look.threshold == 8
    assert title(panel.times) != before
    panel.usual.click()
    assert look.threshold == 80
    assert panel.threshold.value == 80


def test_unmeasured_draw_is_one_line_and_the_figure_stays(data):
    look = Selection(scenario=PREFILL)
    panel = ThresholdExplorer(look, data)
    before = title(panel.times)
    look.draw = "zipf:2.5"
    assert "no measurement of" in panel.message.value
    assert "uniform" in panel.message.value
    assert title(panel.times) == before
    look.draw = "uniform"
    assert not panel.message.value


def test_missing_file_draw_is_one_line(data):
    panel = LoadExplorer(Selection(scenario=DECODE, num_tokens=40), data)
    panel.point.kind.value = "file"
    panel.point.file.value = "nowhere.json"
    assert "nowhere.json" in panel.message.value + panel.point.problem.value
    assert "Traceback" not in panel.message.value


def test_unrecorded_schedule_is_predicted_and_says_so(data):
    look = Selection(scenario=DECODE, num_tokens=40)
    panel = ScheduleExplorer(look, data)
    for slicing in panel.knobs.knobs["token_slicing"].options:
        panel.knobs.knobs["token_slicing"].value = slicing
        schedule = data.schedule_or_best(look)
        if schedule not in data.schedules_at(look) and not data.broken(look, schedule):
            break
    else:
        pytest.skip("every token slicing was recorded")
    assert panel.facts(look.schedule).source.startswith("predicted")
    assert "predicted" in panel.table.value
    assert "No verdict" in panel.table.value


def test_illegal_knobs_name_the_rule(data):
    look = Selection(scenario=DECODE, num_tokens=40)
    panel = ScheduleExplorer(look, data)
    panel.knobs.knobs["swap_ab"].value = not panel.knobs.knobs["swap_ab"].value
    assert "<b>" in panel.legality.value
    assert "may not run" in panel.table.value
    assert "No time is known" in title(panel.ranking)  # what may not run is not predicted either
    assert not panel.message.value


def test_a_turned_knob_can_be_turned_back(data):
    look = Selection(scenario=DECODE, num_tokens=40)
    schedule, timeline = ScheduleExplorer(look, data), TimelineExplorer(look, data)
    fastest = data.schedule_or_best(look)
    for control in (schedule.knobs.knobs["ctas_per_sm"], timeline.ctas, timeline.block_m):
        first = control.value
        control.value = next(v for v in control.options if v != first)
        control.value = first
        assert look.schedule == fastest
    for streamed in (True, False):
        timeline.stream_k.value = streamed
        assert look.schedule.persistent is streamed  # of mma_sync: the one grid that may run
    assert look.schedule == fastest
    timeline.ctas.value = max(timeline.ctas.options)
    timeline.block_m.value = max(timeline.block_m.options)
    assert "It may not run" in timeline.summary.value


def test_picked_point_becomes_the_schedule(data):
    look = Selection(scenario=DECODE, num_tokens=40)
    panel = ScheduleExplorer(look, data)
    label = panel.recorded_point().label[-1]
    panel._pick("recorded", "8", [label])
    assert look.schedule.label() == label
    assert panel.knobs.schedule == look.schedule


def test_other_kernel_moves_knobs_into_its_space():
    start = Schedule(kernel="wgmma", block_m=32, block_n=256, block_k=64, num_warps=8, num_stages=5, stream_k=True)
    moved = nearest_in_space(start)
    offers = values_on_offer(moved, "h200_decode_ep8")
    assert moved.kernel == "wgmma"
    assert not moved.stream_k
    assert all(getattr(moved, name) in values for name, values in offers.items())


def test_layout_picture_is_the_packer_s_own():
    panel = LayoutExplorer("fragment64")
    assert "32 weights of 2 output columns (n) and 16 reduction elements (k)" in title(panel.figure)
    panel.load.value = 127
    assert ">55, " in panel.bits.value or ">63, " in panel.bits.value
    panel.layout_name.value = "rows"
    assert "of 1 output columns" in title(panel.figure)


# ---- export


def test_export_panel_writes_what_it_previewed(data, tmp_path):
    look = Selection(scenario=DECODE, num_tokens=40)
    panel = ExportPanel(look, data, tmp_path)
    assert "measured points" in panel.preview.value
    assert not list(tmp_path.rglob("*.json"))
    panel.export.click()
    written = sorted(path.stem for path in tmp_path.rglob("*.json"))
    assert get_scenario(DECODE).profile in written
    assert "The resolver returns" in panel.result.value
    assert not list(tmp_path.rglob("*.tmp"))


def test_export_covers_every_scenario_of_a_profile(data, tmp_path):
    panel = ExportPanel(Selection(scenario="kimi-k2/tp8/decode"), data, tmp_path)
    [tables] = [t for t in panel.tables() if t.profile == "h200_tp8"]
    assert tables.provenance["tuned_for"]["scenarios"] == ["kimi-k2/tp8/decode", "kimi-k2/tp8/prefill"]
    assert max(p.routed_m for p in tables.points) > 10_000  # decode's last row must not reach over prefill


def test_export_to_an_impossible_folder_is_one_line(data, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    panel = ExportPanel(Selection(scenario=DECODE), data, blocked)
    panel.export.click()
    assert "alert" in panel.result.value
    assert "Traceback" not in panel.result.value


def test_a_panel_that_cannot_draw_says_why_and_lets_choose_again(data):
    look = Selection(scenario="deepseek-v3/ep8/prefill")
    panel = ThresholdExplorer(look, data)
    assert "measured: none" in panel.message.value
    assert "shown before" not in panel.message.value
    assert panel.message in panel.children
    assert panel.point in panel.children
    look.scenario = PREFILL
    assert not panel.message.value
    assert panel.times.widget in panel.children
    look.scenario = "deepseek-v3/ep8/prefill"
    assert "shown before" in panel.message.value


def test_predictions_are_called_predictions(data):
    panel = ScheduleExplorer(Selection(scenario="deepseek-v3/ep8/prefill"), data)
    assert "us predicted" in title(panel.ranking)
    assert "as fast as" not in title(panel.ranking)  # both are the default
    assert "should by prediction reach" in title(panel.roof)


def test_a_selection_keeps_what_it_was_made_with():
    schedule = Schedule(kernel="mma_sync", block_m=16, block_n=256, block_k=128, num_warps=4, num_stages=2)
    look = Selection(scenario=DECODE, num_tokens=44, draw="balanced", schedule=schedule)
    assert (look.num_tokens, look.draw, look.schedule) == (44, "balanced", schedule)
    look.scenario = PREFILL
    assert look.schedule is None
    assert look.num_tokens in [point.num_tokens for point in look.layer.points]


def _points_and_table():
    scenario = get_scenario(DECODE)
    problem = scenario.problem("gate_up")
    common = {"kernel": "mma_sync", "block_n": 256, "block_k": 128, "num_warps": 8, "num_stages": 2, "swap_ab": True}
    old, default, fast = (Schedule(block_m=b, **common) for b in (8, 16, 24))
    row = TuningRow(min_m=0, max_m=None, schedule=old, measured_m=(160,))
    shipped = TuningFile(
        device="nvidia_h200",
        profile=get_profile(scenario.profile),
        tables=(ProblemTable(problem=problem, rows=(row,)),),
    )
    base = {"problem": problem, "projection": "gate_up", "default": default, "default_us": 10.0}
    points = (
        TablePoint(num_tokens=20, routed_m=160, verdict="win", schedule=fast, time_us=9.0, **base),
        TablePoint(num_tokens=30, routed_m=240, verdict="tie", schedule=default, time_us=10.0, **base),
        TablePoint(num_tokens=40, routed_m=320, verdict="none", schedule=None, time_us=None, **base),
    )
    return points, shipped, old, default, fast


def test_ties_and_unsupported_rows_change_nothing_unless_told():
    points, shipped, old, _default, fast = _points_and_table()
    kept = withhold(points, shipped)
    assert [p.schedule for p in kept.points] == [fast, old, None]
    assert kept.points[2].default == old
    assert [p.routed_m for p in kept.ties] == [240]
    assert [p.routed_m for p in kept.unsupported] == [320]


def test_told_ties_and_unsupported_rows_overwrite():
    points, shipped, _old, default, fast = _points_and_table()
    kept = withhold(points, shipped, ties=True, unsupported=True)
    assert [p.schedule for p in kept.points] == [fast, default, None]
    assert kept.points[2].default == default
    assert not kept.ties
    assert not kept.unsupported


def test_without_a_shipped_table_points_stay_as_they_are():
    points = _points_and_table()[0]
    assert withhold(points, None).points == points


# ---- a sweep in the notebook


class SlowMeasure:
    """Stands for a GPU: a made-up time for each candidate, and a while to get it."""

    source = "live"

    def __init__(self, seconds=0.01):
        self.seconds = seconds
        self.tried = 0

    def measure(self, plan, sink):
        environment = Environment(device="made_up", device_name="Made up", num_sms=132)
        sink.started(environment)
        done = sink.done(environment)
        for point, candidates in plan.by_point():
            for candidate in candidates:
                if candidate.key_at(point) in done:
                    continue
                time.sleep(self.seconds)
                self.tried += 1
                times = ((100.0 + candidate.schedule.block_m,) * 3,) * 3
                sink.append(
                    record_of(point, candidate, run_id=sink.run_id, date=now(), environment=environment, times_us=times,
                              rounds=(0, 1, 2), source="live")
                )  # fmt: skip


@pytest.fixture(scope="module")
def plan():
    points = scenario_points(DECODE, tokens=[20], projections=("gate_up",))
    return make_plan(points, device_named("nvidia_h200"), space="focus").limited(40)


def test_sweep_streams_records_and_reports_the_best(plan, tmp_path):
    shown = []
    panel = SweepPanel(plan, SlowMeasure(0.0), tmp_path, measurements=Measurements.empty())
    panel.on_records.append(lambda: shown.append(len(panel.measurements.frame)))
    panel.begin()
    assert panel.wait(60)
    assert panel.error == ""
    assert panel.bar.value == len(plan)
    assert shown[-1] == len(plan)
    assert "us</b>" in panel.best.value
    assert not panel.start.disabled
    assert panel.halt.disabled


def test_a_notebook_that_is_run_again_shows_its_replay_again(tmp_path):
    shown = []
    for _ in range(2):
        panel = SweepPanel.of_scenario(DECODE, tmp_path, tokens="20")
        panel.begin()
        assert panel.wait(60) and panel.error == ""
        shown.append((panel.bar.value, len(panel.measurements.frame)))
    assert shown[0] == shown[1] and shown[0][0] == len(panel.plan) > 0


def test_stopped_sweep_is_taken_up_by_the_next_kernel(plan, tmp_path):
    first = SlowMeasure(0.02)
    panel = SweepPanel(plan, first, tmp_path, measurements=Measurements.empty())
    panel.begin()
    for _ in range(200):
        if len(panel.measurements.frame) >= 5 or first.tried >= 8:
            break
        time.sleep(0.02)
    panel.halt.click()
    assert panel.wait(30)
    assert "stopped" in panel.status.value
    kept = len(read_records(tmp_path).records)
    assert 0 < kept < len(plan)
    # Another kernel: a new panel on the same folder.
    second = SlowMeasure(0.0)
    again = SweepPanel(plan, second, tmp_path, measurements=Measurements.empty())
    assert f"{kept} of {len(plan)}" in again.status.value
    assert len(again.measurements.frame) == kept
    again.begin()
    assert again.wait(60)
    assert second.tried == len(plan) - kept
    keys = [record.key() for record in read_records(tmp_path).records]
    assert len(keys) == len(set(keys)) == len(plan)


def test_failing_sweep_says_why(plan, tmp_path):
    class Broken:
        source = "live"

        def measure(self, _plan, _sink):
            raise RuntimeError("the card fell off the bus")

    panel = SweepPanel(plan, Broken(), tmp_path, measurements=Measurements.empty())
    panel.begin()
    assert panel.wait(30)
    assert "fell off the bus" in panel.status.value
    assert not panel.start.disabled


def test_replayed_sweep_gives_the_recorded_winners(data, tmp_path):
    panel = SweepPanel.of_scenario(DECODE, tmp_path, source="replay", draws=["uniform"])
    panel.begin()
    assert panel.wait(120)
    assert panel.error == ""
    ours = {(w.projection, w.routed_m): w.schedule for w in panel.measurements.winners(DECODE, "uniform")}
    known = {(w.projection, w.routed_m): w.schedule for w in data.winners(DECODE, "uniform")}
    assert ours == known


def test_out_folder_obeys_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CHORD_LAB_OUT", str(tmp_path))
    assert out_folder("a", "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


def test_panels_start_without_grammars_that_no_notebook_needs():
    code = (
        "import chord_lab.widgets, sys, nbformat\n"
        "assert 'jsonschema' in sys.modules and 'rfc3987_syntax' not in sys.modules\n"
        "nbformat.validate(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell('text')]))\n"
        "import rfc3987_syntax\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import replace

import pytest

from chord_lab.errors import UserError
from chord_lab.export.report import render, report_content, write_report
from chord_lab.export.report_parts import Cell, Note, Section, Table
from chord_lab.records import to_table, write_parquet


@pytest.fixture
def records(made):
    failed = made.record(
        schedule=made.schedule(256), status="compile_error", rule="ptxas", reason="<b>too many</b> registers"
    )
    return [*made.sweep(), *made.peers(), *made.ceilings(), failed]


@pytest.fixture
def page(records, tmp_path):
    write_report(to_table(records), tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


def test_the_report_holds_all_that_was_asked_of_it(page):
    for words in (
        "Which schedule wins",
        "recorded on NVIDIA H200, 2026-11-29",
        "time saved (95 %)",
        "Humming, us (/ ours)",
        "the best block_m grows from",
        "The busiest expert has",
        "Failures by kind",
        "Published points without a result",
        "gate_up + down",
        "triton",
        "cuda_event",
    ):
        assert words in page, words
    verdicts = re.findall(r'<td class="(win|tie)">', page)
    assert len(verdicts) == 8


def test_plotly_stands_in_it_once_and_nothing_comes_from_outside(page):
    assert page.count("plotly.js v") == 1
    assert len(page) < 8_000_000
    shell = re.sub(r"<script>.*?</script>", "", page, flags=re.S)  # without plotly's own text
    assert not re.search(r'(?:src|href)="(?!#)', shell)
    assert "default-src 'none'" in page


def test_figures_are_json_that_a_browser_can_read(page):
    blocks = re.findall(r'<script type="application/json">(.*?)</script>', page, flags=re.S)
    assert len(blocks) >= 8
    for block in blocks:
        figure = json.loads(block)
        assert figure["data"]
        assert "NVIDIA H200" in figure["layout"]["title"]["text"]


def test_text_from_records_is_never_markup(page):
    assert "<b>too many</b>" not in page
    assert "&lt;b&gt;too many&lt;/b&gt; registers" in page


def test_a_script_end_inside_a_figure_does_not_end_it(made):
    import plotly.graph_objects as go

    from chord_lab.export.report_parts import Figure

    evil = "</script><script>alert(1)</script>"
    figure = Figure(go.Figure(go.Bar(x=[evil], y=[1])))
    section = Section("a", evil, [figure, Note(evil), Table(evil, [evil], [[Cell(evil)]])])
    html = render(title=evil, source=evil, headline=[evil], sections=[section])
    assert "<script>alert(1)" not in html


def test_headline_answers_first(page):
    answer = re.search(r'<ul class="answer">(.*?)</ul>', page, flags=re.S)[1]
    assert "of 8 points have a schedule that beats the default" in answer
    assert "times our time" in answer
    assert "1 of 33 candidates failed" in answer


def test_profiles_never_share_a_table_or_a_figure(made, tmp_path):
    two = [*made.sweep(), *made.ceilings(), *made.sweep(kernel="portable")]
    two[-32:] = [replace(record, profile="portable") for record in two[-32:]]
    content = report_content(to_table(two))
    parts = {part.profile: part for part in content.parts()}
    assert {name: len(part.winners) for name, part in parts.items()} == {"h200_prefill_ep8": 8, "portable": 8}
    for name, part in parts.items():
        assert set(part.frame.loc[part.frame["kind"] == "candidate", "profile"]) == {name}
        assert {w.schedule.kernel for w in part.winners} == {"portable" if name == "portable" else "wgmma"}
    write_report(to_table(two), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    for name in parts:
        assert f"<caption>gate_up, kimi-k2/ep8/prefill, profile {name}, draw uniform: recorded" in text


def test_a_peer_s_configuration_is_one_short_line(made, tmp_path):
    config = '{"block_shape": [16, 256, 128], "mma_type": "wgmma", "num_stages": 4, "warp_shape": [16, 64, 64]}'
    peers = [replace(record, config=config) for record in made.peers()]
    write_report(to_table([*made.sweep(), *made.ceilings(), *peers]), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert '<td class="code">wgmma 16x256x128 warp 16x64x64 s4</td>' in text
    assert "block_shape" not in text


def test_other_environments_are_named_and_left_out(made, made_run):
    other = made_run(driver="999", device_name="NVIDIA H100")
    content = report_content(to_table([*made.sweep(), *made.ceilings(), *other.sweep(routed=(1024,))]))
    assert content.source == "recorded on NVIDIA H200, 2026-11-29"
    assert set(content.frame["driver"].dropna()) == {""}
    assert len(content.winners) == 8
    assert any("unlike environments are not shown here: 8 recorded on NVIDIA H100" in r for r in content.remarks)


def test_a_run_without_peers_says_so(made, tmp_path):
    write_report(to_table([*made.sweep(), *made.ceilings()]), tmp_path / "r.html")
    assert "No other implementation was measured in this run." in (tmp_path / "r.html").read_text()


def test_a_run_where_everything_failed_still_reports(made, tmp_path):
    failed = [
        made.record(schedule=made.schedule(m), status="crashed", rule="signal 11", default=m == 64) for m in (32, 64)
    ]
    written = write_report(to_table(failed), tmp_path / "r.html")
    assert written.num_points == 1
    text = (tmp_path / "r.html").read_text()
    assert "no candidate succeeded" in text
    assert "signal 11" in text


def test_nothing_to_report_is_refused(made, tmp_path):
    with pytest.raises(UserError, match="nothing to report"):
        write_report(to_table(made.ceilings()), tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_one_line(records, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        write_report(to_table(records), tmp_path / "file" / "r.html")


def test_a_report_never_takes_the_place_of_a_device_or_a_pipe(records, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is a device or a pipe"):
        write_report(to_table(records), tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_command_line(records, tmp_path):
    write_parquet(records, tmp_path / "run" / "records.parquet")
    (tmp_path / "run" / "run.json").write_text('{"partial": true}')
    command = [
        sys.executable,
        "-m",
        "chord_lab",
        "report",
        str(tmp_path / "run"),
        "-o",
        str(tmp_path / "out" / "r.html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "8 points" in done.stdout
    assert "partial" in done.stderr
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["r.html"]
    missing = subprocess.run(
        [*command[:4], str(tmp_path / "none")], capture_output=True, text=True, timeout=60, check=False
    )
    assert missing.returncode == 2
    assert len(missing.stderr.strip().splitlines()) == 1

"""The report opens with no network: every figure drawn, none of the page's requests leaves the machine."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

from chord_lab.export.report import write_report
from chord_lab.records import to_table

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "out" / "browser"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("made_records", ROOT / "tests" / "lab" / "conftest.py")
    made_records = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made_records)
    made = made_records.MadeRun()
    path = tmp_path_factory.mktemp("report") / "report.html"
    written = write_report(to_table([*made.sweep(), *made.peers(), *made.ceilings()]), path)
    return path, written.num_figures


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_draws_every_figure_offline(chromium, report, scheme):
    path, num_figures = report
    context = chromium.new_context(color_scheme=scheme, offline=True, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: requests.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None)
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn", timeout=120_000)
    assert page.evaluate("document.querySelectorAll('.js-plotly-plot .main-svg').length") >= num_figures
    ink = page.evaluate("document.querySelector('.js-plotly-plot').layout.font.color")
    assert ink == ("#1c1c1c" if scheme == "light" else "#e8e8e6")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 22, 24)"
    )
    assert page.evaluate("document.body.scrollWidth <= innerWidth")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"report-{scheme}.png", full_page=True)
    context.close()
    assert problems == []
    assert requests == []

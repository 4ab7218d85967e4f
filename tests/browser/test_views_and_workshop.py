"""The panels without code (Voila), and the workshop as a learner opens it."""

from __future__ import annotations

import pathlib

import pytest

from chord_lab.cli.lab import copy_workshop, lab_command, voila_command

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_voila_serves_panels_without_code(watch, serve_here, tmp_path, server_environment):
    pytest.importorskip("voila")
    environment = server_environment
    with serve_here(
        lambda port: voila_command(ROOT / "notebooks" / "90_panels.ipynb", port, browser=False), "", environment
    ) as url:
        view = watch()
        view.page.goto(url, wait_until="domcontentloaded", timeout=180_000)
        view.page.wait_for_selector(".js-plotly-plot .main-svg", timeout=180_000)
        view.page.wait_for_timeout(1500)
        view.shot("voila")
        assert "import ipywidgets" not in view.page.inner_text("body")
        handle = view.page.locator("[role=slider][aria-label='Tokens']").first
        titles = "JSON.stringify([...document.querySelectorAll('.js-plotly-plot')].map(g => g.layout.title.text))"
        before = view.page.evaluate(f"() => {titles}")
        handle.focus()
        handle.press("ArrowRight")
        view.page.wait_for_function(f"before => {titles} !== before", arg=before, timeout=20_000)
        assert not view.outside


def test_workshop_answer_is_checked(watch, serve_here, tmp_path, server_environment):
    copy_workshop(ROOT / "notebooks" / "workshop", tmp_path / "workshop")

    def command(port):
        quiet = ["--LabApp.expose_app_in_browser=True", "--ServerApp.token=", "--ServerApp.password="]
        return lab_command(tmp_path / "workshop", "README.ipynb", port, browser=False) + quiet

    with serve_here(command, "lab", server_environment) as url:
        view = watch()
        view.run_notebook(url, "README.ipynb")
        view.shot("workshop_start")
        view.run_notebook(url, "1_read_a_load.ipynb")
        view.page.get_by_text("Not yet.").first.wait_for(timeout=20_000)
        view.shot("workshop_not_yet")
        view.run_notebook(url, "solutions/1_read_a_load.ipynb")
        view.page.get_by_text("Right.", exact=False).first.wait_for(timeout=20_000)
        view.shot("workshop_right")
        view.assert_clean()

"""Each notebook in a real JupyterLab: it runs, figures draw, controls move them, no error, no request to outside."""

from __future__ import annotations

import json
import pathlib

import pytest
from w4a16_moe.resolve import resolve_schedule

from chord_lab.scenarios import get_scenario

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Run from top to bottom by tests of what one does in them, here and in test_nsight.py: not once more.
DRIVEN = {
    "00_tour.ipynb",
    "01_block_m_threshold.ipynb",
    "06_occupancy.ipynb",
    "10_nsight_where_does_the_time_go.ipynb",
    "11_why_is_this_schedule_slow.ipynb",
    "90_panels.ipynb",
}
NOTEBOOKS = sorted({path.name for path in (ROOT / "notebooks").glob("*.ipynb")} - DRIVEN)
# Redraw of a figure after a control moved; generous, because the machine may run other tests beside this one.
REDRAW_MS = 20_000

GRAPHS = "[...document.querySelectorAll('.js-plotly-plot')]"


def slider(page, label):
    """The handle of a slider, found by the name that screen readers read."""
    return page.locator(f"[role=slider][aria-label='{label}']").first


def press(handle, key, times=1):
    handle.scroll_into_view_if_needed()
    handle.focus()
    for _ in range(times):
        handle.press(key)


def titles(page):
    return page.evaluate(f"() => {GRAPHS}.map(g => g.layout?.title?.text)")


def moved(page, before):
    """Wait until some figure's title differs from what it was."""
    page.wait_for_function(
        f"before => JSON.stringify({GRAPHS}.map(g => g.layout?.title?.text)) !== before",
        arg=json.dumps(before),
        timeout=REDRAW_MS,
    )
    return titles(page)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_in_jupyterlab(name, watch, lab_url):
    view = watch()
    view.run_notebook(lab_url, name)
    view.assert_clean()


def test_every_notebook_is_driven():
    tests = "".join(path.read_text() for path in pathlib.Path(__file__).parent.glob("test_*.py"))
    assert all(tests.count(f'run_notebook(lab_url, "{name}"') for name in DRIVEN)


def test_threshold(watch, lab_url):
    view = watch()
    view.run_notebook(lab_url, "01_block_m_threshold.ipynb")
    threshold_moves_the_figure(view)
    dark_theme_is_readable(view)
    view.assert_clean()


def threshold_moves_the_figure(view):
    page = view.page
    handle = slider(page, "Threshold")
    handle.wait_for(state="attached")
    handle.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    before = titles(page)
    lines = (
        "() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(g => (g.layout.shapes ?? []).map(s => s.x0))"
    )
    shapes = page.evaluate(lines)
    press(handle, "ArrowLeft", 40)  # far from any best one
    page.wait_for_function(
        f"() => {GRAPHS}.some(g => g.layout?.title?.text?.startsWith('Threshold 40'))",
        timeout=REDRAW_MS,
    )
    assert page.evaluate(lines) != shapes
    view.shot("threshold_at_40")
    page.get_by_role("button", name="Set to the best").click()
    page.wait_for_function(
        f"() => !{GRAPHS}.some(g => g.layout?.title?.text?.startsWith('Threshold 40'))", timeout=REDRAW_MS
    )
    assert before != titles(page) or "default" in str(before)


def dark_theme_is_readable(view):
    page = view.page
    set_theme(page, "JupyterLab Dark")
    page.wait_for_selector("body[data-jp-theme-light='false']", state="attached")
    page.wait_for_timeout(1500)
    view.shot("dark")
    colours = page.evaluate(
        """() => {
            const text = document.querySelector('.js-plotly-plot .gtitle');
            const paper = document.querySelector('.js-plotly-plot .main-svg');
            const page = document.querySelector('.jp-Notebook');
            const colour = (e, name) => getComputedStyle(e)[name];
            return [colour(text, 'fill'), colour(paper, 'backgroundColor'), colour(page, 'backgroundColor')];
        }"""
    )
    text, paper, background = (tuple(float(n) for n in c[c.index("(") + 1 : -1].split(",")) for c in colours)
    assert len(paper) == 4 and paper[3] == 0  # figures let the page show through
    assert contrast(text[:3], background[:3]) >= 3.5
    set_theme(page, "JupyterLab Light")
    page.wait_for_selector("body[data-jp-theme-light='true']", state="attached")
    assert contrast(text[:3], (255, 255, 255)) >= 4.4


def test_panels(watch, lab_url):
    view = watch()
    view.run_notebook(lab_url, "90_panels.ipynb")
    slider(view.page, "Tokens").wait_for(state="attached")
    controls_are_named_and_reached_by_keyboard(view.page)
    panels_follow_one_another(view.page)
    another_scenario_keeps_the_token_count(view.page)
    view.assert_clean()


def controls_are_named_and_reached_by_keyboard(page):
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('.jupyter-widgets :is([role=slider], select, input)')]
            .filter(c => c.offsetParent && !c.getAttribute('aria-label') && !c.labels?.length)
            .map(c => c.outerHTML.slice(0, 200))"""
    )
    assert not unnamed
    reached = set()
    page.locator(".jp-OutputArea select").first.focus()
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.getAttribute('aria-label')"))
    assert {"Tokens", "Projection"} <= reached


def panels_follow_one_another(page):
    handle = slider(page, "Tokens")
    before = titles(page)
    press(handle, "ArrowRight")
    moved(page, before)
    page.wait_for_timeout(1500)
    after = titles(page)
    # Load, schedule and timeline panels all show the new point, though only one slider was moved.
    assert sum(a != b for a, b in zip(before, after, strict=True)) >= 3
    press(handle, "ArrowLeft")
    moved(page, after)
    page.wait_for_timeout(1500)


def another_scenario_keeps_the_token_count(page):
    before = titles(page)
    said = page.locator(".jp-OutputArea .widget-readout").first
    assert said.inner_text() == "4,096"
    # It has fewer token counts: the slider's place among the old ones is beyond the new end.
    page.locator(".jp-OutputArea select").first.select_option(label="deepseek-v3/ep8/prefill (predicted)")
    moved(page, before)
    page.wait_for_timeout(2000)
    assert said.inner_text() == "4,096"


def test_schedule_knob_and_offline_compilation(watch, lab_url):
    view = watch()
    view.run_notebook(lab_url, "06_occupancy.ipynb", timeout_s=400)
    page = view.page
    button = page.get_by_role("button", name="Compile now")
    button.scroll_into_view_if_needed()
    button.click()
    page.get_by_text("compiled here").first.wait_for(timeout=120_000)
    view.shot("compiled_in_the_panel")
    view.assert_clean()


def test_export_writes_a_table_that_resolves(watch, lab_url, workspace):
    view = watch()
    view.run_notebook(lab_url, "00_tour.ipynb")
    page = view.page
    export = page.get_by_role("button", name="Export", exact=True)
    # JupyterLab keeps far cells out of the page: walk down until the button is there.
    for _ in range(40):
        if export.count():
            break
        page.mouse.move(750, 600)
        page.mouse.wheel(0, 900)
        page.wait_for_timeout(250)
    export.first.scroll_into_view_if_needed()
    path = workspace / "out" / "tour" / "tables" / "nvidia_h200" / "h200_decode_ep8.json"
    assert not path.exists()
    export.first.click()
    page.get_by_text("The resolver returns the table").first.wait_for(timeout=60_000)
    view.shot("exported")
    scenario = get_scenario("kimi-k2/ep8/decode")
    resolved = resolve_schedule(scenario.problem("gate_up"), 320, scenario.profile, "nvidia_h200", tables=path)
    assert resolved.rule == "exact"
    assert resolved.schedule is not None
    view.assert_clean()


def set_theme(page, name):
    """Start the change and do not wait for its promise: it may never settle."""
    page.evaluate("n => { window.jupyterapp.commands.execute('apputils:change-theme', {theme: n}); }", name)


def contrast(a, b):
    """WCAG contrast ratio of two sRGB colours."""

    def luminance(colour):
        parts = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)

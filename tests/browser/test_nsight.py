"""The Nsight notebooks in a real browser: zoom the timeline, select a kernel, see its schedule and load; compare."""

import importlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOAD = (
    "() => { const f = document.querySelector('.js-plotly-plot'); return f.data[0].y.length > 1 ? f.data[0].y : null; }"
)
WINDOW = "() => document.querySelector('.js-plotly-plot').layout.xaxis2.range.map(Number)"
BARS = "() => document.querySelector('.js-plotly-plot').data[2].base.length"


def scroll_to(page, text):
    """Bring the cell that holds a text into the window: others are not in the page."""
    page.evaluate(
        """async text => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            const at = [...notebook.model.cells].findIndex(cell => cell.sharedModel.getSource().includes(text));
            await notebook.scrollToItem(at, 'start');
        }""",
        text,
    )


def dropdown(page, label):
    return page.locator(".widget-dropdown", has=page.locator(f"label:text-is('{label}')")).locator("select").last


@pytest.fixture(scope="module", autouse=True)
def captures(workspace):
    """The shipped captures; made ones beside the notebooks where there are none."""
    if not any((ROOT / "data" / "nsight").glob("*/*.pq")):
        sys.path.append(str(ROOT / "tests" / "lab"))
        made = importlib.import_module("captures")
        made.write_captures(workspace / "notebooks" / "data" / "nsight" / "nvidia_h200")


def test_timeline_zooms_and_a_kernel_shows_its_schedule_and_load(watch, lab_url):
    view = watch()
    view.run_notebook(lab_url, "10_nsight_where_does_the_time_go.ipynb")
    page = view.page
    scroll_to(page, "timeline = NsightTimeline")
    page.wait_for_selector(".js-plotly-plot .main-svg")
    # the notebook selected the longest GEMM: the rows of its experts are drawn above the timeline
    counts = page.wait_for_function(LOAD).json_value()
    assert len(counts) > 1 and sum(counts.values() if isinstance(counts, dict) else counts) > 0
    story = page.locator("table[aria-label='selected kernel']").first
    assert "routed rows" in story.inner_text() and "schedule" in story.inner_text()

    whole = page.evaluate(WINDOW)
    bars = page.evaluate(BARS)
    page.locator("button:has-text('Zoom in')").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"() => ({WINDOW})()[1] < {whole[1]}")
    low, high = page.evaluate(WINDOW)
    assert high - low == pytest.approx((whole[1] - whole[0]) / 2, rel=0.02)
    assert 0 < page.evaluate(BARS) < bars
    view.shot("nsight_timeline_zoomed")

    kernel = dropdown(page, "Kernel")
    labels = kernel.locator("option").all_inner_texts()
    others = [label for label in labels[1:] if "gate_up" not in label and "down" not in label]
    kernel.select_option(label=[*others, "none"][0])  # captures of GEMMs alone have no other kernel
    page.wait_for_function(f"() => ({LOAD})() === null")  # a kernel of no GEMM has no experts
    told = "() => document.querySelector(\"table[aria-label='selected kernel']\")?.innerText ?? ''"
    page.wait_for_function(f"() => !({told})().includes('routed rows')")
    kernel.select_option(label=next(label for label in labels if "gate_up" in label))
    page.wait_for_function(LOAD)
    page.wait_for_function(f"() => /gate_up/.test(({told})()) && /schedule/.test(({told})())")
    view.shot("nsight_timeline_selected")
    page.locator("button:has-text('Whole trace')").first.click()
    page.wait_for_function(f"() => ({WINDOW})()[1] >= {whole[1]} * 0.999")
    view.assert_clean()


def test_two_schedules_are_compared(watch, lab_url):
    view = watch()
    view.run_notebook(lab_url, "11_why_is_this_schedule_slow.ipynb")
    page = view.page
    scroll_to(page, "panel = NsightCounters")
    second = dropdown(page, "Against")
    second.scroll_into_view_if_needed()
    title = "() => [...document.querySelectorAll('.widget-vbox .js-plotly-plot')][0].layout.title.text"
    page.wait_for_function(title)
    before = page.evaluate(title)
    labels = second.locator("option").all_inner_texts()
    second.select_option(label=labels[2])
    page.wait_for_function(f"text => ({title})() !== text", arg=before)
    view.shot("nsight_counters")
    view.assert_clean()

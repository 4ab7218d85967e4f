"""From a slider's move to the redrawn figure: measured in Chromium against a real JupyterLab, into docs/latency.json.

    .venv/bin/python -m scripts.latency [--steps 40]

Each panel stands alone in a notebook of its own, on all recorded data. A key press moves its slider by one step; the
clock runs from the page's keydown event to the last `plotly_afterplot` of the panel's figures that the step caused.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import statistics
import sys
import tempfile
from typing import Any

import nbformat

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULT = ROOT / "docs" / "latency.json"
# panel -> (label of the slider that is moved, scenario)
PANELS = {
    "LoadExplorer": ("Tokens", "kimi-k2/ep8/prefill"),
    "ThresholdExplorer": ("Threshold", "kimi-k2/ep8/prefill"),
    "ScheduleExplorer": ("block_m", "kimi-k2/ep8/prefill"),
    "TimelineExplorer": ("Tokens", "kimi-k2/ep8/prefill"),
}
# Wait for the plots that a key press causes: no further one for `quiet` ms ends the step.
LISTEN = """quiet => {
  window.step = new Promise((resolve, reject) => {
    let pressed = 0, last = 0, timer = 0;
    const limit = setTimeout(() => reject(new Error("no figure was redrawn within 10 s")), 10000);
    const graphs = [...document.querySelectorAll('.js-plotly-plot')];
    const drawn = () => {
      if (!pressed) return;
      last = performance.now();
      clearTimeout(timer);
      timer = setTimeout(() => {
        clearTimeout(limit);
        graphs.forEach(g => g.removeListener('plotly_afterplot', drawn));
        resolve(last - pressed);
      }, quiet);
    };
    graphs.forEach(g => g.on('plotly_afterplot', drawn));
    window.addEventListener('keydown', () => { pressed = performance.now(); }, {capture: true, once: true});
  });
}"""
QUIET_MS = 400


def main() -> int:
    """Measure every panel; print and record the distribution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="slider steps of each panel")
    parser.add_argument("--out", type=pathlib.Path, default=RESULT)
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    browser_tests = load_browser_tests()
    executable = next(filter(None, map(shutil.which, browser_tests.CHROMIUM_NAMES)), None)
    if executable is None:
        print("latency: no Chromium; on Debian: apt-get install chromium fonts-dejavu", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = pathlib.Path(name)
        write_notebooks(folder)
        chromium = playwright.chromium.launch(executable_path=executable, args=list(browser_tests.CHROMIUM_FLAGS))
        with serve(browser_tests, folder) as url:
            panels = {panel: measure(browser_tests, chromium, url, panel, arguments.steps) for panel in PANELS}
        version = chromium.version
        chromium.close()
    steps = [step for values in panels.values() for step in values]
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "chromium": version,
        "python": platform.python_version(),
        "records": count_records(),
        "steps": len(steps),
        **summary(steps),
        "panels": {panel: {"slider": PANELS[panel][0], **summary(values)} for panel, values in panels.items()},
    }
    unfinished = arguments.out.with_name(arguments.out.name + ".tmp")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(json.dumps(result, indent=2) + "\n")
    unfinished.replace(arguments.out)
    print(json.dumps(result, indent=2))
    return 0


def load_browser_tests() -> Any:
    """The harness that the browser tests use, by path: tests are no package."""
    path = ROOT / "tests" / "browser" / "conftest.py"
    spec = importlib.util.spec_from_file_location("browser_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_notebooks(folder: pathlib.Path) -> None:
    """A notebook for each panel."""
    for panel, (_slider, scenario) in PANELS.items():
        code = (
            f"from chord_lab.widgets import Measurements, Selection, {panel}\n"
            f"{panel}(Selection(scenario={scenario!r}), Measurements.recorded())"
        )
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(code)],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        )
        nbformat.write(notebook, folder / f"{panel}.ipynb")


def serve(browser_tests: Any, folder: pathlib.Path) -> Any:
    """JupyterLab on the notebooks, with no setting of the user's own."""
    from chord_lab.cli.lab import lab_command, server_environment

    port = browser_tests.free_port()
    command = lab_command(folder, "LoadExplorer.ipynb", port, browser=False)
    command += ["--LabApp.expose_app_in_browser=True", "--ServerApp.token=", "--ServerApp.password="]
    private = {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    return browser_tests.serving(command, f"http://127.0.0.1:{port}/lab", folder, {**server_environment(), **private})


def measure(browser_tests: Any, chromium: Any, url: str, panel: str, steps: int) -> list[float]:
    """Milliseconds of each step; the first two, which fill caches, are left out."""
    page = chromium.new_context(viewport={"width": 1500, "height": 1400}).new_page()
    view = browser_tests.Watch(page, ROOT / "out" / "browser")
    view.run_notebook(url, f"{panel}.ipynb")
    handle = page.locator(f"[role=slider][aria-label='{PANELS[panel][0]}']").first
    handle.wait_for(state="attached")
    page.wait_for_timeout(1500)
    handle.focus()
    taken: list[float] = []
    key = "ArrowRight"
    while len(taken) < steps + 2:
        now, top, low = (float(handle.get_attribute(f"aria-value{n}") or 0) for n in ("now", "max", "min"))
        key = "ArrowLeft" if now >= top else "ArrowRight" if now <= low else key
        page.evaluate(LISTEN, QUIET_MS)
        handle.press(key)
        taken.append(float(page.evaluate("() => window.step")))
    page.context.close()
    return taken[2:]


def summary(values: list[float]) -> dict[str, float]:
    """Median and 95th percentile in milliseconds."""
    ordered = sorted(values)
    return {
        "median_ms": round(statistics.median(ordered), 1),
        "p95_ms": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1),
    }


def count_records() -> int:
    """Records that the panels work on."""
    from chord_lab.widgets import Measurements

    return len(Measurements.recorded().frame)


if __name__ == "__main__":
    sys.exit(main())

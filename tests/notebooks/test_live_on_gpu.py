"""The notebooks' cells measure live where there is a GPU: the tour with one word changed, and the Nsight button."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="no notebook packages in this interpreter")

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(400)]


def execute(notebook: Any, folder: pathlib.Path) -> str:
    """Run it from top to bottom; everything that its cells printed."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=360, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_the_tour_measures_live(tmp_path, monkeypatch):
    pytest.importorskip("ipywidgets")
    monkeypatch.setenv("CHORD_LAB_OUT", str(tmp_path))
    path = ROOT / "notebooks" / "00_tour.ipynb"
    notebook = nbformat.read(path, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert 'SOURCE = "replay"' in first.source
    first.source = first.source.replace('SOURCE = "replay"', 'SOURCE = "live"')
    printed = execute(notebook, path.parent)
    print(printed)
    answer = printed.strip().splitlines()[-1]
    assert answer.startswith("Source: live"), answer
    journals = list((tmp_path / "tour").glob("**/journal-*.jsonl"))
    assert journals and '"status":"ok"' in journals[0].read_text(encoding="utf-8")


def test_the_nsight_button_profiles(tmp_path, monkeypatch):
    pytest.importorskip("ipywidgets")
    if shutil.which("ncu") is None:
        pytest.skip("no ncu on PATH")
    monkeypatch.setenv("CHORD_LAB_OUT", str(tmp_path))
    cells = [
        "from chord_lab.widgets.nsight_collect import NsightCollect",
        "made = []\ncollect = NsightCollect(finished=made.append)\ncollect",
        'collect.scenario.value = "kimi-k2/ep8/decode"\ncollect.go.click()',
        "import time\nwhile collect.go.disabled: time.sleep(0.5)",
        "print(collect.progress.value)\nprint(sorted(p.suffix for p in made[0].iterdir()))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    printed = execute(notebook, ROOT / "notebooks")
    print(printed)
    assert ".ncu-rep" in printed.splitlines()[-1]

"""Every notebook runs head-less from top to bottom, shows something, and is written the way CONTRIBUTING.md says."""

from __future__ import annotations

import ast
import json
import pathlib
import re

import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(p for p in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
QUESTIONS = [p for p in NOTEBOOKS if p.parent.name == "notebooks"]
SHOWN = {"text/html", "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json", "image/png"}


def name(path):
    return path.relative_to(ROOT / "notebooks").as_posix()


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", QUESTIONS, ids=name)  # test_workshop.py runs the workshop's solutions
def test_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("CHORD_LAB_OUT", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output for output in outputs if SHOWN & set(output.get("data", {}))]
    assert shown, "no table and no figure in its output"
    assert not [o for o in outputs if o.output_type == "stream" and o.name == "stderr" and "Traceback" in o.text]
    # A saved notebook stays small enough to mail: figures are data, their script is not written with each of them.
    assert len(json.dumps(notebook)) < 8_000_000


@pytest.mark.parametrize("path", QUESTIONS, ids=name)
def test_title_is_a_question_and_the_end_an_answer(path):
    cells = nbformat.read(path, as_version=4).cells
    assert re.match(r"# .+\?\n?", cells[0].source), cells[0].source[:60]
    if not path.name.startswith("90_"):
        assert any("## The answer" in cell.source for cell in cells[-3:])


@pytest.mark.parametrize("path", QUESTIONS, ids=name)
def test_first_code_cell_says_the_source(path):
    # Captures of a profiler are files: their own source line stands where others choose replay or live.
    assert re.search(r'SOURCE = "replay"|\.source\(\)', code_cells(path)[0].source)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_cells_are_short_and_define_nothing(path):
    for cell in code_cells(path):
        assert len(cell.source.splitlines()) <= 15, cell.source
        kinds = (ast.FunctionDef, ast.ClassDef)
        assert not [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_names_its_kernel(path):
    # Without it JupyterLab asks a question before the first cell can run.
    assert nbformat.read(path, as_version=4).metadata["kernelspec"]["name"] == "python3"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_links_lead_somewhere(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#]+)\)", cell.source):
                assert target.startswith("https://") or (path.parent / target).exists(), target

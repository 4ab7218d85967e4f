"""The Nsight notebooks from first cell to last, on made captures: with no GPU and without `ncu-report`."""

import pathlib

import pytest
from captures import PARTS, write_captures

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("1[01]_*.ipynb"))
ANSWERS = {
    "10": {"decode": "6 kernels that were profiled one by one", "layer": "gate_up 59%, down 32%"},
    "11": {"decode": "semi_static is 1.16 times as fast", "layer": "At 4,096 rows: wgmma 128x256x64"},
}


# what `make nsight` leaves behind when it is run in parts, as `--only` allows
@pytest.mark.parametrize("parts", [PARTS[:1], PARTS], ids=" ".join)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_and_shows_tables_and_figures(path, parts, tmp_path, monkeypatch):
    write_captures(tmp_path / "nsight" / "nvidia_h200", parts)
    monkeypatch.setenv("CHORD_LAB_DATA", str(tmp_path))
    monkeypatch.setenv("CHORD_LAB_OUT", str(tmp_path / "out"))
    notebook = nbformat.read(path, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        assert cell.outputs == [] and len(cell.source.splitlines()) <= 15
    # a report cannot be read on this machine: the notebooks must not need it
    code[0].source = "import sys; sys.modules['ncu_report'] = None\n" + code[0].source
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {kind for cell in code for output in cell.outputs for kind in output.get("data", {})}
    assert "text/html" in shown  # a table
    assert {"application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"} & shown
    answer = "".join(output.get("text", "") for output in code[-1].outputs)
    answers = ANSWERS[path.stem[:2]]
    assert answers[parts[-1]] in answer


def test_there_are_two():
    assert len(NOTEBOOKS) == 2

"""The captures in data/nsight: small enough, whole, joined to their records, and in agreement with them."""

import pathlib
import re

import pytest
from typer.testing import CliRunner

from chord_lab.cli import app
from chord_lab.cli import trace as trace_command  # noqa: F401 (registers the command)
from chord_lab.traces import read_trace
from chord_lab.traces.captures import load_library

ROOT = pathlib.Path(__file__).parents[2] / "data" / "nsight"
FOLDERS = sorted(p for p in ROOT.iterdir() if p.is_dir()) if ROOT.is_dir() else []

pytestmark = pytest.mark.skipif(not FOLDERS, reason="no captures in data/nsight: make nsight")


@pytest.fixture(scope="module", params=FOLDERS or [ROOT], ids=lambda p: p.name)
def library(request):
    return load_library(request.param)


def test_every_file_is_read_and_the_reports_are_small(library):
    assert library.notices == ()
    assert "decode" in library.counters
    assert {path.stem for path in library.folder.glob("*.ncu-rep")} == set(library.counters)
    assert sum(p.stat().st_size for p in library.folder.glob("*.ncu-rep")) < 6_000_000


def test_every_kernel_belongs_to_a_record_and_agrees_with_its_time(library):
    for trace in library.counters.values():
        assert trace.identity and all(trace.identity)
    decode = library.points[library.points["scenario"].str.endswith("decode")]
    assert len(decode) >= 4
    ratio = decode["profiled_us"] / decode["record_time_us"]
    assert ratio.between(0.9, 1.1).all(), ratio.tolist()


def test_the_counters_that_the_notebooks_show_are_there(library):
    shown = ["dram_pct", "dram_read_bytes", "pipe_tensor_pct", "issue_pct", "stall_wait", "stall_long_scoreboard"]
    shown += ["cycles", "instructions", "occupancy_pct", "waves", "l2_hit_pct", "registers", "smem_bytes"]
    assert library.points[shown].notna().all().all()
    ceilings = library.ceilings()
    assert ceilings["copy"] > 0 and ceilings["dense_bf16"] > 0


def test_launches_of_one_kernel_are_told_apart_on_a_terminal(library):
    """Six launches of two kernels: columns are letters, each spelled out with its schedule; nothing is cut at 80."""
    done = CliRunner().invoke(app, ["trace", str(library.folder / "decode.pq")], env={"COLUMNS": "80"})
    lines = done.output.splitlines()
    told = [line for line in lines if re.match(r"  [a-z]  ", line)]
    assert len(told) >= 3 and len(set(told)) == len({line[5:] for line in told}) == len(told)
    assert "\u2026" not in done.output and any(re.match(r"counter +a +b +c", line) for line in lines)


def test_a_report_says_what_its_table_says(library):
    pytest.importorskip("ncu_report")
    for path in library.folder.glob("*.ncu-rep"):
        report, table = read_trace(path), library.counters[path.stem]
        assert report.kernels["time_us"].tolist() == pytest.approx(table.kernels["time_us"].tolist(), rel=1e-3)
        assert report.kernels["grid"].tolist() == table.kernels["grid"].tolist()


def test_the_layer_is_joined_to_its_records(library):
    if not library.timelines:
        pytest.skip("no layer trace was recorded in data/nsight yet: make nsight")
    layer = library.timeline("layer.pt.trace.json.gz")
    rows = [row for row in layer.identity if row]
    assert {row["projection"] for row in rows} == {"gate_up", "down"}
    assert all(sum(row["tok_e"]) == row["routed_m"] for row in rows)


def test_what_the_notebook_says_of_token_slicing_is_so(library):
    """Predicates spare loads and not multiplications; a body of its own spares both."""
    points = library.points[library.points["routed_m"] == 576]
    slicing = {s.token_slicing: row for s, row in zip(points["schedule"], points.to_dict("records"), strict=True)}
    multiplied = {how: row["cycles"] * row["pipe_tensor_pct"] for how, row in slicing.items()}
    assert multiplied["semi_static"] == pytest.approx(multiplied["static"], rel=0.02)
    assert multiplied["branched"] < 0.8 * multiplied["static"]
    assert slicing["semi_static"]["stall_mio_throttle"] < 0.5 * slicing["static"]["stall_mio_throttle"]


def test_what_the_kernels_readme_says_of_counters_is_so(library):
    text = " ".join((ROOT.parents[1] / "kernels" / "README.md").read_text().split())
    said = re.search(r"Counters at 12 tokens per expert(.*?)\(2\.1 against 1\.0\)\.", text)
    assert said, "kernels/README.md no longer tells these counters"
    points = library.points[library.points["routed_m"] == 576]
    rows = {s.token_slicing: row for s, row in zip(points["schedule"], points.to_dict("records"), strict=True)}
    for how, words in (
        ("branched", "branched keeps DRAM at {dram} % of its peak with the tensor pipe at {tensor} %"),
        ("static", "static {dram} % and {tensor} %"),
        ("dynamic", "dynamic {dram} % and {tensor} %"),
    ):
        shares = {"dram": round(rows[how]["dram_pct"]), "tensor": round(rows[how]["pipe_tensor_pct"])}
        assert words.format(**shares) in said[1]
    assert [round(rows[how]["stall_wait"], 1) for how in ("dynamic", "branched")] == [2.1, 1.0]

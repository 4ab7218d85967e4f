"""Which schedule runs, and which rule says so."""

from __future__ import annotations

import subprocess
import sys

import pytest
from w4a16_moe import MoeProblem, Schedule, get_profile, resolve_schedule
from w4a16_moe.resolve import TABLES_ENV
from w4a16_moe.tables import ProblemTable, TuningFile, TuningRow

PROBLEM = MoeProblem(num_experts=48, N=4096, K=7168, top_k=8)


def schedule(block_m: int) -> Schedule:
    return Schedule(
        kernel="portable", block_m=block_m, block_n=128, block_k=64, num_warps=4, num_stages=4, swap_ab=True
    )


def rows(*edges: tuple[int, int | None, int, tuple[int, ...]]) -> tuple[TuningRow, ...]:
    return tuple(
        TuningRow(min_m=low, max_m=high, schedule=schedule(block_m), measured_m=measured)
        for low, high, block_m, measured in edges
    )


ROWS = rows((0, 160, 8, (160,)), (160, 400, 16, (240, 400)), (400, 1000, 32, ()), (1000, None, 64, (1024, 4096)))


@pytest.fixture
def folder(tmp_path):
    table = ProblemTable(problem=PROBLEM, rows=ROWS)
    file = TuningFile(device="nvidia_h200", profile=get_profile("portable"), tables=(table,))
    file.save(tmp_path / "nvidia_h200" / "portable.json")
    return tmp_path


def resolve(routed_m, folder, problem=PROBLEM, device="nvidia_h200"):
    return resolve_schedule(problem, routed_m, "portable", device, tables=folder)


def test_exact_and_bucket(folder):
    exact, bucket = resolve(240, folder), resolve(241, folder)
    assert (exact.rule, exact.schedule.block_m, exact.warning) == ("exact", 16, None)
    assert (bucket.rule, bucket.schedule.block_m, bucket.warning) == ("bucket", 16, None)
    assert exact.table == str(folder / "nvidia_h200" / "portable.json")
    assert (exact.row.min_m, exact.row.max_m) == (160, 400)


def test_resolver_and_rows_agree_for_every_m(folder):
    """0 is no row and no launch; each m from 1 on has the schedule of the one row that covers it (B106)."""
    assert resolve(0, folder)[:2] == (None, "empty")
    for m in [*range(1, 20_001), 2**30, 2**30 + 1]:
        covering = [r for r in ROWS if r.covers(m)]
        resolved = resolve(m, folder)
        assert len(covering) == 1
        assert resolved.row == covering[0]
        assert resolved.schedule == covering[0].schedule


@pytest.mark.parametrize("device", ["NVIDIA H200", "nvidia h200", "NVIDIA_H200", " NVIDIA-H200 "])
def test_a_device_may_be_named_as_its_driver_names_it(folder, device):
    assert resolve(240, folder, device=device) == resolve(240, folder)
    file = folder / "nvidia_h200" / "portable.json"
    assert resolve(240, file, device=device).rule == "exact"


def test_rows_without_measurements_and_points_beyond_them_say_so(folder):
    """M=1 served by the row of M=160 is visible (B08); so is a row that nothing was measured in."""
    assert resolve(1, folder).warning == "routed_m 1 is below the smallest measured point 160"
    assert resolve(500, folder).warning == "no measured point supports the row (400, 1000]"
    assert resolve(5000, folder).warning == "routed_m 5000 is above the largest measured point 4096"
    assert resolve(4096, folder).warning is None


def test_a_sparse_table_shows_which_row_serves_each_m(tmp_path):
    """Rows for 16..4096 only: M=1 gets M=16's schedule, and the row and a warning say so (B08)."""
    table = ProblemTable(problem=PROBLEM, rows=rows((0, 16, 8, (16,)), (16, None, 64, (4096,))))
    TuningFile(device="d", profile=get_profile("portable"), tables=(table,)).save(tmp_path / "d" / "portable.json")
    resolved = resolve(1, tmp_path, device="d")
    assert (resolved.rule, resolved.row.measured_m) == ("bucket", (16,))
    assert "below the smallest measured point 16" in resolved.warning


def test_an_unknown_problem_takes_the_block_m_model(folder):
    other = MoeProblem(num_experts=64, N=1536, K=2048, top_k=8)
    few, many = resolve(64, folder, other), resolve(64 * 200, folder, other)
    assert few.rule == many.rule == "heuristic"
    assert few.schedule.block_m < many.schedule.block_m
    assert "has no table for E=64 N=1536 K=2048" in few.warning


def test_an_unknown_device_says_so_and_lists_where_it_looked(folder):
    resolved = resolve(160, folder, device="nvidia_tesla_t4")
    assert (resolved.rule, resolved.table, resolved.row) == ("default", None, None)
    assert resolved.schedule is not None
    assert "no tuning table for device nvidia_tesla_t4 and profile portable: using the default" in resolved.warning
    assert str(folder / "nvidia_tesla_t4" / "portable.json") in resolved.warning
    assert "\n" not in resolved.warning


def test_a_table_measured_with_another_top_k_serves_and_says_so(folder):
    alike = MoeProblem(num_experts=48, N=4096, K=7168, top_k=1)
    resolved = resolve(240, folder, alike)
    assert (resolved.rule, resolved.warning) == ("exact", "measured with top_k 8, asked for 1")


def test_the_environment_names_tables_too(folder, monkeypatch):
    monkeypatch.setenv(TABLES_ENV, str(folder / "nvidia_h200" / "portable.json"))
    assert resolve(240, None).rule == "exact"
    monkeypatch.setenv(TABLES_ENV, str(folder))
    assert resolve(240, None).rule == "exact"
    monkeypatch.setenv(TABLES_ENV, str(folder / "nowhere"))
    with pytest.raises(ValueError, match="nowhere is neither a file nor a folder"):
        resolve(240, None)


def test_a_named_file_of_another_profile_is_refused(folder):
    file = folder / "nvidia_h200" / "portable.json"
    with pytest.raises(ValueError, match="is for profile portable, asked for profile h200_prefill_ep8"):
        resolve_schedule(PROBLEM, 160, "h200_prefill_ep8", "nvidia_h200", tables=file)
    with pytest.raises(ValueError, match="is for device nvidia_h200, asked for device nvidia_b200"):
        resolve_schedule(PROBLEM, 160, "portable", "nvidia_b200", tables=file)


def test_a_changed_file_is_read_again(folder):
    path = folder / "nvidia_h200" / "portable.json"
    assert resolve(240, folder).schedule.block_m == 16
    table = ProblemTable(problem=PROBLEM, rows=rows((0, None, 128, (240, 4096))))
    TuningFile(device="nvidia_h200", profile=get_profile("portable"), tables=(table,)).save(path)
    assert resolve(240, folder).schedule.block_m == 128
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        resolve(240, folder)


@pytest.mark.parametrize("routed_m", [-1, 1.5, "8", True, None])
def test_bad_row_counts_are_refused(routed_m, folder):
    with pytest.raises(ValueError, match="routed_m must be a whole number of at least 0"):
        resolve(routed_m, folder)


def test_describing_work_loads_neither_torch_nor_triton_nor_the_workbench():
    code = (
        "import sys, w4a16_moe\n"
        "from w4a16_moe import BlockMModel, DEVICES, MoeProblem, Schedule, get_profile, resolve_schedule, why_illegal\n"
        "problem = MoeProblem(num_experts=48, N=4096, K=7168)\n"
        "for profile in ('portable', 'h200_decode_ep8', 'h200_prefill_ep8', 'h200_tp8'):\n"
        "    schedule = resolve_schedule(problem, 160, profile, 'nvidia_h200').schedule\n"
        "    assert why_illegal(schedule, problem, get_profile(profile), DEVICES['nvidia_h200']) is None\n"
        "print([name for name in ('torch', 'triton', 'chord_lab') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr

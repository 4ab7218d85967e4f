"""Tuning files: what is written is read back; what cannot be trusted is refused in one line."""

from __future__ import annotations

import copy
import json
import os

import pytest
from w4a16_moe import MoeProblem, Schedule, get_profile
from w4a16_moe.tables import ProblemTable, TuningFile, TuningRow, from_dict, load

PROBLEM = MoeProblem(num_experts=48, N=4096, K=7168, top_k=8)


def schedule(block_m: int = 16, kernel: str = "portable") -> Schedule:
    return Schedule(kernel=kernel, block_m=block_m, block_n=128, block_k=64, num_warps=4, num_stages=4, swap_ab=True)


def row(min_m: int, max_m: int | None, block_m: int = 16, measured: tuple[int, ...] = ()) -> TuningRow:
    return TuningRow(min_m=min_m, max_m=max_m, schedule=schedule(block_m), measured_m=measured)


def tuning_file(*rows: TuningRow, problem: MoeProblem = PROBLEM) -> TuningFile:
    table = ProblemTable(problem=problem, rows=rows or (row(0, 1024, 16, (1024,)), row(1024, None, 64, (4096,))))
    return TuningFile(
        device="nvidia_h200", profile=get_profile("portable"), tables=(table,), provenance={"date": "2026-01-02"}
    )


def test_a_file_survives_being_written_and_read(tmp_path):
    path = tmp_path / "nvidia_h200" / "portable.json"
    tuning_file().save(path)
    assert load(path, profile="portable", device="nvidia_h200") == tuning_file()
    assert os.listdir(path.parent) == ["portable.json"], "no temporary file stays behind"


def test_every_m_has_exactly_one_row_edges_included():
    """Rows (0, 1024] and (1024, open): 1024 and 1025 each have one (B18)."""
    table = tuning_file().tables[0]
    assert table.row_for(1024).max_m == 1024
    assert table.row_for(1025).min_m == 1024
    edges = ProblemTable(problem=PROBLEM, rows=(row(0, 1), row(1, 7), row(7, 8), row(8, 2**30), row(2**30, None)))
    for m in [*range(1, 20_001), 2**30 - 1, 2**30, 2**30 + 1, 2**40]:
        assert [r for r in edges.rows if r.covers(m)] == [edges.row_for(m)]
    with pytest.raises(ValueError, match="0 rows need no launch"):
        table.row_for(0)


@pytest.mark.parametrize(
    "rows, message",
    [
        ((), "has no rows"),
        ((row(8, None),), "first row starts at min_m 8, not 0"),
        ((row(0, 8), row(9, None)), "gap between max_m 8 and the next min_m 9"),
        ((row(0, 8), row(7, None)), "overlap between max_m 8 and the next min_m 7"),
        ((row(0, 8), row(8, 16)), r"last row ends at 16; it must be open"),
        ((row(0, None), row(8, None)), "the row after min_m 0 is open but not the last"),
        ((row(0, 0), row(0, None)), r"row \(0, 0\] covers nothing"),
        ((row(0, 8, measured=(9,)), row(8, None)), r"measured_m 9 lies outside its row \(0, 8\]"),
        ((row(0, 8, measured=(0,)), row(8, None)), "measured_m 0 lies outside"),
    ],
)
def test_gaps_overlaps_and_closed_ends_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        ProblemTable(problem=PROBLEM, rows=rows)


def edit(path: str, value):
    def apply(raw):
        *parents, last = path.split(".")
        target = raw
        for key in parents:
            target = target[int(key)] if key.isdigit() else target[key]
        if value is KeyError:
            del target[last]
        else:
            target[last] = value
        return raw

    return apply


ROW = "tables.0.rows.0."


@pytest.mark.parametrize(
    "change, message",
    [
        (edit("format", "w4a16-moe-tuning/9"), "format 'w4a16-moe-tuning/9'; this version reads 'w4a16-moe-tuning/1'"),
        (edit("device", ""), "device '' must be a device slug"),
        (edit("device", KeyError), "file lacks the field 'device'"),
        (edit("profile", "h300"), "unknown profile 'h300'; known: portable"),
        (edit("profile", 7), "profile 7 must be one of portable"),
        (edit("extra", 1), "file has the unknown field 'extra'"),
        (edit("provenance", []), "provenance must be an object"),
        (edit("tables", {}), "tables must be a list, not dict"),
        (edit("tables.0.problem.K", 7000), "K=7000 is not a multiple of group_size=32; nearest legal K: 6976 and 7008"),
        (edit("tables.0.problem.E", 48), "problem has the unknown field 'E'"),
        (edit(ROW + "min_m", "0"), "min_m must be a whole number of at least 0, not '0'"),
        (edit(ROW + "max_m", 1.5), "max_m must be a whole number of at least 0, not 1.5"),
        (edit(ROW + "max_m", True), "max_m must be a whole number of at least 0, not True"),
        (edit(ROW + "measured_m", [None]), "measured_m must be a whole number"),
        (edit(ROW + "verdict", "best"), "verdict 'best': legal are win, tie, default"),
        (edit(ROW + "schedule", None), "schedule must be an object, not NoneType"),
        (edit(ROW + "schedule.block_q", 1), "unknown schedule field block_q"),
        (edit(ROW + "schedule.block_m", KeyError), "schedule is incomplete: .*block_m"),
        (edit(ROW + "schedule.kernel", "cutlass"), "kernel='cutlass': legal are portable, mma_sync, wgmma"),
        (edit(ROW + "reason", ""), "row has the unknown field 'reason'"),
    ],
)
def test_foreign_or_broken_content_is_refused_in_one_line(change, message, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(change(tuning_file().to_dict())))
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 1',
        b"\xff\xfe",
        b"null",
        b'{"format"' + b"\0" * 8,
        b"[" * 200000,
        b'{"format": "w4a16-moe-tuning/1", "format": 2}',
    ],
    ids=lambda b: repr(b[:20]),
)
def test_corrupt_files_are_refused_in_one_line(content, tmp_path):
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"table\.json: ") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_another_profiles_file_or_kernel_is_refused_with_both_names(tmp_path):
    """A table of h200_decode_ep8 loaded for prefill, a row of one family in another's table (B110)."""
    decode = TuningFile(
        device="nvidia_h200",
        profile=get_profile("h200_decode_ep8"),
        tables=(
            ProblemTable(problem=PROBLEM, rows=(TuningRow(min_m=0, max_m=None, schedule=schedule(kernel="mma_sync")),)),
        ),
    )
    path = tmp_path / "h200_decode_ep8.json"
    decode.save(path)
    with pytest.raises(ValueError, match="is for profile h200_decode_ep8, asked for profile h200_prefill_ep8"):
        load(path, profile="h200_prefill_ep8")
    with pytest.raises(ValueError, match="is for device nvidia_h200, asked for device nvidia_b200"):
        load(path, device="nvidia_b200")
    raw = decode.to_dict()
    raw["profile"] = "portable"
    with pytest.raises(
        ValueError, match=r"kernel mma_sync \(profiles h200_decode_ep8.*\) cannot serve profile portable"
    ):
        from_dict(raw)
    with pytest.raises(ValueError, match=r"kernel mma_sync .* cannot serve profile portable"):
        TuningFile(device="nvidia_h200", profile=get_profile("portable"), tables=decode.tables)


def test_two_tables_of_one_problem_are_refused():
    raw = tuning_file().to_dict()
    raw["tables"].append(copy.deepcopy(raw["tables"][0]))
    with pytest.raises(ValueError, match="two tables for E=48 N=4096 K=7168 top_k=8"):
        from_dict(raw)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "table.json"
    tuning_file().save(path)
    before = path.read_text()
    broken = TuningFile(
        device="nvidia_h200", profile=get_profile("portable"), tables=(), provenance={"rate": float("nan")}
    )
    with pytest.raises(ValueError, match=r"JSON compliant|nan"):
        broken.save(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["table.json"]

import json
import pathlib
import subprocess
import sys

import pytest
from w4a16_moe.problem import MoeProblem
from w4a16_moe.resolve import resolve_schedule
from w4a16_moe.schedule import Schedule
from w4a16_moe.tables import ProblemTable, TuningFile

from chord_lab.errors import UserError
from chord_lab.export.tables.collect import collect
from chord_lab.export.tables.kernels import (
    KernelTables,
    build,
    check,
    differences,
    legal_points,
    load_table,
    package_path,
    write,
)
from chord_lab.export.tables.points import TablePoint, missing_points, table_rows
from chord_lab.records import to_table, write_parquet
from chord_lab.records.parquet import read_tables
from chord_lab.scenarios import get_scenario
from chord_lab.sweeps.recorded import newest_runs
from chord_lab.sweeps.traffic import read_traffic, traffic_winners

DATA = pathlib.Path(__file__).resolve().parents[2] / "data"

PROBLEM = MoeProblem(num_experts=8, N=256, K=512, top_k=2)


def tile(block_m, **knobs):
    values = {"kernel": "portable", "block_m": block_m, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 2}
    return Schedule(**values | knobs)


def point(routed_m, schedule, *, verdict="win", default=64, within=(), time_us=90.0):
    return TablePoint(
        problem=PROBLEM, projection="gate_up", num_tokens=routed_m // 2, routed_m=routed_m, verdict=verdict,
        schedule=schedule, time_us=time_us if schedule else None, default=tile(default) if default else None,
        default_us=100.0 if schedule else None, within=frozenset(within),
    )  # fmt: skip


def bounds(rows):
    return [(r.min_m, r.max_m, r.schedule.block_m, r.measured_m, r.verdict) for r in rows]


def test_rows_cover_everything_once_and_join_equal_neighbours():
    rows = table_rows([point(400, tile(32)), point(100, tile(16)), point(200, tile(16)), point(800, tile(32))])
    assert bounds(rows) == [(0, 200, 16, (100, 200), "win"), (200, None, 32, (400, 800), "win")]


def test_a_tie_keeps_the_default():
    rows = table_rows([point(100, tile(64), verdict="tie"), point(200, tile(32))])
    assert bounds(rows) == [(0, 100, 64, (100,), "tie"), (100, None, 32, (200,), "win")]
    assert "default kept" in rows[0].note


def test_a_point_where_nothing_succeeded_is_marked_and_gets_the_default():
    rows = table_rows([point(100, tile(64), verdict="tie"), point(200, None, verdict="none")])
    assert bounds(rows) == [(0, 100, 64, (100,), "tie"), (100, None, 64, (), "default")]
    assert "no measured point supports this row" in rows[1].note
    with pytest.raises(ValueError, match="neither a winner nor a default"):
        table_rows([point(200, None, verdict="none", default=None)])


def test_wide_gaps_are_said():
    rows = table_rows([point(100, tile(16)), point(1000, tile(32))])
    assert "nothing measured between routed_m 100 and 1000" in rows[1].note
    assert "nothing measured above routed_m 1000" in rows[1].note
    assert "nothing measured" not in rows[0].note


def test_merging_makes_the_fewest_rows_and_stays_within_the_margin():
    a, b, c = tile(16), tile(32), tile(128)
    points = [
        point(100, a, within=[a, b]),
        point(200, b, within=[b]),
        point(300, c, within=[b, c]),
        point(400, c, within=[c]),
    ]
    assert [r.schedule for r in table_rows(points)] == [a, b, c]
    merged = table_rows(points, merge=True)
    assert bounds(merged) == [(0, 300, 32, (100, 200, 300), "win"), (300, None, 128, (400,), "win")]
    for row in merged:
        for p in points:
            assert not row.covers(p.routed_m) or row.schedule in {p.schedule, *p.within}


def test_a_merged_row_of_ties_does_not_say_that_the_default_was_kept():
    a, b = tile(16), tile(32)
    points = [
        point(100, a, verdict="tie", default=16, within=[a, b]),
        point(200, b, verdict="tie", default=32, within=[a, b]),
    ]
    assert ["default kept" in r.note for r in table_rows(points)] == [True, True]
    (row,) = table_rows(points, merge=True)
    assert row.verdict == "tie" and "default kept" not in row.note and "no schedule is proved" in row.note


def test_missing_points_are_listed():
    points = [point(100, tile(16)), point(200, None, verdict="none")]
    assert [tuple(m) for m in missing_points(points, {"gate_up": [100, 200, 300], "down": [100]})] == [
        ("down", 100, "not measured"),
        ("gate_up", 200, "no candidate succeeded"),
        ("gate_up", 300, "not measured"),
    ]


def tables(*points, profile="portable", device="nvidia_h200"):
    return KernelTables(device=device, profile=profile, points=points, provenance={"date": "today"})


def test_written_tables_are_what_the_resolver_serves(tmp_path):
    points = (point(100, tile(16)), point(200, tile(32)), point(800, tile(64), verdict="tie"))
    path = package_path("nvidia_h200", "portable", tmp_path)
    assert write(build(tables(*points)), path, points) == 3
    for p in points:
        resolved = resolve_schedule(PROBLEM, p.routed_m, "portable", "nvidia_h200", tables=tmp_path)
        assert (resolved.schedule, resolved.rule) == (p.schedule, "exact")
    assert [f.name for f in path.parent.iterdir()] == ["portable.json"]  # nothing half written is left
    proof = check(path, largest=1000)
    assert (proof.tables, proof.rows, proof.unsupported, proof.warnings) == (1, 3, [], [])


def test_other_problems_of_the_file_are_kept(tmp_path):
    other = MoeProblem(num_experts=4, N=256, K=512)
    old_rows = table_rows([point(64, tile(16))])
    old = TuningFile(
        device="nvidia_h200", profile=build(tables(point(1, tile(16)))).profile,
        tables=(ProblemTable(problem=other, rows=old_rows), ProblemTable(problem=PROBLEM, rows=old_rows)),
    )  # fmt: skip
    new = build(tables(point(100, tile(32))), existing=old)
    assert {t.problem for t in new.tables} == {PROBLEM, other}
    assert new.table_for(PROBLEM).row_for(65).schedule == tile(32)
    assert new.provenance["kept"]["tables"] == ["E=4 N=256 K=512"]
    assert [tuple(d) for d in differences(old, new)] == [
        ("E=8 N=256 K=512", 64, None, tile(16).label(), tile(32).label())
    ]
    assert differences(new, new) == []


def spans(file):
    """Each row as ``(min, max] block_m measured``, in one text."""
    rows = file.table_for(PROBLEM).rows
    return "; ".join(f"{r.min_m}-{r.max_m or ''} {r.schedule.block_m} {list(r.measured_m)}" for r in rows)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (  # decode again: prefill's rows stay, and begin behind the last point tried
            {8: 64, 64: 256},
            "0-8 64 [8]; 8-64 256 [64]; 64-1024 64 [1024]; 1024- 128 [4096]",
        ),
        (  # prefill again: decode's rows end at their own measured points
            {1024: 16, 4096: 256},
            "0-8 16 [8]; 8-64 32 [64]; 64-1024 16 [1024]; 1024- 256 [4096]",
        ),
        (  # one point in the middle
            {512: 256},
            "0-8 16 [8]; 8-64 32 [64]; 64-512 256 [512]; 512-1024 64 [1024]; 1024- 128 [4096]",
        ),
        ({4: 16, 9000: 256}, "0-4 16 [4]; 4- 256 [9000]"),  # from below everything to above
    ],
)
def test_an_export_speaks_for_the_range_that_it_tried(new, expected):
    old = build(tables(point(8, tile(16)), point(64, tile(32)), point(1024, tile(64)), point(4096, tile(128))))
    tried = tables(*(point(routed_m, tile(block_m)) for routed_m, block_m in new.items()))
    file = build(tried, existing=old)
    assert spans(file) == expected
    assert len(file.provenance.get("kept", {"rows": []})["rows"]) == expected.count(";") + 1 - len(new)
    assert build(tried, existing=file).tables == file.tables


def test_a_tried_point_without_a_result_is_not_old_territory():
    old = build(tables(point(8, tile(16)), point(1024, tile(64))))
    file = build(tables(point(64, tile(32)), point(2048, None, verdict="none")), existing=old)
    assert [row[:3] for row in bounds(file.table_for(PROBLEM).rows)] == [(0, 8, 16), (8, 64, 32), (64, None, 64)]


def test_differences_are_ranges():
    a = build(tables(point(100, tile(16)), point(200, tile(32))))
    b = build(tables(point(150, tile(16)), point(200, tile(32))))
    assert [d[1:] for d in differences(a, b)] == [(100, 150, tile(32).label(), tile(16).label())]
    assert [d[1:] for d in differences(None, a)] == [
        (0, 100, None, tile(16).label()),
        (100, None, None, tile(32).label()),
    ]


@pytest.mark.parametrize(
    ("schedule", "profile", "reason"),
    [
        (tile(16, kernel="wgmma"), "portable", "is another profile's: portable runs portable"),
        (tile(8), "portable", "needs 16"),
        (tile(16, block_n=48), "portable", "block_n"),
    ],
)
def test_illegal_and_foreign_schedules_are_never_exported(schedule, profile, reason):
    with pytest.raises(UserError, match=reason):
        build(tables(point(100, schedule), profile=profile))


def test_a_point_without_winner_and_default_gets_what_the_package_would_choose():
    file = build(tables(point(100, None, verdict="none", default=None)))
    row = file.table_for(PROBLEM).row_for(100)
    assert row.schedule == resolve_schedule(PROBLEM, 100, "portable", "nvidia_h200").schedule
    assert (row.verdict, row.measured_m) == ("default", ())


def test_winners_that_became_illegal_leave_the_default_and_say_so():
    points = (point(100, tile(8), within=[tile(8), tile(16)]), point(200, tile(32)))
    legal, remarks = legal_points(tables(*points))
    assert [p.schedule for p in legal.points] == [None, tile(32)]
    assert len(remarks) == 1
    assert "gate_up at 100 rows: portable 8x64x64 w4 s2 is illegal in this version" in remarks[0]
    file = build(legal)
    assert bounds(file.table_for(PROBLEM).rows)[0] == (0, 100, 64, (), "default")


def test_nothing_to_export_is_refused():
    with pytest.raises(UserError, match="nothing to export"):
        build(tables())


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(0, 1024), (1025, None)], "gap between max_m 1024 and the next min_m 1025"),
        ([(0, 1024), (1000, None)], "overlap"),
        ([(1, None)], "starts at min_m 1"),
        ([(0, 1024)], "it must be open"),
        ([(0, None), (1024, None)], "open but not the last"),
        ([], "no rows"),
    ],
)
def test_check_refuses_gaps_and_overlaps(tmp_path, rows, reason):
    file = build(tables(point(100, tile(16)))).to_dict()
    row = file["tables"][0]["rows"][0] | {"measured_m": []}
    file["tables"][0]["rows"] = [row | {"min_m": low, "max_m": high} for low, high in rows]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(file))
    with pytest.raises(UserError, match=reason) as caught:
        check(path)
    assert "\n" not in str(caught.value)


def test_check_goes_over_every_edge(tmp_path):
    points = (point(1024, tile(16)), point(30000, tile(32)))
    path = tmp_path / "nvidia_h200" / "portable.json"
    write(build(tables(*points)), path, points)
    assert check(path).checked_m == (0, 20000)
    file = load_table(path)
    assert file.table_for(PROBLEM).row_for(1024).schedule == tile(16)
    assert file.table_for(PROBLEM).row_for(1025).schedule == tile(32)


def test_unsupported_rows_are_named_by_check(tmp_path):
    points = (point(100, tile(16)), point(200, None, verdict="none"))
    path = tmp_path / "nvidia_h200" / "portable.json"
    write(build(tables(*points)), path, points)
    assert check(path, largest=300).unsupported == ["E=8 N=256 K=512 (100, open]"]


def portable_sweep(made):
    """A run of the portable kernel: block_m 16 wins at 1024 rows, the default 64 stays at 2048, all fails at 4096."""
    records = []
    times = {1024: {16: [80, 81, 82], 64: [100, 101, 102]}, 2048: {16: [150, 151, 152], 64: [149, 152, 150]}}
    for projection in ("gate_up", "down"):
        for routed_m, row in times.items():
            for block_m, rounds in row.items():
                records.append(
                    made.record(
                        rounds, routed_m=routed_m, projection=projection, schedule=tile(block_m), default=block_m == 64,
                        profile="portable",
                    )
                )  # fmt: skip
        records.append(
            made.record(
                routed_m=4096, projection=projection, schedule=tile(64), default=True, profile="portable",
                status="launch_error", rule="cuda", reason="illegal address",
            )
        )  # fmt: skip
    return [*records, *made.ceilings()]


def test_collected_points_are_the_winners(made):
    found = collect(to_table(portable_sweep(made)))
    (group,) = found.tables
    assert (group.device, group.profile) == ("nvidia_h200", "portable")
    assert [(p.projection, p.routed_m, p.verdict) for p in group.points] == [
        (projection, m, verdict)
        for projection in ("gate_up", "down")
        for m, verdict in ((1024, "win"), (2048, "tie"), (4096, "none"))
    ]
    assert [p.schedule for p in group.points[:3]] == [tile(16), tile(64), None]
    assert [p.num_tokens for p in group.points[:3]] == [128, 256, 512]
    missing = {tuple(m) for m in found.missing}
    assert ("down", 8192, "not measured") in missing
    assert ("gate_up", 4096, "no candidate succeeded") in missing
    header = group.provenance
    assert header["device_name"] == "NVIDIA H200"
    assert header["tuned_for"]["draws"] == ["uniform"]
    assert header["toolchain"]["triton"] == "3.6.0"
    assert header["method"]["l2"] == "cleared"


def test_draws_are_never_mixed(made):
    records = [
        made.record(t, schedule=tile(m), default=m == 64, profile="portable", draw=draw)
        for draw in ("balanced", "zipf:1")
        for m, t in ((16, 80.0), (64, 100.0))
    ]
    with pytest.raises(UserError, match=r"several draws \(balanced, zipf:1\); choose one with --draw"):
        collect(to_table(records))
    found = collect(to_table(records), draw="zipf:1")
    assert found.tables[0].provenance["tuned_for"]["draws"] == ["zipf:1"]
    assert any("draws not used for this export: balanced" in r for r in found.remarks)
    with pytest.raises(UserError, match="no record of draw 'uniform'"):
        collect(to_table(records), draw="uniform")


def test_two_seeds_at_one_point_are_not_mixed(made):
    first = made.record(80.0, schedule=tile(64), default=True, profile="portable")
    second = made.record(
        90.0, schedule=tile(64), default=True, profile="portable", routing=made.routing(1024, seed=7), run_id="other"
    )
    with pytest.raises(UserError, match="measured twice in unlike ways"):
        collect(to_table([first, second]))


def test_one_gemm_under_two_scenarios_makes_one_row(made):
    """The decode and the prefill grid can name the same number of rows of one problem."""

    def at(scenario, best, blocks=(16, 32, 64)):
        times = {m: 80.0 if m == best else 100.0 for m in blocks}
        return [
            made.record(t, schedule=tile(m), default=m == 64, profile="portable", scenario=scenario)
            for m, t in times.items()
        ]

    records = [*at("kimi-k2/ep8/decode", 16, (16, 64)), *at("kimi-k2/ep8/prefill", 32)]
    found = collect(to_table(records))
    (group,) = found.tables
    assert [p.schedule for p in group.points] == [tile(32)]  # more candidates
    assert any("the table follows kimi-k2/ep8/prefill" in r for r in found.remarks)
    assert bounds(build(group).tables[0].rows) == [(0, None, 32, (1024,), "win")]


def test_records_behind_an_export_are_those_that_were_chosen(made):
    records = [
        made.record(t, schedule=tile(m), default=m == 64, profile="portable", scenario=scenario, draw=draw)
        for scenario in ("kimi-k2/ep8/decode", "kimi-k2/ep8/prefill")
        for draw in ("uniform", "balanced")
        for m, t in ((16, 80.0), (64, 100.0))
    ]
    frame = collect(to_table([*records, *made.sweep()]), scenario="kimi-k2/ep8/decode", draw="balanced").frame
    assert set(frame["scenario"]) == {"kimi-k2/ep8/decode"} and set(frame["draw"]) == {"balanced"}
    assert len(frame) == 2


def chord_lab(*arguments, **environment):
    import os

    command = [sys.executable, "-m", "chord_lab", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )


@pytest.fixture
def run_folder(made, tmp_path):
    write_parquet(portable_sweep(made), tmp_path / "run" / "records.parquet")
    return tmp_path / "run"


def test_export_then_check_then_lookup(run_folder):
    done = chord_lab("export", run_folder, "--to", "kernels", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (file,) = result["files"]
    assert file["proved"] == 6
    assert {"projection": "gate_up", "routed_m": 4096, "reason": "no candidate succeeded"} in result["missing"]
    checked = chord_lab("table", "check", file["path"], "--json")
    assert json.loads(checked.stdout)["ok"] is True
    found = json.loads(chord_lab("table", "lookup", file["path"], "--m", 1000, "--json").stdout)
    assert {"schedule", "rule", "row", "warning"} <= set(found)
    assert (found["schedule"]["block_m"], found["rule"], found["row"]["max_m"]) == (16, "bucket", 1024)
    assert {t["projection"] for t in found["tables"]} == {"gate_up", "down"}
    exact = json.loads(chord_lab("table", "lookup", file["path"], "--m", 1024, "--projection", "down", "--json").stdout)
    assert (exact["rule"], exact["projection"], "tables" in exact) == ("exact", "down", False)
    nothing = json.loads(chord_lab("table", "lookup", file["path"], "--m", 0, "--json").stdout)
    assert (nothing["schedule"], nothing["rule"], nothing["row"]) == (None, "empty", None)
    shown = chord_lab("table", "show", file["path"])
    assert shown.returncode == 0
    assert "no measured point supports it" in shown.stdout


def test_missing_points_come_before_the_table(run_folder):
    done = chord_lab("export", run_folder)
    assert done.returncode == 0
    assert "missing: gate_up at 8192 rows: not measured" in done.stderr
    assert "resolver agrees at 6 points" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("export", "{run}", "--to", "nothing"), "legal: kernels, vllm, sglang, humming, t4"),
        (("export", "{run}", "--to", "vllm", "--into-package"), "does not go with --to vllm"),
        (("export", "{run}/none"), "does not exist"),
        (("export", "{run}", "--draw", "zipf:2"), "no record of draw 'zipf:2'"),
        (("table", "show", "{run}/none.json"), "no such file"),
        (("table", "check", "{run}/bad.json"), "not readable JSON"),
        (("table", "lookup", "{run}/bad.json", "--m", "1"), "not readable JSON"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run_folder, arguments, line):
    (run_folder / "bad.json").write_bytes(b"{\xff")
    done = chord_lab(*(str(a).replace("{run}", str(run_folder)) for a in arguments))
    assert done.returncode == 2, done.stderr
    assert line in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_packages_tables_follow_the_shipped_records_and_traffic():
    table, _ = newest_runs(read_tables(DATA / "nvidia_h200")[0])
    mixes = [read_traffic(path) for path in sorted((DATA / "traffic").glob("*.yaml"))]
    assert mixes
    chosen = {(w.scenario, w.profile, w.projection, w.routed_m): w.schedule for w in collect(table).winners}
    mixed = {
        (w.scenario, w.profile, w.projection, w.routed_m): w.schedule
        for traffic in mixes
        for w in traffic_winners(table, traffic)
    }
    assert len(mixed) > 30 and mixed.keys() <= chosen.keys()
    for (scenario, profile, projection, routed_m), schedule in (chosen | mixed).items():
        problem = get_scenario(scenario).problem(projection)
        served = resolve_schedule(problem, routed_m, profile, "nvidia_h200").schedule
        assert served == schedule, (scenario, projection, routed_m)

"""The workshop's self-checks accept the solutions and reject wrong answers, without telling the right one."""

from __future__ import annotations

import math
import pathlib
import re

import nbformat
import pytest
from w4a16_moe.devices import DEVICES
from w4a16_moe.legality import why_illegal
from w4a16_moe.profiles import get_profile

from chord_lab import analysis, workshop
from chord_lab.routing import padding
from chord_lab.scenarios import get_scenario
from chord_lab.widgets import Measurements
from chord_lab.workshop.record_checks import slicing

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXERCISES = sorted((ROOT / "notebooks" / "workshop").glob("[0-9]_*.ipynb"))


@pytest.fixture(scope="module")
def data():
    return Measurements.recorded()


def test_six_exercises_each_with_a_solution():
    assert len(EXERCISES) == 6
    assert all((path.parent / "solutions" / path.name).exists() for path in EXERCISES)


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_exercise_has_task_hints_answer_and_check(path):
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells)
    assert "**Task**" in text
    assert "<summary>Hint 1</summary>" in text
    assert "**Self-check**" in text
    assert [cell for cell in notebook.cells if "answer" in cell.metadata.get("tags", [])]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_solution_is_accepted(path):
    assert _check_output(path.parent / "solutions" / path.name).startswith("&#10003; Right.")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", EXERCISES[:2], ids=lambda path: path.stem)
def test_blank_exercise_runs_and_is_not_accepted(path):
    assert _check_output(path).startswith("&#10007; Not yet.")


def _check_output(path):
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=180, kernel_name="python3", resources=resources).execute()
    pages = [
        o["data"]["text/html"]
        for cell in notebook.cells
        for o in cell.get("outputs", [])
        if "data" in o and "text/html" in o["data"]
    ]
    [verdict] = [page for page in pages if "role='status'" in page]
    return verdict.partition("<b>")[2]


def right_load():
    tok_e = workshop.READ_LOAD.tok_e()
    mean, busiest = float(tok_e.mean()), int(tok_e.max())
    return {
        "tokens_per_expert": mean,
        "active_experts": int((tok_e > 0).sum()),
        "busiest_rows": busiest,
        "busiest_over_mean": busiest / mean,
    }


def right_block():
    tok_e = workshop.CHOOSE_BLOCK.tok_e()
    block_m = math.ceil(tok_e.max() / 8) * 8
    found = padding(tok_e, block_m)
    return {"block_m": block_m, "num_m_blocks": found.num_m_blocks, "padding_share": found.padding_share}


def right_fill():
    problem = get_scenario(workshop.FILL_CARD.scenario).problem("down")
    waves = analysis.waves_of(problem, workshop.FILL_SCHEDULE, workshop.FILL_CARD.tok_e(), 132)
    return {"num_tiles": waves.num_tiles, "waves": waves.waves, "idle_share": waves.idle_share}


def right_turn(data):
    turn = analysis.turn_info(data.crossover("kimi-k2/ep8/prefill", "gate_up", "uniform"))
    return {"low": turn.best_low, "high": turn.best_high, "is_80_inside": turn.default_is_best}


def right_slicing(data):
    info = slicing(data)
    ends = [{s: row[j] for s, row in zip(info.slicing, info.time_us, strict=True) if row[j]} for j in (0, -1)]
    return {"few": min(ends[0], key=ends[0].get), "many": min(ends[1], key=ends[1].get)}


def rejected(verdict, right):
    """Not accepted, a reason given, and no right value told."""
    assert not verdict.ok
    assert verdict.lines
    told = [str(value) for value in right.values() if not isinstance(value, bool) and len(str(value)) > 2]
    assert not [value for value in told if value in str(verdict)]
    return True


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_expert": 40.0},  # tokens, not rows per expert
        {"active_experts": 384},  # the whole system's
        {"busiest_rows": 8},  # top_k
        {"busiest_over_mean": 1.0},
        {"busiest_rows": None},
        {"tokens_per_expert": "6.67"},
    ],
    ids=str,
)
def test_load_check_rejects(change):
    right = right_load()
    assert workshop.check_load(right).ok
    assert rejected(workshop.check_load(right | change), right)


@pytest.mark.parametrize(
    "change",
    [
        {"block_m": 8},
        {"block_m": 256},
        {"block_m": 20},
        {"num_m_blocks": 48 * 8},
        {"padding_share": 0.0},
        {"block_m": True},
    ],
    ids=str,
)
def test_block_check_rejects(change):
    right = right_block()
    assert workshop.check_block(right).ok
    assert not workshop.check_block(right | change).ok


@pytest.mark.parametrize(
    "change", [{"low": -5}, {"high": 79.0}, {"low": "40"}, {"is_80_inside": None}, {"high": 1e9}, "flip"], ids=str
)
def test_turn_check_rejects(change, data):
    right = right_turn(data)
    assert workshop.check_turn(right, data).ok
    wrong = {"is_80_inside": not right["is_80_inside"]} if change == "flip" else change
    assert not workshop.check_turn(right | wrong, data).ok


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"few": None, "many": None},
        {"few": "sliced", "many": "static"},
        {"few": 1, "many": 2},
        ["static"],
        "slowest",
    ],
    ids=str,
)
def test_slicing_check_rejects(answer, data):
    assert workshop.check_slicing(right_slicing(data), data).ok
    if answer == "slowest":
        info = slicing(data)
        last = {s: row[-1] for s, row in zip(info.slicing, info.time_us, strict=True) if row[-1]}
        if max(last.values()) <= min(last.values()) * 1.02:
            pytest.skip("all slicings tie at the last recorded point")
        answer = right_slicing(data) | {"many": max(last, key=last.get)}
    assert not workshop.check_slicing(answer, data).ok


@pytest.mark.parametrize(
    "change",
    [{"num_tiles": 896}, {"waves": 6.0}, {"idle_share": 0.0}, {"waves": None}, {"num_tiles": 1.5}, {"idle_share": 1.0}],
    ids=str,
)
def test_fill_check_rejects(change):
    right = right_fill()
    assert workshop.check_fill(right).ok
    assert not workshop.check_fill(right | change).ok


def test_fill_schedule_is_one_that_may_run():
    scenario = get_scenario(workshop.FILL_CARD.scenario)
    profile = get_profile(scenario.profile)
    assert why_illegal(workshop.FILL_SCHEDULE, scenario.problem("down"), profile, DEVICES["nvidia_h200"]) is None


def test_table_check_rejects_six_answers(data):
    times = {rows: workshop.measured_times(data, rows) for rows in workshop.TRAFFIC}
    best = {rows: next(iter(found)) for rows, found in times.items()}
    slowest = {rows: list(found)[-1] for rows, found in times.items()}
    present = {rows: workshop.present_schedule(data, rows) for rows in times}
    assert workshop.check_table(best, data).ok
    first = next(iter(best))
    wrong = [
        present,
        slowest,
        {},
        {first: best[first]},
        best | {first: "fastest"},
        best | {first: workshop.FILL_SCHEDULE},
    ]
    assert [workshop.check_table(answer, data).ok for answer in wrong] == [False] * 6


def test_verdict_reads_as_text_and_as_a_page():
    verdict = workshop.check_load({"tokens_per_expert": 1})
    assert str(verdict).startswith("Not yet.")
    assert "<script" not in verdict._repr_html_()
    assert "&lt;b&gt;" in workshop.check_load({"<b>": 1})._repr_html_()


def test_guide_states_the_answers_that_the_code_gives():
    guide = (ROOT / "notebooks" / "workshop" / "INSTRUCTOR.md").read_text()
    stated = {row[0]: row[1] for row in re.findall(r"^\| (\d) \| (\w+ [\d.]+.*?) \|$", guide, flags=re.M)}
    for number, right in (("1", right_load()), ("2", right_block()), ("5", right_fill())):
        for name, value in right.items():
            [told] = re.findall(rf"{name} ([\d.]+)", stated[number])
            assert abs(float(told) - value) <= 0.5 * 10 ** -len(told.partition(".")[2]), (number, name, value)


def test_summary_is_one_offline_page():
    summary = (ROOT / "notebooks" / "workshop" / "SUMMARY.html").read_text()
    assert "http" not in summary
    assert "<script" not in summary
    assert "@page" in summary

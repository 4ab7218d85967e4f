"""Reading commands as a newcomer sees them: at 80 columns, what is recorded marked, refusals that say what there is."""

import json

import pytest
from typer.testing import CliRunner
from w4a16_moe.resolve import BUNDLED

from chord_lab.cli import app, console, table_rows
from chord_lab.cli import scenarios as scenarios_command  # noqa: F401 (registers the command)
from chord_lab.cli import table as table_command  # noqa: F401
from chord_lab.cli import tune as tune_command  # noqa: F401
from chord_lab.errors import UserError
from chord_lab.records import to_table
from chord_lab.records.parquet import write_parquet
from chord_lab.sweeps.recorded import of_scenario

BUNDLED_TABLES = sorted(BUNDLED.rglob("*.json"))


@pytest.fixture(autouse=True)
def eighty_columns():
    before, console.width = console.width, 80
    yield
    console.width = before


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_scenarios_mark_what_was_recorded_and_fit_80_columns(made, tmp_path, monkeypatch):
    write_parquet(made.sweep(), tmp_path / "nvidia_h200" / "r.parquet")
    monkeypatch.setenv("CHORD_LAB_DATA", str(tmp_path))
    done = invoke("scenarios")
    marked = [line for line in done.output.splitlines() if line.startswith("* kimi")]
    assert len(marked) == 1 and "kimi-k2/ep8/prefill" in marked[0]
    assert "\u2026" not in done.output and all(len(line) <= 80 for line in done.output.splitlines() if "/tp8/" in line)
    recorded = {s["name"] for s in json.loads(invoke("scenarios", "--json").output) if s["recorded"]}
    assert recorded == {"kimi-k2/ep8/prefill"}


@pytest.mark.parametrize("path", BUNDLED_TABLES, ids=lambda p: p.stem)
def test_bundled_tables_show_check_and_look_up(path):
    shown = invoke("table", "show", path)
    assert shown.exit_code == 0 and "routed rows" in shown.output and "\u2026" not in shown.output
    assert "1 to " in shown.output and "from " in shown.output
    assert invoke("table", "check", path, "--to", "300").exit_code == 0
    for m in (0, 1, 160, 10**6):
        done = invoke("table", "lookup", path, "--m", m)
        assert done.exit_code == 0 and "rule" in done.output


@pytest.mark.parametrize(
    ("low", "high", "text"), [(0, 8, "1 to 8"), (8, 9, "9"), (160, 320, "161 to 320"), (8, None, "from 9")]
)
def test_rows_in_words(low, high, text):
    assert table_rows.covers(low, high) == text


def test_facts_are_words_not_python():
    value = {"runs": ["a", "b"], "toolchain": {"torch": "2.11"}, "seeds": [0]}
    assert table_rows.facts(value) == "runs a and b, toolchain torch 2.11, seeds 0"


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"scenario": "kimi-k2/ep8/decode"}, "recorded are: kimi-k2/ep8/prefill"),
        ({"tokens": [7]}, "at 7; recorded: num_tokens 1024, 2048, 4096, 8192"),
        ({"draws": ["zipf:1"]}, "at zipf:1; recorded: .*draw uniform"),
        ({"profile": "portable"}, "profile h200_prefill_ep8"),
    ],
)
def test_what_was_not_recorded_is_refused_with_what_was(made, chosen, words):
    arguments = {"scenario": "kimi-k2/ep8/prefill", **chosen}
    with pytest.raises(UserError, match=words):
        of_scenario(to_table(made.sweep()), **arguments)

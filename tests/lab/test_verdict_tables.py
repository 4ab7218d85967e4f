"""Tables of verdicts in a terminal: nothing is cut at 80 columns, nothing important needs a wide one."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from chord_lab.cli import app, console, verdict_tables
from chord_lab.cli import winners as winners_command  # noqa: F401 (registers the command)
from chord_lab.records import to_table
from chord_lab.records.parquet import write_parquet
from chord_lab.records.peer_tile import tile_text
from chord_lab.sweeps.layers import layers
from chord_lab.sweeps.winners import winners

TILE = {
    "block_shape": [8, 128, 64], "mma_type": "mma", "num_ctas_per_sm": 4, "num_stages": 4, "use_stream_k": True,
    "use_tma": False, "warp_shape": [8, 64, 32], "wgmma_split_issue_wait": True,
}  # fmt: skip


def test_a_peers_tile_is_one_short_line():
    assert tile_text(json.dumps(TILE)) == "mma 8x128x64 warp 8x64x32 s4 c4 stream_k"


@pytest.mark.parametrize("config", ["tile 96x256x64", "{}", "[1]", '{"block_shape": 3}', "{", "", "x" * 500])
def test_a_configuration_of_another_form_stays_readable(config):
    assert len(tile_text(config)) <= 60
    assert tile_text(config)[:20] == config[:20]


def printed(function, argument, width=80):
    before = console.width
    console.width = width
    try:
        with console.capture() as captured:
            function(argument)
    finally:
        console.width = before
    return captured.get().splitlines()


def many(made):
    """Two profiles, long labels, all optional columns, large numbers, failures, a drifting default."""
    records = [*made.sweep(num_stages=4), *made.peers(), *made.ceilings()]
    records = [replace(r, config=json.dumps(TILE)) if r.kind == "peer" else r for r in records]
    records += [
        replace(r, kind="baseline", implementation="torch_dequant_bf16", times_us=((115077.0,),) * 3, config="")
        for r in made.peers()
    ]
    records.append(made.record(schedule=made.schedule(256), status="compile_error", rule="ptxas", reason="registers"))
    wide = {"persistent": True, "swap_ab": True, "tile_order": "dynamic", "token_slicing": "semi_static"}
    records.append(made.record([40.0, 40.1, 40.2], schedule=made.schedule(128, **wide)))
    return records + [replace(r, profile="portable") for r in records if r.kind != "ceiling"]


def test_nothing_is_cut_at_80_columns(made):
    found = winners(to_table(many(made)))
    lines = [*printed(verdict_tables.print_winners, found), *printed(verdict_tables.print_layers, layers(found))]
    text = "\n".join(lines)
    assert "…" not in text
    tables = [line for line in lines if line.split()[:1] and line.split()[0].isdigit() and line.split()[1] != "rows:"]
    assert len(tables) == len(found) and all(len(line) <= 80 for line in tables)
    for name in ("default", "fastest", "gain", "95 % interval", "verdict", "Humming", "its best", "bf16"):
        assert name in text
    assert "profile portable" in text and "profile h200_prefill_ep8" in text
    assert text.index("profile h200_prefill_ep8") < text.index("profile portable")  # the scenario's own leads
    assert "wgmma 128x256x64 w8 s4 swap persistent queue semi_static" in text
    assert "Humming mma 8x128x64 warp 8x64x32 s4 c4 stream_k" in text
    assert "1 compile_error" in text


def test_letters_name_what_should_run(made):
    found = winners(to_table(made.sweep(routed=(1024,))))
    lines = printed(verdict_tables.print_winners, found)
    legend = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("  a  ")}
    assert legend["a"] == found[1].schedule.label()


def test_letters_go_on_after_z():
    letters = verdict_tables.Letters()
    assert [letters.of(str(i)) for i in (0, 25, 26, 27)] and letters.of("") == ""
    names = [letters.of(str(i)) for i in range(60)]
    assert len(set(names)) == 60


def test_a_tie_shows_one_time_for_the_default(made):
    """A default timed in more rounds than its rival must not look like a gain, nor the layer like a loss."""
    rounds = [300.0, 310.0, 290.0, 330.0, 340.0]
    records = []
    for projection in ("gate_up", "down"):
        records.append(made.record(rounds, projection=projection, schedule=made.schedule(64), default=True))
        records.append(made.record(rounds[:3], projection=projection, schedule=made.schedule(32)))
    found = winners(to_table(records))
    assert [w.verdict for w in found] == ["tie", "tie"]
    assert [w.time_us for w in found] == [w.default_time_us for w in found]
    (layer,) = layers(found)
    assert layer.time_us == layer.default_time_us


def test_the_machine_form_names_the_peers_tiles(made, tmp_path):
    write_parquet(many(made), tmp_path / "records.parquet")
    rows = json.loads(CliRunner().invoke(app, ["winners", str(tmp_path), "--json"]).stdout)
    assert {row["humming_tile"] for row in rows} == {"mma 8x128x64 warp 8x64x32 s4 c4 stream_k"}
    assert all(row["baseline_us"] == 115077.0 for row in rows)


def test_a_layer_with_a_flagged_gemm_is_marked(made):
    found = layers(winners(to_table([*made.sweep(), *made.peers()])))
    plain = printed(verdict_tables.print_layers, found)
    marked = printed(verdict_tables.print_layers, [replace(found[0], doubtful=True), *found[1:]])
    assert "\u2020" not in "".join(plain)
    assert f"{found[0].routed_m}\u2020" in "".join(marked) and "carries a flag" in marked[-1]

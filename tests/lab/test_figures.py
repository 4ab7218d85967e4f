import pytest

from chord_lab import analysis
from chord_lab.export import comparison_figures, figures, look, palette, panel_figures
from chord_lab.records import to_frame, to_table
from chord_lab.sweeps.winners import winners

SOURCE = "recorded on NVIDIA H200, 2026-11-29"


def title(figure):
    return figure.layout.title.text


@pytest.fixture
def crossover(made_frame):
    return analysis.crossover_info(made_frame, projection="gate_up")


def slicings(made):
    records = [
        made.record(t, routed_m=m, schedule=made.schedule(16, token_slicing=s))
        for m in (192, 384)
        for s, t in (("static", 100.0), ("dynamic", 90.0))
    ]
    return analysis.slicing_info(to_frame(records), projection="gate_up")


def every_figure(made, frame):
    crossover = analysis.crossover_info(frame, projection="gate_up")
    first, second = made.schedule(64).label(), made.schedule(16).label()
    return {
        "block_m": figures.draw_block_m(crossover),
        "crossover": figures.draw_crossover(crossover, analysis.turn_info(crossover)),
        "winners": figures.draw_winners(winners(to_table([*made.sweep(), *made.peers()])), SOURCE),
        "roofline": figures.draw_roofline(analysis.roofline_info(frame)),
        "slicing": figures.draw_slicing(slicings(made)),
        "waves": figures.draw_waves(analysis.waves_info(frame, projection="gate_up")),
        "layer": comparison_figures.draw_layer(analysis.layer_info(frame)),
        "compare": comparison_figures.draw_compare(analysis.compare_info(frame)),
        "pair": comparison_figures.draw_pair(analysis.pair_info(frame, first, second)),
    }


def test_every_figure_says_its_source_and_its_units(made, made_frame):
    for name, figure in every_figure(made, made_frame).items():
        assert SOURCE in title(figure).replace("<br>", " "), name
        assert figure.layout.xaxis.title.text, name
        assert figure.layout.yaxis.title.text, name
        assert figure.data, name
        figure.to_json()  # nothing that JSON cannot hold


def test_titles_state_the_finding(made, made_frame):
    drawn = every_figure(made, made_frame)
    assert "the best block_m grows from" in title(drawn["block_m"])
    assert "80 is among the best" in title(drawn["crossover"]) or "80 costs" in title(drawn["crossover"])
    assert "of 8 points beat the default" in title(drawn["winners"])
    assert "of the measured ceiling" in title(drawn["roofline"])
    assert "dynamic is fastest at 2 of 2 points; over it: static +11.1%" in title(drawn["slicing"])
    assert "times our time for the layer; ours is faster at 4 of 4 points" in title(drawn["layer"])


def test_the_slicing_title_says_who_leads_where(made):
    """Times closer than two percent are level, so a lead does not change hands for less."""
    info = slicings(made)
    times = [[100.0, 100.0, 120.0, 121.0], [100.5, 99.5, 118.0, 100.0]]
    info = info._replace(slicing=["static", "branched"], tokens_per_expert=[3.0, 6.0, 12.0, 24.0], time_us=times)
    assert (
        figures.slicing_finding(info) == "gate_up: branched is fastest at 3 of 4 points; over it: static -0.5 to +21.0%"
    )
    info = info._replace(time_us=[times[0], [130.0, 99.5, 118.0, 100.0]])
    found = figures.slicing_finding(info)
    assert found == "gate_up: in the lead static from 3 to 12, then branched at 24 tokens per expert"
    info = info._replace(time_us=[[100.0, 120.0, 100.0, 120.0], [120.0, 100.0, 120.0, 100.0]])
    found = figures.slicing_finding(info)
    assert found.endswith("static at 3, then branched at 6, then static at 12, then branched at 24 tokens per expert")


def test_block_m_lines_hold_the_infos_numbers(crossover):
    figure = figures.draw_block_m(crossover)
    assert len(figure.data) == len(crossover.routed_m)
    for j, line in enumerate(figure.data):
        assert list(line.y) == [row[j] for row in crossover.time_us]
        assert line.marker.symbol.index("star") == crossover.block_m.index(crossover.best_block_m[j])


def test_crossover_lines_are_relative_to_the_best(crossover):
    figure = figures.draw_crossover(crossover)
    lowest = [min(line.y[j] for line in figure.data) for j in range(len(crossover.routed_m))]
    assert lowest == [0] * len(lowest)


def test_the_regret_of_a_threshold_changes_at_measured_points(crossover):
    turn, at = analysis.turn_info(crossover), analysis.threshold_info(crossover, 80.0)
    line = panel_figures.draw_turn(turn, at).data[0]
    assert line.line.shape == "hv"
    assert list(line.x[1:-1]) == crossover.tokens_per_expert
    for threshold, regret in zip(turn.threshold, turn.mean_regret, strict=True):
        before = max(i for i, edge in enumerate(line.x) if edge < threshold)
        assert line.y[before] == pytest.approx(100 * regret)


def test_a_band_without_an_end_covers_the_default_threshold(crossover):
    turn = analysis.turn_info(crossover)._replace(best_low=10.0, best_high=float("inf"), default_is_best=True)
    band = next(s for s in figures.draw_crossover(crossover, turn).layout.shapes if s.type == "rect")
    assert band.x0 <= turn.default_threshold <= band.x1


def test_layer_bars_are_ratios(made_frame):
    info = analysis.layer_info(made_frame)
    (bar,) = comparison_figures.draw_layer(info).data
    assert list(bar.y) == [row[0] for row in info.ratio]
    assert bar.marker.color == palette.IMPLEMENTATION["humming"]


def test_a_far_slower_baseline_is_named_and_leaves_the_bars_readable(made_frame):
    info = analysis.layer_info(made_frame)
    slow = info._replace(
        implementation=[*info.implementation, "torch_dequant_bf16"],
        ratio=[[*row, 50.0 + i] for i, row in enumerate(info.ratio)],
        other_us=[[*row, 9000.0] for row in info.other_us],
    )  # fmt: skip
    figure = comparison_figures.draw_layer(slow)
    assert [bar.name for bar in figure.data] == [palette.NAMES[name] for name in info.implementation]
    shown = title(figure).replace("<br>", " ")
    assert f"takes 50 to {49 + len(info.ratio)} times our time" in shown


def test_points_far_under_the_roofline_are_named(made_frame):
    info = analysis.roofline_info(made_frame)
    assert info.dense_tflops
    slow = info._replace(share_of_floor=[0.02 if n != "w4a16_moe" else 0.9 for n in info.implementation])
    figure = figures.draw_roofline(slow)
    assert {trace.name.split(",")[0] for trace in figure.data} == {"measured ceilings", "ours"}
    assert "reaches 2% and is not drawn" in title(figure).replace("<br>", " ")


def test_a_layer_without_a_peer_says_so(made):
    info = analysis.layer_info(to_frame(made.sweep()))
    assert "No other implementation" in comparison_figures.layer_finding(info)


def test_large_heatmaps_are_thinned_and_say_so():
    import numpy as np

    from chord_lab.routing import ExpertLoad

    load = ExpertLoad(tuple(np.ones(384, dtype=int) for _ in range(300)), "made")
    figure = figures.draw_layers(analysis.layers_info(load))
    assert len(figure.data[0].y) * 384 <= figures.MOST_CELLS
    assert "one layer in 3 shown" in title(figure)
    empty = ExpertLoad((np.zeros(4, dtype=int), np.array([10, 0, 0, 0])), "made")
    drawn = figures.draw_layers(analysis.layers_info(empty))
    assert list(drawn.data[0].z[0]) == [None] * 4
    assert "1 layers without rows" in title(drawn)


def test_colours_are_told_apart_by_meaning():
    for meaning in (palette.VERDICT, palette.SLICING, palette.PROJECTION):
        assert len(set(meaning.values())) == len(meaning)
    assert palette.of(palette.IMPLEMENTATION, "unheard of", 3) == look.CYCLE[3]
    shades = palette.ordered(6)
    light = [sum(int(c[i : i + 2], 16) * w for i, w in ((1, 0.3), (3, 0.6), (5, 0.1))) for c in shades]
    assert light == sorted(light)
    assert palette.ordered(1) == shades[:1]
    assert palette.ordered(0) == []


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([12, 180], ["10", "20", "50", "100", "200", "500", "1000", "2000", "5000"]),
        ([186, 231], ["100", "180", "190", "200", "210", "220", "230", "240", "500", "1000", "2000", "5000"]),
        ([7, 7], ["1", "2", "5", "10", "20", "50"]),
        ([None, 0], None),
    ],
)
def test_log_axes_have_whole_labels(values, ticks):
    axis = look.log_axis(values, alone=True)
    assert axis["type"] == "log"
    assert axis.get("ticktext") == ticks
    beside = look.log_axis(values).get("ticktext", ())
    assert all(text.rstrip("0") in "125" for text in beside)  # ticks of values that others lie far from

import numpy as np
import pytest
from w4a16_moe.problem import MoeProblem

from chord_lab import analysis
from chord_lab.errors import UserError
from chord_lab.records import to_frame


def test_crossover_lists_every_measured_time(made, made_frame):
    info = analysis.crossover_info(made_frame, projection="gate_up")
    assert info.routed_m == [1024, 2048, 4096, 8192]
    assert info.tokens_per_expert == [m / 48 for m in info.routed_m]
    assert info.block_m == [16, 32, 64, 128]
    for i, block_m in enumerate(info.block_m):
        for j, routed_m in enumerate(info.routed_m):
            expected = made.modelled_us(routed_m, made.schedule(block_m)) * 1.001
            assert info.time_us[i][j] == pytest.approx(expected, rel=1e-6)
    best = [min(range(4), key=lambda i, j=j: info.time_us[i][j]) for j in range(4)]
    assert info.best_block_m == [info.block_m[i] for i in best]
    assert info.source == "recorded on NVIDIA H200, 2026-11-29"


def turn_records(made, times):
    """times: routed_m -> {block_m: time}"""
    return [
        made.record(time, routed_m=m, schedule=made.schedule(block_m))
        for m, row in times.items()
        for block_m, time in row.items()
    ]


def test_change_of_block_m_is_named_between_its_two_points(made):
    times = {960: {64: 100, 128: 130}, 1920: {64: 150, 128: 151}, 3840: {64: 300, 128: 200}, 7680: {64: 600, 128: 390}}
    info = analysis.crossover_info(to_frame(turn_records(made, times)), projection="gate_up")
    assert info.best_block_m == [64, 64, 128, 128]
    assert info.alike[1] == [64, 128]  # 150 and 151 are within the noise
    assert [tuple(c) for c in info.changes] == [(40.0, 80.0, 64, 128)]


def test_noise_hides_a_change(made):
    times = {960: {64: 100.0, 128: 130.0}, 3840: {64: 201.0, 128: 200.0}}
    info = analysis.crossover_info(to_frame(turn_records(made, times)), projection="gate_up")
    assert info.best_block_m == [64, 128]
    assert info.changes == []


def test_overlapping_repeats_are_alike(made):
    records = [
        made.record([100, 110, 130], schedule=made.schedule(64)),
        made.record([105, 118, 125], schedule=made.schedule(128)),
        made.record([150, 151, 152], schedule=made.schedule(32)),
    ]
    info = analysis.crossover_info(to_frame(records), projection="gate_up")
    assert info.alike == [[64, 128]]


def test_missing_times_stay_missing(made):
    records = [
        made.record(100, routed_m=1024, schedule=made.schedule(64)),
        made.record(150, routed_m=2048, schedule=made.schedule(128)),
    ]
    info = analysis.crossover_info(to_frame(records), projection="gate_up")
    assert info.time_us == [[100, None], [None, 150]]


def test_threshold_costs_what_its_choices_cost(made):
    # packing wants the smallest block with nearly the fewest blocks; covering wants 1.1 t in the fewest blocks
    times = {960: {64: 100, 128: 130}, 7680: {64: 600, 128: 400, 176: 500}}
    info = analysis.crossover_info(to_frame(turn_records(made, times)), projection="gate_up")
    early = analysis.threshold_info(info, 80)
    assert early.rule == ["packing", "covering"]
    assert early.time_us == [info.time_us[info.block_m.index(b)][j] for j, b in enumerate(early.block_m)]
    assert early.regret == [t / b - 1 for t, b in zip(early.time_us, [100, 400], strict=True)]
    assert early.mean_regret == pytest.approx(np.mean(early.regret))
    assert early.changed == [False, False]
    assert early.against_default == 0
    late = analysis.threshold_info(info, 1000)
    assert late.rule == ["packing", "packing"]


def test_turn_is_an_interval_between_points(made_frame):
    info = analysis.crossover_info(made_frame, projection="gate_up")
    turn = analysis.turn_info(info)
    assert len(turn.threshold) == len(info.routed_m) + 1
    assert turn.best_low < turn.best_high
    assert turn.best_low in (0.0, *info.tokens_per_expert)
    assert turn.best_regret == min(turn.mean_regret)
    assert turn.default_regret == analysis.threshold_info(info, 80).mean_regret


def test_points_on_one_side_of_the_default_judge_no_threshold(made):
    """960 and 7680 rows of 48 experts are 20 and 160 tokens per expert; 1920 are 40."""
    sides = {960: {64: 100, 128: 130}, 7680: {64: 600, 128: 400}}
    info = analysis.crossover_info(to_frame(turn_records(made, sides)), projection="gate_up")
    assert analysis.turn_info(info).both_sides
    assert analysis.changes_in_words(info) == "64 to 128 between 20 and 160"
    one = {960: {64: 100, 128: 130}, 1920: {64: 100, 128: 130}}
    info = analysis.crossover_info(to_frame(turn_records(made, one)), projection="gate_up")
    assert not analysis.turn_info(info).both_sides and analysis.changes_in_words(info) == ""


def test_unlike_environments_are_never_mixed(made, made_run):
    other = made_run(driver="999")
    frame = to_frame([*made.sweep(), *other.sweep()])
    with pytest.raises(UserError, match=r"unlike environments are never ranked together \(driver"):
        analysis.crossover_info(frame, projection="gate_up")
    assert [len(part) for part in analysis.environments(frame)] == [32, 32]


def test_versions_of_the_kernels_never_meet_at_a_point(made, made_run):
    """Points may be of different versions, each recorded in one run; at a point an older profile steps back."""
    older = made_run(kernels="older")
    new, old = made.schedule(64), older.schedule(32)
    apart = [made.record(50, schedule=new), older.record(90, schedule=old, routed_m=2048)]
    info = analysis.crossover_info(to_frame(apart), projection="gate_up")
    assert info.best_block_m == [64, 32]
    assert "2 versions of the kernels, one at a point" in info.source
    with pytest.raises(UserError, match=r"unlike environments are never ranked together \(kernels"):
        analysis.crossover_info(to_frame([apart[0], older.record(40, schedule=old)]), projection="gate_up")
    tomorrow = {"profile": "portable", "date": "2026-12-24T12:00:00+00:00"}
    beside = [
        older.record(40, schedule=old, **tomorrow),
        older.record(10, implementation="humming", kind="peer", **tomorrow),
    ]
    peer = made.record(100, implementation="humming", kind="peer")
    found = analysis.compare_info(to_frame([apart[0], peer, *beside]))
    assert (found.ours_us, found.other_us) == ([50.0], [[100.0]])
    assert "2 records of other profiles, with other kernels, left out" in found.source
    assert analysis.crossover_info(to_frame(beside[:1]), projection="gate_up", profile="portable").best_block_m == [32]


def test_versions_of_the_kernels_are_never_added_or_ranked_across(made, made_run):
    """A layer's two projections, and one point that two scenarios share, are of one version too."""
    older = made_run(kernels="older")
    down = older.record(50, schedule=made.schedule(64), projection="down")
    with pytest.raises(UserError, match="unlike environments"):
        analysis.layer_info(to_frame([made.record(50, schedule=made.schedule(64)), down]))
    twin = older.record(60, schedule=made.schedule(32), scenario="kimi-k2/ep8/decode")
    with pytest.raises(UserError, match="unlike environments"):
        analysis.crossover_info(to_frame([made.record(50, schedule=made.schedule(64)), twin]), projection="gate_up")


def test_a_measurement_after_an_edit_of_a_kernel_takes_the_older_ones_place(made, made_run):
    edited = made_run(kernels="edited")
    again = edited.record(40, schedule=made.schedule(64), date="2026-12-24T12:00:00+00:00")
    frame = analysis.newest_versions(to_frame([made.record(50, schedule=made.schedule(64)), again]))
    assert frame["time_us"].tolist() == [40.0]
    same_second = [run.record(t, schedule=made.schedule(64)) for run, t in ((made, 50), (edited, 40))]
    assert len(analysis.newest_versions(to_frame(same_second))) == 1


def test_unlike_methods_are_never_mixed(made):
    from chord_lab.records import Method

    hot = made.record(50, schedule=made.schedule(64), method=Method(l2="warm"))
    cold = made.record(70, schedule=made.schedule(32))
    with pytest.raises(UserError, match="l2: "):
        analysis.crossover_info(to_frame([hot, cold]), projection="gate_up")


def test_several_draws_must_be_told_apart(made):
    frame = to_frame([made.record(9, schedule=made.schedule(), draw=d) for d in ("uniform", "balanced")])
    with pytest.raises(UserError, match="several values of draw"):
        analysis.crossover_info(frame, projection="gate_up")
    assert analysis.crossover_info(frame, projection="gate_up", draw="balanced").draw == "balanced"


def test_selecting_what_is_not_there_lists_what_is(made_frame):
    with pytest.raises(UserError, match="no record with projection=up; there are: down, gate_up"):
        analysis.crossover_info(made_frame, projection="up")


def test_roofline_counts_what_must_move(made, made_frame):
    info = analysis.roofline_info(made_frame, projection="gate_up")
    assert set(info.implementation) == {"w4a16_moe", "humming"}
    i = next(i for i, n in enumerate(info.implementation) if n == "w4a16_moe" and info.routed_m[i] == 1024)
    problem, routing = made.record().problem, made.routing(1024)
    num_bytes = problem.num_bytes(1024, routing.active_experts)
    assert info.bandwidth_gbps[i] == pytest.approx(num_bytes / info.time_us[i] / 1e3)
    assert info.tflops[i] == pytest.approx(2 * 1024 * 4096 * 7168 / info.time_us[i] / 1e6)
    assert info.copy_gbps == pytest.approx(4000)
    assert info.dense_tflops == pytest.approx(700)
    assert info.floor_us[i] == pytest.approx(max(num_bytes / 4e6, problem.flops(1024) / 7e8))
    assert info.share_of_floor[i] == pytest.approx(info.floor_us[i] / info.time_us[i])
    assert info.impossible[i] == ""
    assert info.ridge == pytest.approx(175)


def test_times_beyond_the_ceilings_are_flagged(made):
    fast = made.record(10.0, schedule=made.schedule())
    frame = to_frame([fast, *made.ceilings()])
    (flag,) = analysis.roofline_info(frame).impossible
    assert "more than the measured copy bandwidth of 4000" in flag
    assert "copy bandwidth" in analysis.doubt_info(frame).doubt[0]


def test_roofline_without_ceilings_makes_no_share(made):
    info = analysis.roofline_info(to_frame([made.record(300.0, schedule=made.schedule())]))
    assert (info.copy_gbps, info.share_of_floor, info.bound, info.impossible) == (None, [None], [""], [""])


@pytest.mark.parametrize(
    ("knobs", "tok_e", "expected"),
    [
        ({}, [64] * 8, (128, 132, 128 / 132, 128 / 132, 1 - 128 / 132)),
        ({"ctas_per_sm": 2}, [64] * 33, (528, 264, 2.0, 1.0, 0.0)),
        ({"split_k": 2}, [1] * 8, (256, 132, 256 / 132, 256 / 132 - 1, 1 - 256 / 264)),
        ({"stream_k": True, "persistent": True}, [1] * 9, (144, 132, 144 / 132, 1.0, 0.0)),
        ({}, [0, 0], (0, 132, 0.0, 0.0, 0.0)),
    ],
    ids=str,
)
def test_waves(made, knobs, tok_e, expected):
    problem = MoeProblem(num_experts=len(tok_e), N=4096, K=7168)
    assert analysis.waves_of(problem, made.schedule(64, **knobs), tok_e, 132) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tok_e", "block_m", "expected"),
    [([1, 0, 9, 16], 16, (5, 6)), ([3], 8, (1, 1)), ([17, 24], 24, (6, 6)), ([33], 16, (5, 6)), ([], 16, (0, 0))],
)
def test_slices(tok_e, block_m, expected):
    assert analysis.slices_of(tok_e, block_m) == expected


def test_slicing_compares_schedules_that_differ_in_nothing_else(made):
    def record(slicing, time, **knobs):
        return made.record(time, routed_m=192, schedule=made.schedule(16, token_slicing=slicing, **knobs))

    frame = to_frame(
        [
            record("static", 100), record("semi_static", 80), record("dynamic", 90),
            record("static", 50, num_stages=2),  # a faster family, but alone
        ]
    )  # fmt: skip
    info = analysis.slicing_info(frame, projection="gate_up")
    assert info.slicing == ["static", "semi_static", "dynamic"]
    assert info.time_us == [[100], [80], [90]]
    assert info.tokens_per_expert == [4.0]
    populated, total = analysis.slices_of(made.routing(192).tok_e, 16)
    assert info.slices_per_tile == [populated / (total / 2)]
    assert info.slices_in_tile == [2]
    with pytest.raises(UserError, match="no schedule of gate_up was measured with two token slicings"):
        analysis.slicing_info(to_frame([record("static", 1)]), projection="gate_up")


def test_waves_info_has_a_row_a_record(made_frame):
    info = analysis.waves_info(made_frame, projection="down", routed_m=1024)
    assert len(info.label) == 4
    assert info.num_sms == 132
    assert all(s is not None and 0 < s <= 1 for s in info.share_of_floor)


def test_compare_pairs_rounds(made, made_frame):
    info = analysis.compare_info(made_frame, projection="gate_up")
    assert info.implementation == ["humming"]
    assert info.routed_m == [1024, 2048, 4096, 8192]
    best = analysis.crossover_info(made_frame, projection="gate_up").best_us
    assert info.ours_us == best
    peer = made.modelled_us(1024, made.schedule(64)) * 1.2 * 1.001
    assert info.other_us[0][0] == pytest.approx(peer)
    assert info.ratio[0][0] == pytest.approx(peer / best[0], rel=1e-6)
    assert info.ratio_low[0][0] <= info.ratio[0][0] <= info.ratio_high[0][0]
    assert info.config[0] == ["tile 96x256x64"]
    assert info.padded_rows[0] == [1056]
    assert "own heuristics" in info.notes[0]


def test_compare_takes_the_chosen_schedule(made, made_frame):
    label = made.schedule(16).label()
    info = analysis.compare_info(made_frame, projection="gate_up", chosen={("gate_up", 1024, "uniform"): label})
    assert info.ours[0] == label
    assert info.ours_us[0] == pytest.approx(made.modelled_us(1024, made.schedule(16)) * 1.001)


def test_layer_is_the_sum_of_both_projections(made, made_frame):
    info = analysis.layer_info(made_frame)
    assert info.num_tokens == [1024, 2048, 4096, 8192]
    assert info.ours_us == [a + b for a, b in zip(info.gate_up_us, info.down_us, strict=True)]
    assert info.ratio[0][0] == pytest.approx(info.other_us[0][0] / info.ours_us[0])
    assert any("routing, activation and communication are outside" in c for c in info.caveats)
    assert any("own heuristics" in c for c in info.caveats)


def test_layer_needs_both_projections_and_peers_of_its_own_environment(made, made_run):
    with pytest.raises(UserError, match="both gate_up and down"):
        analysis.layer_info(to_frame(made.sweep(projections=("down",))))
    with pytest.raises(UserError, match="never ranked together"):
        analysis.layer_info(to_frame([*made.sweep(), *made_run(driver="other").peers()]))


def test_a_peer_with_one_projection_has_no_layer_time(made):
    records = [*made.sweep(), *(r for r in made.peers() if r.projection == "down")]
    assert analysis.layer_info(to_frame(records)).implementation == []


def test_pair_of_schedules(made, made_frame):
    first, second = made.schedule(64).label(), made.schedule(16).label()
    info = analysis.pair_info(made_frame, first, second)
    assert info.differs == {"block_m": (64, 16)}
    assert len(info.routed_m) == 8
    assert info.ratio == pytest.approx([b / a for a, b in zip(info.first_us, info.second_us, strict=True)])
    with pytest.raises(UserError, match="no timed record of schedule 'nothing'"):
        analysis.pair_info(made_frame, first, "nothing")


def test_failures_are_counted_by_kind(made_frame):
    info = analysis.failure_info(made_frame)
    assert (info.tried, info.ok) == (41, 40)
    (failure,) = info.failures
    assert failure[:3] == ("compile_error", "ptxas", 1)
    assert "256x256x64" in failure.example
    assert failure.reason == "too many registers"


def test_drifting_repeats_are_doubted(made):
    frame = to_frame([made.record([300, 310, 345], schedule=made.schedule()), *made.ceilings()])
    info = analysis.doubt_info(frame)
    assert info.doubt == ["repeats differ by 15% (drift or throttling)"]


def test_a_time_of_zero_is_too_short_to_time(made):
    frame = to_frame([made.record([0.0, 0.0], schedule=made.schedule())])
    assert analysis.doubt_info(frame).doubt == ["too short to time"]
    with pytest.raises(UserError):
        analysis.roofline_info(frame)


def test_environment_lists_card_and_method(made_frame):
    (fields,) = analysis.environment_info(made_frame).fields
    assert {"device": "NVIDIA H200", "triton": "3.6.0", "timer": "cuda_event"}.items() <= dict(fields).items()


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("live", "live on NVIDIA H200, 2026-11-29"),
        ("recorded", "recorded on NVIDIA H200, 2026-11-29"),
        ("predicted", "predicted for NVIDIA H200"),
    ],
)
def test_every_answer_says_its_source(made, source, line):
    made.source = source
    info = analysis.crossover_info(to_frame(made.sweep()), projection="down")
    assert info.source == line


def test_load_and_padding():
    info = analysis.load_info([2, 3, 0, 6, 8], source="draw uniform")
    assert (info.mean, info.busiest, info.active_experts, info.routed_m) == (3.8, 8, 4, 19)
    assert info.balancedness == pytest.approx(3.8 / 8)
    pad = analysis.padding_info([2, 3, 0, 6, 8], (4, 8))
    assert (pad.num_m_blocks, pad.num_tokens_padded) == ([6, 4], [24, 32])
    assert pad.padding_share == [1 - 19 / 24, 1 - 19 / 32]
    assert pad.weight_passes == [1.5, 1.0]
    assert analysis.padding_info([0, 0], (4,)).weight_passes == [None]


def test_layers_of_unlike_size_are_not_averaged_together():
    from chord_lab.routing import ExpertLoad

    load = ExpertLoad(tuple(np.array(v) for v in ([0, 0, 0, 0], [10, 0, 0, 0], [5, 5])), "made.json")
    info = analysis.layers_info(load)
    assert info.balancedness == [None, 0.25, 1.0]
    assert info.num_experts == [4, 4, 2]
    assert (info.num_empty, info.median_balancedness) == (1, 0.625)
    assert "busiest" in info.definition


def test_gpu_load():
    info = analysis.gpu_load_info([10, 0, 5, 5], 2)
    assert (info.rows, info.active_experts, info.busiest_over_mean) == ([10, 10], [1, 2], 1.0)
    spread = analysis.gpu_load_info([10, 0, 5, 5], 2, devices=[[0, 1], [0, 2, 3]])
    assert (spread.rows, spread.busiest_over_mean) == ([5, 15], 1.5)
    with pytest.raises(UserError, match="ep=3 does not divide 4"):
        analysis.gpu_load_info([1, 2, 3, 4], 3)
    with pytest.raises(UserError, match="does not cover"):
        analysis.gpu_load_info([1, 2, 3, 4], 1, devices=[[0, 1]])


CARD = analysis.Card(num_sms=4, copy_gbps=1000.0, dense_tflops=100.0, launch_us=1.0)


def timeline(made, tok_e, **knobs):
    problem = MoeProblem(num_experts=len(tok_e), N=512, K=1024)
    return analysis.timeline_info(problem, made.schedule(64, **knobs), tok_e, CARD)


@pytest.mark.parametrize(
    "knobs", [{}, {"persistent": True}, {"persistent": True, "tile_order": "dynamic"}, {"split_k": 2}], ids=str
)
def test_timeline_places_every_tile_once_and_overlaps_none(made, knobs):
    info = timeline(made, [64, 3, 0, 130, 200], **knobs)
    tiles = sorted(zip(info.block, info.column, strict=True))
    blocks = 1 + 1 + 3 + 4
    assert tiles == sorted((b, c) for b in range(blocks) for c in range(2) for _ in range(knobs.get("split_k", 1)))
    assert info.num_tiles == blocks * 2
    by_slot = {}
    for slot, start, end in sorted(zip(info.slot, info.start_us, info.end_us, strict=True)):
        assert start >= by_slot.get(slot, 0) - 1e-9
        by_slot[slot] = end
    assert max(info.end_us) == pytest.approx(info.simulated_us)
    assert 0 < info.busy_share <= 1


def test_stream_k_gives_every_slot_the_same_work(made):
    info = timeline(made, [64, 3, 0, 130, 200, 7], stream_k=True, persistent=True)
    ends = {}
    for slot, end in zip(info.slot, info.end_us, strict=True):
        ends[slot] = max(end, ends.get(slot, 0))
    assert len(ends) == 4
    assert max(ends.values()) == pytest.approx(min(ends.values()))
    assert info.busy_share == pytest.approx(1)
    plain = timeline(made, [64, 3, 0, 130, 200, 7])
    assert info.simulated_us <= plain.simulated_us * (1 + 1e-9)


def test_a_static_stride_is_never_faster_than_the_next_free_slot_on_even_tiles(made):
    stride = timeline(made, [64] * 6, persistent=True)
    free = timeline(made, [64] * 6)
    assert stride.simulated_us == pytest.approx(free.simulated_us)


def test_timeline_of_nothing(made):
    info = timeline(made, [0, 0])
    assert (info.num_tiles, info.slot, info.simulated_us) == (0, [], 1.0)


def test_timeline_error_is_reported(made, made_frame):
    info = analysis.timeline_error_info(made_frame)
    assert info.num_records == 32
    assert 0 <= info.median_absolute_error <= info.p90_absolute_error
    card = analysis.card_of(made_frame)
    row = analysis.candidates(made_frame).iloc[0].to_dict()
    one = analysis.timeline_of_row(row, card)
    assert one.error == pytest.approx(one.simulated_us / row["time_us"] - 1)
    with pytest.raises(UserError, match="measured ceilings"):
        analysis.card_of(made_frame[made_frame["kind"] != "ceiling"])


def test_analysis_needs_no_torch_and_no_figures():
    import subprocess
    import sys

    code = (
        "import sys, chord_lab.analysis, chord_lab.routing, chord_lab.scenarios;"
        "print([m for m in ('torch', 'triton', 'plotly', 'ipywidgets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

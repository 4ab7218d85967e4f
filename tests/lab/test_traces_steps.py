"""Where the time of a layer goes: exact sums over a made trace."""

import pytest
from captures import DECODE_LAYER, slicing, write_captures

from chord_lab.traces.captures import load_library
from chord_lab.traces.steps import OUTSIDE, layers_of, step_frame, time_answer


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return load_library(write_captures(tmp_path_factory.mktemp("nsight") / "nvidia_h200"))


def test_a_layer_is_its_steps_and_its_gaps(library):
    prefill, decode = layers_of(library.opening())
    assert (prefill.name, decode.name) == ("kimi-k2/ep8/prefill, 4096 rows", "kimi-k2/ep8/decode, 400 rows")
    assert decode.repeats == 3
    label = slicing("semi_static").label()
    steps = {step.name: step for step in decode.steps}
    assert list(steps) == ["routing", f"gate_up {label}", "SwiGLU", f"down {label}", "combine"]
    gate_up, down = steps[f"gate_up {label}"], steps[f"down {label}"]
    assert (gate_up.time_us, down.time_us) == (pytest.approx(DECODE_LAYER[0]), pytest.approx(DECODE_LAYER[1]))
    assert (steps["SwiGLU"].launches, steps["combine"].launches) == (4, 16)
    assert steps["SwiGLU"].time_us == pytest.approx(12.0)
    assert sum(step.time_us for step in decode.steps) + decode.gap_us == pytest.approx(decode.time_us)
    assert sum(step.share for step in decode.steps) + decode.gap_us / decode.time_us == pytest.approx(1.0)
    frame = step_frame([decode])
    assert frame["share"].sum() == pytest.approx(1.0)
    assert frame.loc[(decode.name, "(no kernel runs)"), "time_us"] == pytest.approx(decode.gap_us)


def test_the_answer_is_a_sentence_a_layer(library):
    first, second = time_answer(library.opening())
    assert first.startswith("kimi-k2/ep8/prefill, 4096 rows: ") and "gate_up 59%, down 32%" in first
    assert "of it no kernel runs" in second
    (alone,) = time_answer(library.counters["decode"])
    assert "6 kernels that were profiled one by one" in alone


def test_kernels_outside_any_range_are_a_layer_of_their_own(tmp_path):
    from test_traces_reading import torch_file

    from chord_lab.traces import read_trace

    (layer,) = layers_of(read_trace(torch_file(tmp_path / "t.json")))
    assert layer.name in (OUTSIDE, "step") and layer.time_us == 25.0 and layer.gap_us == pytest.approx(10.0)

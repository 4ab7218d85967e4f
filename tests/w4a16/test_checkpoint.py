"""Reading compressed-tensors checkpoints: right or refused, never reinterpreted."""

from __future__ import annotations

import copy

import pytest
import torch
from w4a16_moe import MoeProblem, get_profile, pack, pack_checkpoint, read_quantization_config
from w4a16_moe.layout.checkpoint import CheckpointWeight, decode, encode, unpack_words

PORTABLE = get_profile("portable")

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head"],
}


def weights(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
    scales = (torch.rand((*shape[:-1], shape[-1] // 32), generator=generator) + 0.01).to(torch.bfloat16)
    return codes, scales


def test_a_word_holds_eight_codes_low_nibble_first():
    word = torch.tensor([[0x76543210, -1985229329]], dtype=torch.int32)  # 0x89ABCDEF as int32
    assert unpack_words(word).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 15, 14, 13, 12, 11, 10, 9, 8]]


def test_three_dimensional_weights_round_trip():
    """The packers of MoE weights are 3-D: [E=2, N=4, K=64] (B58)."""
    codes, scales = weights(2, 4, 64)
    stored = encode(codes, scales)
    assert stored.weight_packed.shape == (2, 4, 8)
    back_codes, back_scales = decode(stored)
    assert torch.equal(back_codes, codes)
    assert torch.equal(back_scales, scales)
    with pytest.raises(ValueError, match="K=60 is not a multiple of 32"):
        encode(codes[..., :60], scales)


@pytest.mark.parametrize("profile", ["portable", "h200_tp8"])
def test_a_checkpoint_packs_like_its_codes(profile):
    codes, scales = weights(3, 128, 128)
    problem = MoeProblem(num_experts=3, N=128, K=128)
    direct = pack(codes, scales, problem, get_profile(profile))
    fused = pack_checkpoint(encode(codes, scales), problem, get_profile(profile))
    halves = pack_checkpoint(  # gate_proj and up_proj, expert by expert, as an open shard would give them
        lambda e: [encode(codes[e, part], scales[e, part]) for part in (slice(0, 64), slice(64, 128))],
        problem,
        get_profile(profile),
    )
    for packed in (fused, halves):
        assert torch.equal(packed.codes, direct.codes)
        assert torch.equal(packed.scales, direct.scales)


def test_layers_are_found_by_name_in_a_mapping():
    codes, scales = weights(8, 64)
    stored = encode(codes, scales)
    shard = {"experts.0.up_proj.weight_packed": stored.weight_packed, "experts.0.up_proj.weight_scale": scales}
    found = CheckpointWeight.from_tensors(shard, "experts.0.up_proj.")
    assert torch.equal(decode(found)[0], codes)
    with pytest.raises(ValueError, match=r"checkpoint lacks experts\.1\.up_proj\.weight_packed"):
        CheckpointWeight.from_tensors(shard, "experts.1.up_proj.")


def test_out_of_core_packing_holds_one_expert_at_a_time():
    codes, scales = weights(4, 64, 64)
    asked = []

    def read(expert):
        asked.append(expert)
        return encode(codes[expert], scales[expert])

    pack_checkpoint(read, MoeProblem(num_experts=4, N=64, K=64), PORTABLE)
    assert asked == [0, 1, 2, 3]


STORED = encode(*weights(4, 256))


@pytest.mark.parametrize(
    "changes, message",
    [
        # K=256 with 64 scale groups: the scale was not split with the weight (B52)
        (
            {"weight_scale": torch.ones((4, 64), dtype=torch.bfloat16)},
            r"weight_scale has 64 groups for K=256, group size 4; group size 32 needs 8 .*split along K",
        ),
        ({"weight_scale": torch.ones((4, 1), dtype=torch.bfloat16)}, r"one scale per row \(per-channel\)"),
        ({"weight_scale": torch.ones((2, 8), dtype=torch.bfloat16)}, r"has shape \[2, 8\]; the weight needs \[4, 8\]"),
        ({"weight_scale": torch.ones((4, 8))}, "weight_scale must be bfloat16, not float32"),
        # zero point 3: refused, never ignored (B56)
        ({"weight_zero_point": torch.full((1, 8), 3, dtype=torch.int32)}, "weight_zero_point: asymmetric weights"),
        ({"weight_g_idx": torch.arange(256).flip(0) // 32}, "weight_g_idx: activation order mixes the groups"),
        ({"weight_g_idx": torch.arange(128) // 32}, "weight_g_idx: activation order"),
        ({"weight_shape": torch.tensor([4, 250])}, "weight_shape says 4 x 250, weight_packed holds 4 x 256"),
        ({"weight_packed": STORED.weight_packed.long()}, "weight_packed must be int32"),
        (
            {"weight_packed": STORED.weight_packed[:, :5], "weight_shape": None},
            "K=40 is not a multiple of 32; nearest legal: 32 and 64",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tensors_that_do_not_fit_are_refused_in_one_line(changes, message):
    for use in (decode, lambda w: pack_checkpoint(lambda e: w, MoeProblem(num_experts=1, N=4, K=256), PORTABLE)):
        with pytest.raises(ValueError, match=message) as caught:
            use(STORED._replace(**changes))
        assert "\n" not in str(caught.value)


def test_a_g_idx_that_changes_nothing_is_accepted():
    for g_idx in (torch.arange(256, dtype=torch.int32) // 32, torch.full((256,), -1)):
        assert torch.equal(decode(STORED._replace(weight_g_idx=g_idx))[0], decode(STORED)[0])


# ---- quantization_config


def test_the_format_these_kernels_read_is_accepted_wherever_it_lies():
    for config in (
        CONFIG,
        {"model_type": "x", "quantization_config": CONFIG},
        {"text_config": {"quantization_config": CONFIG}},
        {"compression_config": CONFIG},
    ):
        read_quantization_config(config)


def changed(**changes):
    config = copy.deepcopy(CONFIG)
    for name, value in changes.items():
        target = config["config_groups"]["group_0"] if name == "input_activations" else config
        if name in (*WEIGHTS, "actorder"):
            target = config["config_groups"]["group_0"]["weights"]
        target[name] = value
    return config


@pytest.mark.parametrize(
    "config, message",
    [
        (changed(strategy="channel", group_size=None), r"strategy channel \(per-channel scales\): not this kernel"),
        (changed(strategy=None, group_size=None), "per-channel scales"),
        (changed(strategy="tensor", group_size=None), "strategy 'tensor': not this kernel"),
        (changed(group_size=128), "group_size 128: these kernels need 32"),
        (changed(symmetric=False), "asymmetric weights have zero points"),
        (changed(num_bits=8), "8-bit int weights: these kernels read 4-bit int"),
        (changed(type="float"), "4-bit float weights"),
        (changed(actorder="group"), "actorder 'group' needs weight_g_idx"),
        (changed(dynamic=True), "dynamic weights"),
        (changed(input_activations={"num_bits": 8}), "input_activations are quantised"),
        (changed(format="marlin-24"), "format 'marlin-24': only pack-quantized is read"),
        (changed(quant_method="gptq"), "quant_method 'gptq': only compressed-tensors"),
        (changed(config_groups={}), "quantization_config has no config_groups"),
        (changed(config_groups={"group_0": {"weights": None}}), r"config_groups\.group_0 has no weights section"),
        ({"model_type": "x"}, "no quantization_config"),
    ],
)
def test_other_formats_are_refused_in_one_line(config, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_quantization_config(config)
    assert "\n" not in str(caught.value)


def test_static_activation_order_needs_no_index_and_is_accepted():
    read_quantization_config(changed(actorder="weight"))
    read_quantization_config(changed(actorder=None))


@pytest.mark.parametrize("experts", [2, 8])
@pytest.mark.parametrize("name", ["weight_scale", "weight_g_idx"])
def test_another_number_of_experts_is_refused(name, experts):
    """Global scales beside one rank's weights would pack silently, and be right on the first rank alone (B52)."""
    codes, scales = weights(4, 64, 64)
    other = {
        "weight_scale": torch.ones((experts, 64, 2), dtype=torch.bfloat16),
        "weight_g_idx": torch.full((experts, 64), -1),
    }
    problem = MoeProblem(num_experts=4, N=64, K=64)
    with pytest.raises(ValueError, match=rf"{name} has shape \[{experts}, 64.*each of 4 experts"):
        pack_checkpoint(encode(codes, scales)._replace(**{name: other[name]}), problem, get_profile("portable"))

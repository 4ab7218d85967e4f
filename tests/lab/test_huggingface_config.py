import json

import pytest

from chord_lab.errors import UserError
from chord_lab.scenarios import find_quantization, model_config, read_config

MOE = {
    "model_type": "made_up",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 1024,
    "first_k_dense_replace": 1,
}


def weights(**changes):
    entry = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
    return entry | changes


def packed(group=None, **changes):
    group = {"targets": ["Linear"], "weights": weights(), "input_activations": None} | (group or {})
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    } | changes


def test_flat_config():
    config = model_config(MOE | {"quantization_config": packed()})
    m = config.require_w4a16()
    assert (m.num_experts, m.top_k, m.hidden, m.intermediate, m.num_moe_layers) == (16, 2, 256, 128, 5)
    assert config.quantization.label() == "pack-quantized int4 g32"


def test_quantization_inside_text_config_is_found():
    config = model_config(
        {
            "model_type": "outer",
            "text_config": MOE | {"quantization_config": packed()},
            "vision_config": {"hidden_size": 9},
        }
    )
    assert config.quantization.where == "text_config.quantization_config"
    assert config.quantization.why_not() is None
    assert config.require_w4a16().num_experts == 16


def test_quantization_beside_text_config_is_found():
    config = model_config({"text_config": MOE, "quantization_config": packed()})
    assert config.quantization.label() == "pack-quantized int4 g32"


def test_vision_tower_quantization_is_not_the_experts():
    config = model_config(MOE | {"vision_config": {"quantization_config": packed({"weights": weights(num_bits=8)})}})
    assert config.quantization.method == "none"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (packed({"weights": weights(strategy="channel", group_size=None)}), "per-channel scales: not this kernel"),
        (packed({"weights": {"num_bits": 4, "type": "int", "group_size": -1}}), "per-channel scales: not this kernel"),
        (packed({"weights": weights(strategy="tensor", group_size=None)}), "per-tensor scales: not this kernel"),
        (packed({"weights": weights(group_size=128)}), "group size 128: not this kernel"),
        (packed({"weights": weights(group_size=None)}), "group size not given"),
        (packed({"weights": weights(symmetric=False)}), "zero points"),
        (packed({"weights": weights(num_bits=8)}), "8-bit weights"),
        (packed({"weights": weights(type="float")}), "4-bit float weights"),
        (packed({"weights": weights(actorder="group")}), "needs g_idx"),
        (packed({"weights": weights(actorder=True)}), "needs g_idx"),
        (packed({"input_activations": {"num_bits": 8}}), "quantized activations"),
        (packed(format="int-quantized"), "format int-quantized"),
        (packed({"targets": ["Embedding"]}), "no config group covers the experts"),
        (packed(config_groups={}), "no config group covers the experts"),
        (packed(config_groups=[1]), "not understood"),
        (packed({"weights": "4"}), "not understood"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 weights: not this kernel"),
        ({"quant_method": "mxfp4"}, "mxfp4 weights: not this kernel"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, "awq weights: not this kernel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}, "needs g_idx"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "gptq packs codes along N"),
        ("int4", "expected an object, not str"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused_in_one_line(entry, reason):
    config = model_config(MOE | {"quantization_config": entry})
    with pytest.raises(UserError, match=reason) as caught:
        config.require_w4a16()
    assert "\n" not in str(caught.value)


def test_weight_act_order_needs_no_index_and_is_accepted():
    assert find_quantization({"quantization_config": packed({"weights": weights(actorder="weight")})}).why_not() is None


def test_experts_on_the_ignore_list_are_not_quantized():
    assert find_quantization({"quantization_config": packed(ignore=["re:.*experts.*"])}).method == "none"
    assert (
        find_quantization({"quantization_config": packed(ignore=["re:.*shared_experts.*", "lm_head"])}).why_not()
        is None
    )
    assert find_quantization({"quantization_config": packed(ignore=["re:("])}).why_not() is None  # a broken pattern


def test_a_quantization_file_of_its_own_is_refused_by_its_reason(tmp_path):
    path = tmp_path / "int4_config.json"
    path.write_text(
        json.dumps(packed({"weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "tensor"}}))
    )
    with pytest.raises(UserError, match="zero points"):
        read_config(path)


def test_family_names():
    mixtral = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
    }
    assert model_config(mixtral).model.intermediate == 128
    assert any("intermediate_size is taken" in note for note in model_config(mixtral).notes)
    qwen = {k: v for k, v in MOE.items() if k not in ("n_routed_experts", "first_k_dense_replace")}
    qwen |= {"num_experts": 4, "mlp_only_layers": [0, 5], "decoder_sparse_step": 1}
    assert model_config(qwen).model.num_moe_layers == 4
    every_second = {**qwen, "mlp_only_layers": [], "interleave_moe_layer_step": 2}
    assert model_config(every_second).model.num_moe_layers == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not readable JSON"),
        (b"{", "not readable JSON"),
        (b"\xff\xfe{}", "not readable JSON"),
        (b"[1]", "expected an object, not list"),
        (b"{}", "no mixture of experts"),
        (json.dumps({"hidden_size": 64, "intermediate_size": 256}).encode(), "no mixture of experts"),
        (json.dumps(MOE | {"hidden_size": "256"}).encode(), "hidden_size must be a whole number"),
        (json.dumps(MOE | {"moe_intermediate_size": [128, 64]}).encode(), "moe_intermediate_size must be"),
        (json.dumps(MOE | {"num_experts_per_tok": 17}).encode(), "top_k=17 is more than its 16 experts"),
        (json.dumps(MOE | {"n_routed_experts": True}).encode(), "n_routed_experts must be a whole number"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, content, reason):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_read_by_its_config_and_named_after_itself(tmp_path):
    folder = tmp_path / "Some-Org--Some.Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MOE))
    assert read_config(folder).model.name == "some.model"

"""A Hugging Face config.json as a `ModelShape`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chord_lab.errors import UserError
from chord_lab.scenarios.models import ModelShape
from chord_lab.scenarios.quantization import Quantization, find_quantization

# One idea under the names that model families gave it, most specific first.
_NAMES = {
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_routed_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "intermediate": ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "intermediate_size"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
}
_UNGATED = ("relu", "relu2", "gelu_pytorch_tanh_ungated")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a config file says of its MoE layers."""

    model: ModelShape
    quantization: Quantization
    path: str
    notes: tuple[str, ...] = ()  # what was assumed, one line each

    def require_w4a16(self) -> ModelShape:
        """The model, if its checkpoint is one that these kernels read, or is not quantized at all.

        Raises:
            UserError: one line naming what does not fit.
        """
        reason = self.quantization.why_not()
        if reason:
            raise UserError(f"{self.path}: {reason}")
        return self.model


def read_config(path: str | Path) -> ModelConfig:
    """Read a config.json, or a directory that holds one.

    Raises:
        UserError: not readable, not a model config, no experts in it, or a size that makes no sense.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a model config: expected an object, not {type(config).__name__}")
    return model_config(config, str(path))


def model_config(config: dict[str, Any], path: str = "config") -> ModelConfig:
    """The same from the parsed document."""
    quantization = find_quantization(config)
    part, where = _part_with_experts(config)
    if part is None:
        if quantization.method != "none" and not _has(config, "hidden"):
            reason = quantization.why_not() or "it describes weights only"
            raise UserError(f"{path}: {reason} (and no model config: no hidden_size in it)")
        raise UserError(
            f"{path}: no mixture of experts in it; looked for {', '.join(_NAMES['num_experts'])} in all parts"
        )
    notes = [f"experts are described in {where}"] if where else []
    values = {name: _number(part, name, path) for name in _NAMES}
    if not any(key in part for key in _NAMES["intermediate"][:-1]):
        notes.append("no moe_intermediate_size: intermediate_size is taken as one expert's width")
    layers = _num_moe_layers(part, values["num_layers"])
    if quantization.method == "none":
        notes.append("checkpoint is not quantized: shapes as if it were int4, group 32")
    shared = part.get("n_shared_experts")
    try:
        model = ModelShape(
            name=_model_name(part, config, path),
            num_experts=values["num_experts"],
            top_k=values["top_k"],
            hidden=values["hidden"],
            intermediate=values["intermediate"],
            num_moe_layers=layers,
            gated=str(part.get("hidden_act") or part.get("hidden_activation") or "silu").lower() not in _UNGATED,
            num_shared_experts=shared if isinstance(shared, int) else 0,
            source=path,
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return ModelConfig(model=model, quantization=quantization, path=path, notes=tuple(notes))


def _has(part: dict[str, Any], name: str) -> bool:
    return any(part.get(key) is not None for key in _NAMES[name])


def _part_with_experts(config: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The part of a nested config that describes the experts, and its path; the top level is tried first."""
    candidates = [(config, "")] + [
        (value, key) for key, value in config.items() if isinstance(value, dict) and key.endswith(("_config", "config"))
    ]
    candidates += [
        (inner, f"{where}.{key}")
        for part, where in candidates[1:]
        for key, inner in part.items()
        if isinstance(inner, dict) and key.endswith("_config")
    ]
    for part, where in candidates:
        if _has(part, "num_experts") and _has(part, "hidden"):
            return part, where
    return None, ""


def _number(part: dict[str, Any], name: str, path: str) -> int:
    for key in _NAMES[name]:
        value = part.get(key)
        if value is None:
            continue
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise UserError(f"{path}: {key} must be a whole number of at least 1, not {value!r}")
        return value
    raise UserError(f"{path}: none of {', '.join(_NAMES[name])} is given")


def _num_moe_layers(part: dict[str, Any], num_layers: int) -> int:
    """Layers with routed experts, after the dense ones that each family names in its own way."""
    moe = range(num_layers)

    def every(key: str) -> int:
        value = part.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1

    first = part.get("first_k_dense_replace")
    first = first if isinstance(first, int) and not isinstance(first, bool) else 0
    dense = part.get("mlp_only_layers")
    dense = set(dense) if isinstance(dense, list) else set()
    sparse = [
        layer
        for layer in moe
        if layer >= first
        and layer not in dense
        and layer % every("moe_layer_freq") == 0
        and (layer + 1) % every("decoder_sparse_step") == 0
        and (layer + 1) % every("interleave_moe_layer_step") == 0
    ]
    return max(1, len(sparse))


def _model_name(part: dict[str, Any], config: dict[str, Any], path: str) -> str:
    """A name fit for a scenario: from the file's own, else the family's."""
    stem = Path(path).stem
    name = Path(path).parent.name if stem == "config" else stem.removesuffix("_config")
    name = name or str(config.get("model_type") or part.get("model_type") or "model")
    return re.sub(r"[^a-z0-9.]+", "-", name.split("--")[-1].lower()).strip("-") or "model"

"""Is a checkpoint's quantization the one that these kernels read: INT4, code - 8, one bf16 scale per 32 of K?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from chord_lab.scenarios.shards import GROUP_SIZE

# What an expert's weight is called in checkpoints; `ignore` and `targets` patterns are tried on it.
_EXPERT_NAMES = ("model.layers.30.mlp.experts.0.gate_proj", "model.layers.30.block_sparse_moe.experts.0.w1")
_CONFIG_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a checkpoint stores its experts' weights."""

    method: str  # compressed-tensors, gptq, awq, fp8, mxfp4, ...; none: plain bf16
    where: str = ""  # path of the entry inside the config: text_config.quantization_config
    format: str = ""
    bits: int | None = None
    kind: str = ""  # int | float
    strategy: str = ""  # group | channel | tensor | block ...
    group_size: int | None = None
    symmetric: bool | None = None
    actorder: str = ""
    quantized_inputs: bool = False
    problem: str = ""  # the entry could not be understood: why

    def why_not(self) -> str | None:
        """One line saying why these kernels cannot read it; None if they can (or if nothing is quantized)."""
        if self.method == "none":
            return None
        if self.problem:
            return f"{self.where}: {self.problem}"
        checks = (
            (self.method not in ("compressed-tensors", "gptq"), f"{self.method} weights: not this kernel"),
            (self.kind == "float", f"{self.bits}-bit float weights: not this kernel"),
            (self.bits is not None and self.bits != 4, f"{self.bits}-bit weights: not this kernel"),
            (self.symmetric is False, "asymmetric (zero points): not this kernel, whose value is code - 8"),
            (self.strategy == "channel", "per-channel scales: not this kernel"),
            (self.strategy == "tensor", "per-tensor scales: not this kernel"),
            (self.strategy not in ("", "group"), f"{self.strategy} scales: not this kernel"),
            (self.group_size != GROUP_SIZE, f"group size {_text(self.group_size)}: not this kernel"),
            (self.actorder not in ("", "weight", "static"), f"act-order {self.actorder} needs g_idx: not this kernel"),
            (self.quantized_inputs, "quantized activations: not this kernel, whose activations are bf16"),
            (self.method == "gptq", "gptq packs codes along N, in another order: convert to compressed-tensors first"),
            (self.format != "pack-quantized", f"format {_text(self.format or None)}: not this kernel"),
        )
        legal = f"legal: compressed-tensors pack-quantized int4, symmetric, strategy group, group_size {GROUP_SIZE}"
        return next((f"{reason}; {legal}" for fails, reason in checks if fails), None)

    def label(self) -> str:
        """``pack-quantized int4 g32``; ``bf16`` when nothing is quantized."""
        if self.method == "none":
            return "not quantized"
        scale = f"g{self.group_size}" if self.group_size else self.strategy
        return " ".join(
            x for x in (self.format or self.method, f"{self.kind}{self.bits}" if self.bits else "", scale) if x
        )


def _text(value: Any) -> str:
    return "not given" if value is None else str(value)


def find_quantization(config: dict[str, Any]) -> Quantization:
    """The quantization of a model config, wherever it stands (top, text_config, deeper); method none if nowhere."""
    found = list(_search(config, ""))
    if not found and {"quant_method", "config_groups"} & set(config):
        found = [("", config)]  # the file is a quantization config of its own
    if not found:
        return Quantization(method="none")
    where, entry = found[0]
    if not isinstance(entry, dict):
        return Quantization(method="unknown", where=where, problem=f"expected an object, not {type(entry).__name__}")
    try:
        return _read(where or "config", entry)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        return Quantization(
            method=str(entry.get("quant_method", "unknown")), where=where, problem=f"not understood: {error}"
        )


def _search(node: Any, path: str, depth: int = 0) -> Any:
    """(path, entry) of each quantization config, nearest to the top first."""
    if not isinstance(node, dict) or depth > 4:
        return
    for key in _CONFIG_KEYS:
        if node.get(key):
            yield f"{path}{key}", node[key]
    for key, value in node.items():
        if key not in _CONFIG_KEYS and isinstance(value, dict) and "vision" not in key and "audio" not in key:
            yield from _search(value, f"{path}{key}.", depth + 1)


def _read(where: str, entry: dict[str, Any]) -> Quantization:
    method = str(entry.get("quant_method") or ("compressed-tensors" if "config_groups" in entry else "unknown")).lower()
    if method == "compressed-tensors":
        return _read_compressed_tensors(where, entry)
    if method in ("gptq", "awq", "auto-round"):
        group = entry.get("group_size")
        zero = bool(entry.get("zero_point")) or entry.get("sym") is False
        return Quantization(
            method=method,
            where=where,
            bits=_whole(entry.get("bits") or entry.get("w_bit")),
            kind="int",
            strategy="channel" if group == -1 else "group",
            group_size=_whole(group),
            symmetric=not zero,
            actorder="group" if entry.get("desc_act") else "",
        )
    return Quantization(method=method, where=where, format=str(entry.get("fmt") or entry.get("format") or ""))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_compressed_tensors(where: str, entry: dict[str, Any]) -> Quantization:
    groups = entry.get("config_groups") or {}
    if any(_matches(pattern) for pattern in entry.get("ignore") or ()):
        return Quantization(method="none", where=where)  # experts are left in bf16
    chosen = [g for g in groups.values() if any(t == "Linear" or _matches(t) for t in g.get("targets") or ())]
    if not chosen:
        return Quantization(method="compressed-tensors", where=where, problem="no config group covers the experts")
    weights = [g.get("weights") or {} for g in chosen]
    if any(w != weights[0] for w in weights):
        return Quantization(method="compressed-tensors", where=where, problem="experts are stored in more than one way")
    w = weights[0]
    group_size, strategy = _whole(w.get("group_size")), w.get("strategy")
    if strategy is None:  # the format's own rule: a group size means groups, -1 means channels
        strategy = "group" if group_size and group_size > 0 else "channel" if group_size == -1 else "tensor"
    actorder = w.get("actorder")
    return Quantization(
        method="compressed-tensors",
        where=where,
        format=str(chosen[0].get("format") or entry.get("format") or ""),
        bits=_whole(w.get("num_bits")),
        kind=str(w.get("type") or ""),
        strategy=str(strategy),
        group_size=group_size,
        symmetric=bool(w.get("symmetric", True)),
        actorder="" if not actorder else "group" if actorder is True else str(actorder),
        quantized_inputs=any(g.get("input_activations") for g in chosen),
    )


def _matches(pattern: Any) -> bool:
    """Does a compressed-tensors target (a name, a class, ``re:...``) cover an expert's weight?"""
    text = str(pattern)
    if not text.startswith("re:"):
        return text in _EXPERT_NAMES
    try:
        return any(re.match(text[3:], name) for name in _EXPERT_NAMES)
    except re.error:
        return False

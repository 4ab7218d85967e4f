"""Weights as compressed-tensors stores them ("pack-quantized"), to codes and scales or straight to a profile's layout.

    weight_packed   int32 [N, K/8]    eight codes along K, low nibble first, code = value + 8
    weight_scale    bf16  [N, K/32]   one scale per 32 consecutive k
    weight_shape    int   [2]         N, K
    weight_zero_point, weight_g_idx   asymmetric weights and activation order: what these kernels do not compute

or the same with a leading expert dimension. Whatever does not fit is refused in one line, never reinterpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..packed import PackedWeights
from ..problem import MoeProblem
from ..profiles import Profile
from . import ExpertWeights, pack_experts

GROUP_SIZE = 32
CODES_PER_WORD = 8
DECODED_ROWS = 128  # rows whose codes are in the clear at once


class CheckpointWeight(NamedTuple):
    """The tensors of one quantised linear layer, 2-D, or of all experts of a projection, 3-D."""

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_shape: torch.Tensor | Sequence[int] | None = None
    weight_zero_point: torch.Tensor | None = None
    weight_g_idx: torch.Tensor | None = None

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> CheckpointWeight:
        """Pick ``{prefix}weight_packed`` and the rest from a mapping such as an open safetensors shard."""
        names = [prefix + name for name in cls._fields]
        for name in names[:2]:
            if name not in tensors:
                raise ValueError(f"checkpoint lacks {name}; a pack-quantized layer has weight_packed and weight_scale")
        return cls(*(tensors[name] if name in tensors else None for name in names))  # type: ignore[arg-type]


def read_quantization_config(config: Mapping[str, Any]) -> None:
    """Accept a model's quantization_config (or a config.json that holds one) if these kernels can run it.

    Legal: compressed-tensors, pack-quantized, 4-bit symmetric integer weights in groups of 32, bf16 activations, no
    activation order. Anything else raises ValueError with one line that names the field.
    """
    section = _find_section(config)
    method = section.get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        raise ValueError(f"quant_method {method!r}: only compressed-tensors checkpoints are read")
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("quantization_config has no config_groups")
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise ValueError(f"config_groups.{name} has no weights section")
        form = group.get("format") or section.get("format")
        if form not in ("pack-quantized", None):
            raise ValueError(f"format {form!r}: only pack-quantized is read")
        reason = _why_not_weights(group["weights"]) or _why_not_activations(group.get("input_activations"))
        if reason:
            raise ValueError(f"config_groups.{name}: {reason}")


def decode(weight: CheckpointWeight) -> ExpertWeights:
    """Codes uint8 ``[..., N, K]`` and scales bf16 ``[..., N, K/32]`` of a checked layer."""
    _check(weight)
    return unpack_words(weight.weight_packed), weight.weight_scale


def encode(codes: torch.Tensor, scales: torch.Tensor) -> CheckpointWeight:
    """The inverse of `decode`: codes uint8 ``[..., N, K]`` with K a multiple of 32."""
    if codes.shape[-1] % GROUP_SIZE:
        raise ValueError(f"K={codes.shape[-1]} is not a multiple of {GROUP_SIZE}")
    words = codes.unflatten(-1, (-1, CODES_PER_WORD)).to(torch.int64)
    shifts = 4 * torch.arange(CODES_PER_WORD, device=codes.device)
    packed = (words << shifts).sum(dim=-1)  # 0 .. 2^32 - 1
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return CheckpointWeight(packed, scales, codes.shape[-2:])


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """int32 ``[..., K/8]`` to codes uint8 ``[..., K]``, low nibble first."""
    pairs = words.contiguous().view(torch.uint8)  # a word's bytes from its low end: two codes each
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def pack_checkpoint(
    source: CheckpointWeight | Callable[[int], CheckpointWeight | Sequence[CheckpointWeight]],
    problem: MoeProblem,
    profile: Profile,
    device: torch.device | str | None = None,
) -> PackedWeights:
    """Pack a projection for a profile, expert by expert.

    ``source`` holds all experts (3-D tensors), or is called with each local expert's index and returns its layer, or
    several to stack along N: gate_proj and up_proj for a gate_up problem. The callable may read each expert from disk
    when asked: never more than one is in memory beside the packed layer. ``device`` is where experts are packed and
    stay.
    """

    def rows(expert: int) -> Iterator[ExpertWeights]:
        if isinstance(source, CheckpointWeight):
            parts: Sequence[CheckpointWeight] = (_expert(source, expert, problem.num_experts),)
        else:
            given = source(expert)
            parts = (given,) if isinstance(given, CheckpointWeight) else given
        for part in parts:
            try:
                _check(part)
            except ValueError as error:
                raise ValueError(f"expert {expert}: {error}") from None
            for words, scale in zip(
                part.weight_packed.split(DECODED_ROWS), part.weight_scale.split(DECODED_ROWS), strict=True
            ):
                yield unpack_words(words if device is None else words.to(device)), scale

    return pack_experts(rows, problem, profile, device)


def _expert(weight: CheckpointWeight, expert: int, num_experts: int) -> CheckpointWeight:
    if weight.weight_packed.dim() != 3 or weight.weight_packed.shape[0] != num_experts:
        shape = list(weight.weight_packed.shape)
        raise ValueError(f"weight_packed of all experts must be [{num_experts}, N, K/8], not {shape}")
    zero_point, g_idx = weight.weight_zero_point, weight.weight_g_idx
    of_experts = {"weight_scale": weight.weight_scale}
    if g_idx is not None and g_idx.dim() == 2:
        of_experts["weight_g_idx"] = g_idx
    for name, tensor in of_experts.items():
        if tensor.shape[0] != num_experts:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; it needs one entry for each of {num_experts} experts"
            )
    if g_idx is not None and g_idx.dim() == 2:
        g_idx = g_idx[expert]
    return CheckpointWeight(
        weight.weight_packed[expert], weight.weight_scale[expert], weight.weight_shape, zero_point, g_idx
    )


def _check(weight: CheckpointWeight) -> None:
    packed, scale = weight.weight_packed, weight.weight_scale
    if packed.dtype != torch.int32 or packed.dim() not in (2, 3):
        raise ValueError(
            f"weight_packed must be int32 [N, K/8] or [E, N, K/8], not {packed.dtype} {list(packed.shape)}"
        )
    if weight.weight_zero_point is not None:
        raise ValueError("weight_zero_point: asymmetric weights; these kernels compute value = code - 8")
    if scale.dtype != torch.bfloat16:
        raise ValueError(f"weight_scale must be bfloat16, not {str(scale.dtype).removeprefix('torch.')}")
    N, K = packed.shape[-2], packed.shape[-1] * CODES_PER_WORD
    if weight.weight_shape is not None:
        shape = [int(n) for n in weight.weight_shape][-2:]
        if shape != [N, K]:
            raise ValueError(f"weight_shape says {shape[0]} x {shape[1]}, weight_packed holds {N} x {K}")
    if K % GROUP_SIZE:
        below = K - K % GROUP_SIZE
        raise ValueError(f"K={K} is not a multiple of {GROUP_SIZE}; nearest legal: {below or 32} and {below + 32}")
    _check_scale_shape(scale, (*packed.shape[:-1], K // GROUP_SIZE), K)
    _check_order(weight.weight_g_idx, K)


def _check_scale_shape(scale: torch.Tensor, expected: tuple[int, ...], K: int) -> None:
    if tuple(scale.shape) == expected:
        return
    groups = scale.shape[-1] if scale.dim() else 1
    if tuple(scale.shape[:-1]) != expected[:-1]:
        raise ValueError(f"weight_scale has shape {list(scale.shape)}; the weight needs {list(expected)}")
    if groups == 1:
        raise ValueError(
            f"weight_scale has one scale per row (per-channel): these kernels need one per {GROUP_SIZE} of K"
        )
    size = f"{K // groups}" if K % groups == 0 else f"{K / groups:.2f}"
    raise ValueError(
        f"weight_scale has {groups} groups for K={K}, group size {size}; group size {GROUP_SIZE} needs "
        f"{expected[-1]} (was the scale split along K with the weight?)"
    )


def _check_order(g_idx: torch.Tensor | None, K: int) -> None:
    """g_idx is harmless where it says what is true without it: k belongs to group k // 32 (or -1: never set)."""
    if g_idx is None or g_idx.numel() == 0 or bool((g_idx == -1).all()):
        return
    plain = torch.arange(K, device=g_idx.device) // GROUP_SIZE
    if g_idx.numel() != K or not torch.equal(g_idx.reshape(-1).long(), plain):
        raise ValueError(
            "weight_g_idx: activation order mixes the groups along K; these kernels need k in group k // 32"
        )


def _find_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization_config itself, or the one inside a config.json (at its top, or in text_config)."""
    if "config_groups" in config or "quant_method" in config:
        return config
    for holder in (config, config.get("text_config")):
        if isinstance(holder, Mapping):
            section = holder.get("quantization_config") or holder.get("compression_config")
            if isinstance(section, Mapping):
                return section
    raise ValueError("no quantization_config: the weights are not quantised")


def _why_not_weights(weights: Mapping[str, Any]) -> str | None:
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if bits != 4 or kind != "int":
        return f"{bits}-bit {kind} weights: these kernels read 4-bit int"
    if weights.get("symmetric") is not True:
        return "symmetric is not true: asymmetric weights have zero points, these kernels compute value = code - 8"
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel" or (strategy is None and size in (None, -1)):
        return "strategy channel (per-channel scales): not this kernel, it needs one scale per 32 of K"
    if strategy not in ("group", None):
        return f"strategy {strategy!r}: not this kernel, it needs group"
    if size != GROUP_SIZE:
        return f"group_size {size}: these kernels need {GROUP_SIZE}"
    if weights.get("actorder") in ("group", "dynamic", True):
        return f"actorder {weights['actorder']!r} needs weight_g_idx: these kernels need k in group k // 32"
    if weights.get("dynamic"):
        return "dynamic weights: the codes are not stored"
    return None


def _why_not_activations(activations: Any) -> str | None:
    if activations is None:
        return None
    return "input_activations are quantised: these kernels take bf16 activations"

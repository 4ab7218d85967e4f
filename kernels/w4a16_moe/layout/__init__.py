"""Weight layouts: how one projection's codes and scales lie in memory.

A layout is a module with four functions, chosen by `Profile.layout`:

- ``tensor_specs(problem) -> TensorSpecs``: shapes and dtypes of a packed layer;
- ``why_not(problem) -> str | None``: the reason why this layout cannot hold the problem;
- ``pack_expert(codes, scales) -> (codes, scales)``: one expert, uint8 ``[N, K]`` (0..15) and bf16 ``[N, K/32]`` in;
- ``unpack_expert(codes, scales) -> (codes, scales)``: the exact inverse (K may come back padded; `unpack` cuts it).

Packing goes expert by expert, so that its peak stays one expert above the packed layer itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import NamedTuple, Protocol, cast

import torch

from ..packed import PackedWeights
from ..problem import MoeProblem
from ..profiles import Profile

# A kernel may read a code as a bf16 subnormal and move the difference into the scale (times 2^113, or 2^-17 for the
# zero point): inside this range every step stays a normal bf16 number, so dequantisation is exact to its one
# rounding.
MIN_SCALE = 2.0**-105
MAX_SCALE = 2.0**14


class TensorSpecs(NamedTuple):
    """Shapes and dtypes of a packed layer."""

    codes_shape: tuple[int, ...]
    codes_dtype: torch.dtype
    scales_shape: tuple[int, ...]
    scales_dtype: torch.dtype


class Layout(Protocol):
    """What a layout module offers; see the package's docstring."""

    tensor_specs: Callable[[MoeProblem], TensorSpecs]
    why_not: Callable[[MoeProblem], str | None]
    pack_expert: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    unpack_expert: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


# What `pack` accepts for all experts: (codes [E, N, K], scales [E, N, K/32]), or expert after expert.
ExpertWeights = tuple[torch.Tensor, torch.Tensor]


def get_layout(name: str) -> Layout:
    """The layout module of that name (`rows`, `fragment64`)."""
    try:
        module: ModuleType = importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise ValueError(f"layout {name!r} is not part of this build of w4a16_moe") from None
    return cast(Layout, module)


def pack(codes: torch.Tensor, scales: torch.Tensor, problem: MoeProblem, profile: Profile) -> PackedWeights:
    """Pack codes uint8 ``[E, N, K]`` (0..15, value = code - 8) and scales bf16 ``[E, N, K/32]`` for a profile.

    Raises ValueError, in one line, for a shape, dtype, code or scale that does not fit.
    """
    _require(codes, "codes", (problem.num_experts, problem.N, problem.K), torch.uint8)
    _require(scales, "scales", (problem.num_experts, problem.N, problem.num_groups), torch.bfloat16)
    return pack_experts(zip(codes, scales, strict=True), problem, profile, device=codes.device)


def pack_experts(
    experts: Iterable[ExpertWeights] | Callable[[int], ExpertWeights],
    problem: MoeProblem,
    profile: Profile,
    device: torch.device | str | None = None,
) -> PackedWeights:
    """Pack expert after expert from an iterable, or from ``experts(index)``: never more than one expert in the clear.

    Each expert is (codes uint8 ``[N, K]``, scales bf16 ``[N, K/32]``), on any device; ``device`` is where the packed
    layer lives (the first expert's device when None).
    """
    layout = _layout_for(problem, profile)
    specs = TensorSpecs(*layout.tensor_specs(problem))
    source: Iterator[ExpertWeights]
    source = (experts(i) for i in range(problem.num_experts)) if callable(experts) else iter(experts)
    packed_codes = packed_scales = None
    count = 0
    for count, (codes, scales) in enumerate(source, start=1):
        if count > problem.num_experts:
            raise ValueError(f"more than num_experts={problem.num_experts} experts were given to pack")
        _require(codes, f"codes of expert {count - 1}", (problem.N, problem.K), torch.uint8)
        _require(scales, f"scales of expert {count - 1}", (problem.N, problem.num_groups), torch.bfloat16)
        _require_values(codes, scales, count - 1)
        if packed_codes is None or packed_scales is None:
            device = codes.device if device is None else torch.device(device)
            packed_codes = torch.empty(specs.codes_shape, dtype=specs.codes_dtype, device=device)
            packed_scales = torch.empty(specs.scales_shape, dtype=specs.scales_dtype, device=device)
        expert_codes, expert_scales = layout.pack_expert(codes, scales)
        packed_codes[count - 1].copy_(expert_codes)
        packed_scales[count - 1].copy_(expert_scales)
    if count < problem.num_experts or packed_codes is None or packed_scales is None:
        raise ValueError(f"{count} experts were given to pack; the problem has num_experts={problem.num_experts}")
    return PackedWeights(problem=problem, profile=profile, codes=packed_codes, scales=packed_scales)


def unpack(packed: PackedWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[E, N, K]`` and scales bf16 ``[E, N, K/32]`` of a packed layer: the exact inverse of `pack`."""
    problem = packed.problem
    shape = (problem.num_experts, problem.N)
    codes = torch.empty((*shape, problem.K), dtype=torch.uint8, device=packed.codes.device)
    scales = torch.empty((*shape, problem.num_groups), dtype=torch.bfloat16, device=packed.codes.device)
    for expert in range(problem.num_experts):
        codes[expert], scales[expert] = unpack_expert(packed, expert)
    return codes, scales


def unpack_expert(packed: PackedWeights, expert: int) -> ExpertWeights:
    """Codes uint8 ``[N, K]`` and scales bf16 ``[N, K/32]`` of one expert."""
    layout = get_layout(packed.profile.layout)
    codes, scales = layout.unpack_expert(packed.codes[expert], packed.scales[expert])
    return codes[:, : packed.problem.K], scales[:, : packed.problem.num_groups]


def why_not(problem: MoeProblem, profile: Profile) -> str | None:
    """Why a profile's layout cannot hold a problem; None if it can."""
    if problem.group_size != 32:
        return f"group_size={problem.group_size}: every layout here is built for groups of 32 along K"
    return get_layout(profile.layout).why_not(problem)


def _layout_for(problem: MoeProblem, profile: Profile) -> Layout:
    reason = why_not(problem, profile)
    if reason:
        raise ValueError(f"profile {profile.name} (layout {profile.layout}) cannot hold this problem: {reason}")
    return get_layout(profile.layout)


def _require(tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {_describe(shape, dtype)}, not {_describe(tensor.shape, tensor.dtype)}")


def _describe(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"


def _require_values(codes: torch.Tensor, scales: torch.Tensor, expert: int) -> None:
    """Codes are nibbles and scales are in range: what no kernel could report later."""
    largest = int(codes.max())
    if largest > 15:
        raise ValueError(f"codes of expert {expert} go up to {largest}; a 4-bit code is 0..15")
    magnitude = scales.abs()
    outside = scales[~((magnitude == 0) | ((magnitude >= MIN_SCALE) & (magnitude <= MAX_SCALE)))]
    if outside.numel():
        raise ValueError(
            f"scales of expert {expert} hold {float(outside[0]):g}; legal are 0 and magnitudes from 2^-105 to 2^14"
        )

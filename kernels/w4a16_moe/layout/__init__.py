"""Weight layouts: how one projection's codes and scales lie in memory.

A layout is a module with four functions, chosen by `Profile.layout`:

- ``tensor_specs(problem) -> TensorSpecs``: shapes and dtypes of a packed layer;
- ``why_not(problem) -> str | None``: the reason why this layout cannot hold the problem;
- ``pack_expert(codes, scales) -> (codes, scales)``: one expert, uint8 ``[N, K]`` (0..15) and bf16 ``[N, K/32]`` in;
- ``unpack_expert(codes, scales) -> (codes, scales)``: the exact inverse (K may come back padded; `unpack` cuts it).

Packing goes expert by expert, a few hundred rows at a time, so that little is in memory beside the packed layer itself.
`pack_expert` takes any multiple of 64 rows (and all of them, whatever their number).
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


ExpertWeights = tuple[torch.Tensor, torch.Tensor]  # codes uint8 [rows, K], scales bf16 [rows, K/32]
ExpertSource = ExpertWeights | Iterable[ExpertWeights]  # one expert, or its rows in pieces

PIECE_ROWS = 64  # rows that every layout can place on their own
PIECE_CODES = 2**19  # codes packed at once: bounds the temporaries, some of which are int32


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
    experts: Iterable[ExpertSource] | Callable[[int], ExpertSource],
    problem: MoeProblem,
    profile: Profile,
    device: torch.device | str | None = None,
) -> PackedWeights:
    """Pack expert after expert from an iterable, or from ``experts(index)``: never more than one expert in the clear.

    Each expert is (codes uint8 ``[N, K]``, scales bf16 ``[N, K/32]``), or an iterator of such pairs to stack along N,
    on any device. ``device`` is where experts are packed and where the packed layer lives (the first piece's device
    when None). Peak memory beside the packed layer: one expert as given, and the temporaries of a few hundred rows.
    """
    layout = _layout_for(problem, profile)
    specs = TensorSpecs(*layout.tensor_specs(problem))
    source: Iterator[ExpertSource]
    source = (experts(i) for i in range(problem.num_experts)) if callable(experts) else iter(experts)
    packed: ExpertWeights | None = None
    count = 0
    for count, expert in enumerate(source, start=1):
        if count > problem.num_experts:
            raise ValueError(f"more than num_experts={problem.num_experts} experts were given to pack")
        row = 0
        for codes, scales in _pieces(expert, problem, count - 1):
            if packed is None:
                where = codes.device if device is None else torch.device(device)
                packed = (
                    torch.empty(specs.codes_shape, dtype=specs.codes_dtype, device=where),
                    torch.empty(specs.scales_shape, dtype=specs.scales_dtype, device=where),
                )
            where = packed[0].device
            for whole, part in zip(packed, layout.pack_expert(codes.to(where), scales.to(where)), strict=True):
                _place(whole[count - 1], part, row, codes.shape[0], problem.N)
            row += codes.shape[0]
        if row != problem.N:
            raise ValueError(f"expert {count - 1} has {row} rows of codes; the problem has N={problem.N}")
    if count < problem.num_experts or packed is None:
        raise ValueError(f"{count} experts were given to pack; the problem has num_experts={problem.num_experts}")
    return PackedWeights(problem=problem, profile=profile, codes=packed[0], scales=packed[1])


def _pieces(expert: ExpertSource, problem: MoeProblem, index: int) -> Iterator[ExpertWeights]:
    """An expert's rows in checked pieces of a few hundred, all but the last a multiple of 64."""
    rows = max(PIECE_ROWS, PIECE_CODES // problem.K // PIECE_ROWS * PIECE_ROWS)
    rest: ExpertWeights | None = None
    taken = 0
    for part in [expert] if isinstance(expert, tuple) else expert:
        codes, scales = part
        taken += codes.shape[0]
        if taken > problem.N:
            raise ValueError(f"expert {index} has at least {taken} rows of codes; the problem has N={problem.N}")
        _require(codes, f"codes of expert {index}", (codes.shape[0], problem.K), torch.uint8)
        _require(scales, f"scales of expert {index}", (codes.shape[0], problem.num_groups), torch.bfloat16)
        if rest is not None:
            codes, scales = torch.cat((rest[0], codes)), torch.cat((rest[1], scales))
        whole = codes.shape[0] // PIECE_ROWS * PIECE_ROWS
        for first in range(0, whole, rows):
            piece = slice(first, min(first + rows, whole))
            yield _checked(codes[piece], scales[piece], index)
        rest = (codes[whole:], scales[whole:]) if whole < codes.shape[0] else None
    if rest is not None:
        yield _checked(*rest, index)


def _place(whole: torch.Tensor, part: torch.Tensor, row: int, num_rows: int, N: int) -> None:
    """Copy the packed form of rows ``row`` on into an expert's: rows lie along the one axis where the two differ."""
    if num_rows == N:
        whole.copy_(part)
        return
    axis = next(i for i, (large, small) in enumerate(zip(whole.shape, part.shape, strict=True)) if large != small)
    whole.narrow(axis, row * part.shape[axis] // num_rows, part.shape[axis]).copy_(part)


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


def _checked(codes: torch.Tensor, scales: torch.Tensor, expert: int) -> ExpertWeights:
    """The piece itself; codes are nibbles and scales are in range: what no kernel could report later."""
    largest = int(codes.max())
    if largest > 15:
        raise ValueError(f"codes of expert {expert} go up to {largest}; a 4-bit code is 0..15")
    magnitude = scales.abs()
    outside = scales[~((magnitude == 0) | ((magnitude >= MIN_SCALE) & (magnitude <= MAX_SCALE)))]
    if outside.numel():
        raise ValueError(
            f"scales of expert {expert} hold {float(outside[0]):g}; legal are 0 and magnitudes from 2^-105 to 2^14"
        )
    return codes, scales

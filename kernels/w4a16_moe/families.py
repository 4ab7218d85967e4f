"""Kernel families: where each device schedule lives. A new one is a line here and a module with the functions below.

A family's module offers, and may import torch and triton:

- ``launch(x, packed, routing, schedule, out, top_k) -> None``: no check, no host synchronisation (`gemm` checks);
- ``compile_spec(schedule, problem, top_k) -> offline.CompileSpec``: what Triton needs to compile it with no GPU.

Its rules module offers ``RULES: tuple[legality.Rule, ...]`` and imports neither.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple


class Family(NamedTuple):
    """Where a kernel's code and its legality rules are, relative to this package."""

    module: str
    rules: str


FAMILIES: dict[str, Family] = {
    "portable": Family(".portable", ".portable_rules"),
    "mma_sync": Family(".hopper.decode", ".hopper.rules"),
    "wgmma": Family(".hopper.prefill", ".hopper.rules"),
}


def kernel_module(kernel: str) -> ModuleType:
    """The module with a family's ``launch`` and ``compile_spec``."""
    return _load(kernel, FAMILIES[kernel].module)


def rules_module(kernel: str) -> ModuleType:
    """The module with a family's ``RULES``."""
    return _load(kernel, FAMILIES[kernel].rules)


def _load(kernel: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name, __package__)
    except ModuleNotFoundError as error:
        if not (__package__ + name).startswith(error.name or "?"):
            raise  # something the module needs is missing, not the module
        raise ValueError(f"kernel {kernel} is not part of this build of w4a16_moe") from None

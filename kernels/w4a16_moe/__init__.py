"""W4A16 mixture-of-experts GEMMs: INT4 weights (group-32, bf16 scales), bf16 activations, one kernel per schedule.

What describes work (problem, schedule, profile, device, tables) loads no torch and no triton; the names that compute
load them on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .block_m import BlockMModel
from .devices import DEVICES, Device, device_slug
from .legality import Illegality, why_illegal
from .problem import MoeProblem
from .profiles import PROFILES, Profile, get_profile
from .resolve import Resolved, resolve_schedule
from .schedule import Schedule

if TYPE_CHECKING:
    from .gemm import indexed_gemm
    from .grouped import build_m_indices, check_m_indices
    from .grouped_gemm import grouped_contiguous_gemm, grouped_masked_gemm
    from .layout import pack, pack_experts, unpack
    from .layout.checkpoint import pack_checkpoint, read_quantization_config
    from .moe import moe_layer
    from .offline import CompileFacts, compile_facts, occupancy
    from .packed import PackedWeights
    from .reference import gemm_reference, relative_error
    from .routing import align_to_blocks
    from .routing_blocks import Routing

# public name -> module that defines it, loaded on first use because it imports torch or triton
_LAZY = {
    "CompileFacts": ".offline",
    "PackedWeights": ".packed",
    "Routing": ".routing_blocks",
    "align_to_blocks": ".routing",
    "build_m_indices": ".grouped",
    "check_m_indices": ".grouped",
    "compile_facts": ".offline",
    "gemm_reference": ".reference",
    "grouped_contiguous_gemm": ".grouped_gemm",
    "grouped_masked_gemm": ".grouped_gemm",
    "indexed_gemm": ".gemm",
    "moe_layer": ".moe",
    "occupancy": ".offline",
    "pack": ".layout",
    "pack_checkpoint": ".layout.checkpoint",
    "pack_experts": ".layout",
    "read_quantization_config": ".layout.checkpoint",
    "relative_error": ".reference",
    "unpack": ".layout",
}

__all__ = [
    "DEVICES",
    "PROFILES",
    "BlockMModel",
    "CompileFacts",
    "Device",
    "Illegality",
    "MoeProblem",
    "PackedWeights",
    "Profile",
    "Resolved",
    "Routing",
    "Schedule",
    "align_to_blocks",
    "build_m_indices",
    "check_m_indices",
    "compile_facts",
    "device_slug",
    "gemm_reference",
    "get_profile",
    "grouped_contiguous_gemm",
    "grouped_masked_gemm",
    "indexed_gemm",
    "moe_layer",
    "occupancy",
    "pack",
    "pack_checkpoint",
    "pack_experts",
    "read_quantization_config",
    "relative_error",
    "resolve_schedule",
    "unpack",
    "why_illegal",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})

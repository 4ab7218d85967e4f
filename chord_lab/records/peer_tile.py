"""A peer's configuration in one short line: much of a lead can be its tile, so every ratio names it."""

from __future__ import annotations

import json
from typing import Any

MOST_CHARS = 60  # of a configuration in a form not known here
SWITCHES = {"use_stream_k": "stream_k", "use_tma": "tma", "use_warp_spec": "warp_spec"}  # the ones that matter for time


def tile_text(config: str) -> str:
    """``mma 8x128x64 warp 8x64x32 s4 c4 stream_k`` from a peer's JSON configuration; other text as it is, cut.

    Tiles are tokens x columns x reduction as in our own labels; s: stages, c: CTAs per SM.
    """
    try:
        values = json.loads(config)
        return _text(values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        plain = " ".join(str(config).split())
        return plain if len(plain) <= MOST_CHARS else plain[: MOST_CHARS - 3] + "..."


def _text(values: dict[str, Any]) -> str:
    parts = [str(values["mma_type"])] if values.get("mma_type") else []
    parts.append("x".join(str(int(v)) for v in values["block_shape"]))
    if values.get("warp_shape"):
        parts.append("warp " + "x".join(str(int(v)) for v in values["warp_shape"]))
    parts += [f"s{values['num_stages']}"] if values.get("num_stages") else []
    parts += [f"c{values['num_ctas_per_sm']}"] if (values.get("num_ctas_per_sm") or 1) > 1 else []
    return " ".join([*parts, *(word for name, word in SWITCHES.items() if values.get(name) is True)])

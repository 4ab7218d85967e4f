"""Schedules as typed on a command line: ``default``, a label, or changes to the default."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, get_args

from w4a16_moe.schedule import Dequant, Kernel, Schedule, TokenSlicing

from chord_lab.errors import UserError

HOW = "default, a label such as 'wgmma 64x256x64 w8 s4', changes such as block_m=64,token_slicing=dynamic, or JSON"
_COUNTS = {"w": "num_warps", "s": "num_stages", "c": "ctas_per_sm", "g": "group_m", "k": "split_k"}
_FLAGS = {"swap": "swap_ab", "stream_k": "stream_k", "persistent": "persistent"}


def parse_schedule(text: str, default: Schedule) -> Schedule:
    """The schedule that a command line names. Raises UserError that says which part is wrong and what is legal."""
    text = text.strip()
    if text == "default":
        return default
    try:
        if text.startswith("{"):
            return replace(default, **_known(json.loads(text)))
        if "=" in text:
            return replace(default, **_known(dict(_assignment(part) for part in text.split(","))))
        return _from_label(text)
    except (ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"--schedule {text!r}: {(str(error).splitlines() or ['not a schedule'])[0]}; legal: {HOW}"
        ) from None


def _known(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError("the JSON is no object")
    names = list(Schedule.__dataclass_fields__)
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ValueError(f"unknown field {', '.join(unknown)} (known: {', '.join(names)})")
    return values


def _assignment(part: str) -> tuple[str, Any]:
    name, _, value = (piece.strip() for piece in part.partition("="))
    words: dict[str, Any] = {"true": True, "false": False}
    if value.lower() in words:
        return name, words[value.lower()]
    return name, int(value) if re.fullmatch(r"-?\d+", value) else value


def _from_label(text: str) -> Schedule:
    """The inverse of `Schedule.label`."""
    kernel, *words = text.split()
    if kernel not in get_args(Kernel):
        raise ValueError(f"{kernel!r} is no kernel ({', '.join(get_args(Kernel))})")
    values: dict[str, Any] = {"kernel": kernel}
    for word in words:
        tile = re.fullmatch(r"(\d+)x(\d+)x(\d+)", word)
        count = re.fullmatch(r"([wscgk])(\d+)", word)
        if tile:
            values |= dict(zip(("block_m", "block_n", "block_k"), map(int, tile.groups()), strict=True))
        elif count:
            values[_COUNTS[count[1]]] = int(count[2])
        elif word in _FLAGS:
            values[_FLAGS[word]] = True
        elif word == "queue":
            values["tile_order"] = "dynamic"
        elif word in get_args(TokenSlicing):
            values["token_slicing"] = word
        elif word in get_args(Dequant):
            values["dequant"] = word
        else:
            raise ValueError(f"{word!r} is no part of a label")
    return Schedule(**values)

"""What a record's columns may hold: a line of a journal that another hand changed must not take the others with it."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args, get_type_hints

from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.records.record import CompileFacts, Environment, Method, Record, RoutingRef

_LISTS = {"times_us": float, "rounds": int, "sm_mhz": float, "power_w": float, "tok_e": int}
_WIDE = ("seed", "work_bytes", "work_flops", "peak_memory_bytes")  # whole numbers of 64 bits; the others have 32
_OF_ROUTING = ("routing_num_tokens", "routing_num_experts", "routing_top_k")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def check_types(row: dict[str, Any]) -> None:
    """Refuse the first value of another type than its column, or one that it has no room for, with a ValueError."""
    for name, kind in _columns().items():
        value = row.get(name)
        if value is not None and not _fits(value, kind, name):
            raise ValueError(f"{name} must be {_WORDS[kind]}, not {value!r:.40}")
    for name, kind in _LISTS.items():
        value = row.get(name)
        if value is not None and not _list_fits(value, kind, name):
            raise ValueError(f"{name} must be a list of numbers, not {value!r:.40}")


def _list_fits(value: Any, kind: type, name: str) -> bool:
    if not isinstance(value, (list, tuple)):
        return False
    if name == "times_us":  # a list a repeat; a NaN was written as null
        return all(isinstance(times, (list, tuple)) and all(_fits(t, kind, name) for t in times) for times in value)
    return all(_fits(v, kind, name) and (name != "tok_e" or v >= 0) for v in value)


def _fits(value: Any, kind: type, name: str) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is int:
        most = 1 << (63 if name in _WIDE else 31)
        return isinstance(value, int) and -most <= value < most
    return isinstance(value, (int, float) if kind is float else kind)


@cache
def _columns() -> dict[str, type]:
    """Scalar columns and their types."""
    found: dict[str, type] = dict.fromkeys(("format", *_OF_ROUTING), int)
    for part in (RoutingRef, MoeProblem, Schedule, Environment, Method, CompileFacts, Record):
        for name, hint in get_type_hints(part).items():
            kind = _kind_of(hint)
            if kind is not None and name not in _LISTS:
                found[name] = kind
    return found


def _kind_of(hint: Any) -> type | None:
    """The scalar behind a field's annotation: optional, or one word of several; None for anything else."""
    options = [hint, *get_args(hint)]
    for kind in (bool, int, float, str):
        if kind in options:
            return kind
    words = get_args(hint)
    return str if words and all(isinstance(word, str) for word in words) else None

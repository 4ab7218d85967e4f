"""Numbers and units as Nsight Compute prints them, in any locale.

``223,008`` is 223008 in one locale and 223.008 in another. Which one a file uses is learnt from the whole file: a value
such as ``1.234,56`` or ``0,8`` can be read in one way only. Without such a witness the English way is taken and said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

ABSENT_WORDS = {"", "n/a", "na", "none", "no data", "(!) n/a", "nan", "-nan", "nan(ind)", "-nan(ind)", "null"}
GROUP_SPACES = " \u00a0\u202f\u2009'\u2019\u02bc_"  # blanks and apostrophes group thousands, never start a fraction
_SHAPE = re.compile(r"[+-]?\d[\d.,]*(?:[eE][+-]?\d+)?")


@dataclass(frozen=True)
class Numerals:
    """A file's way of writing numbers."""

    decimal: str  # "." or ","
    certain: bool  # False: no value of the file tells, the English way is assumed

    def number(self, text: str) -> float | None:
        """The value; None for "n/a" and its like. Raises ValueError for what is no number."""
        bare = _bare(text)
        if bare in ABSENT_WORDS:
            return None
        if bare in ("inf", "+inf", "-inf", "infinity"):
            return math.copysign(math.inf, -1 if bare[0] == "-" else 1)
        if not _SHAPE.fullmatch(bare):
            raise ValueError(f"{text!r} is not a number")
        group = "," if self.decimal == "." else "."
        whole, _, fraction = bare.partition(self.decimal)
        if group in fraction or self.decimal in fraction or not _grouped(whole, group):
            raise ValueError(f"{text!r} is not a number whose decimal sign is {self.decimal!r}")
        return float(bare.replace(group, "").replace(self.decimal, "."))


def learn_numerals(texts: Iterable[str]) -> Numerals:
    """The decimal sign that the values of one file show. Raises ValueError when they contradict each other."""
    witness: dict[str, str] = {}
    ambiguous = False
    for text in texts:
        bare = _bare(text)
        if ("," not in bare and "." not in bare) or not _SHAPE.fullmatch(bare):
            continue
        signs = _decimals_possible(bare)
        if len(signs) == 1:
            witness.setdefault(signs[0], text.strip())
        ambiguous = ambiguous or len(signs) == 2
    if len(witness) == 2:
        raise ValueError(
            f"{witness['.']!r} has a decimal point and {witness[',']!r} a decimal comma: "
            "one file, two ways of writing numbers"
        )
    if witness:
        return Numerals(next(iter(witness)), certain=True)
    return Numerals(".", certain=not ambiguous)


def _bare(text: str) -> str:
    bare = text.strip().lower().rstrip("%").strip()
    if re.fullmatch(rf"[+-]?\d{{1,3}}([{GROUP_SPACES}]\d{{3}})+([.,]\d*)?", bare):
        return re.sub(f"[{GROUP_SPACES}]", "", bare)
    return bare


def _grouped(whole: str, group: str) -> bool:
    """Groups of three, or of two before the last one (Indian English); no group sign at all is fine."""
    first, *rest = whole.lstrip("+-").split(group)
    if not rest:
        return True
    return 1 <= len(first) <= 3 and len(rest[-1]) == 3 and all(len(r) in (2, 3) for r in rest[:-1])


def _decimals_possible(bare: str) -> list[str]:
    """The decimal signs under which the text is a number: both for ``223,008``, none for ``580.65.06``."""
    mantissa = re.split("[eE]", bare)[0].lstrip("+-")
    if re.match(r"0[.,]", mantissa):  # no group of thousands starts with a lone zero
        return [mantissa[1]]
    possible = []
    for sign, group in ((".", ","), (",", ".")):
        whole, _, fraction = mantissa.partition(sign)
        if group not in fraction and sign not in fraction and _grouped(whole, group):
            possible.append(sign)
    return possible


# Unit spellings of Nsight Compute 2019 to 2026, by lower case: (base unit, factor)
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_WORDS: dict[str, tuple[str, float]] = {
    "ns": ("ns", 1.0),
    "nsecond": ("ns", 1.0),
    "nanosecond": ("ns", 1.0),
    "us": ("ns", 1e3),
    "µs": ("ns", 1e3),
    "μs": ("ns", 1e3),
    "usecond": ("ns", 1e3),
    "microsecond": ("ns", 1e3),
    "ms": ("ns", 1e6),
    "msecond": ("ns", 1e6),
    "millisecond": ("ns", 1e6),
    "s": ("ns", 1e9),
    "second": ("ns", 1e9),
    "sec": ("ns", 1e9),
}
_PLURALS = {
    "cycles": "cycle",
    "bytes": "byte",
    "insts": "inst",
    "sectors": "sector",
    "warps": "warp",
    "threads": "thread",
}
_COUNTED = ("byte", "cycle", "inst", "sector", "warp", "thread", "request", "block", "hz", "b")


def base_unit(unit: str) -> tuple[str, float]:
    """``("byte/s", 1e9)`` for ``Gbyte/s``: the base unit and the factor that brings a value to it.

    Times become ns, sizes byte, rates byte/s and hz; a unit that is not known stays as it is, with factor 1.
    """
    text = unit.strip()
    lower = text.lower()
    if lower in _WORDS:
        return _WORDS[lower]
    top, slash, bottom = lower.partition("/")
    bottom = {"second": "s", "sec": "s", "nsecond": "ns", "usecond": "us", "msecond": "ms"}.get(bottom, bottom)
    per = {"ns": 1e9, "us": 1e6, "ms": 1e3}.get(bottom)
    top_unit, factor = _scaled(top)
    if top_unit is None:
        return text, 1.0
    if per is not None:
        bottom, factor = "s", factor * per
    if top_unit in ("cycle", "hz") and bottom == "s":
        return "hz", factor
    return f"{top_unit}{slash}{bottom}", factor


def _scaled(word: str) -> tuple[str | None, float]:
    singular = _PLURALS.get(word, word)
    for counted in _COUNTED:
        prefix = singular[: -len(counted)] if singular.endswith(counted) else None
        if prefix is not None and prefix in _PREFIXES:
            name = "byte" if counted == "b" else counted
            return name, _PREFIXES[prefix]
    return None, 1.0

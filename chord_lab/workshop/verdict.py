"""What a self-check says."""

from __future__ import annotations

import html
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Verdict(NamedTuple):
    """The judgement of one answer: it says what is off, never what would be right."""

    ok: bool
    lines: tuple[str, ...]  # one for each part that is off, or what the answer shows when all is right

    def __str__(self) -> str:
        return "\n".join(
            [("Right. " if self.ok else "Not yet. ") + (self.lines[0] if self.lines else ""), *self.lines[1:]]
        )

    def _repr_html_(self) -> str:
        mark, colour = ("&#10003; Right.", "#009E73") if self.ok else ("&#10007; Not yet.", "#D55E00")
        items = "".join(f"<li>{html.escape(line)}</li>" for line in self.lines)
        style = f"border-left:4px solid {colour};padding-left:.8em"
        return f"<div role='status' style='{style}'><b>{mark}</b><ul>{items}</ul></div>"


def judge(problems: Sequence[str], shown: str) -> Verdict:
    """Right when no problem was found."""
    return Verdict(not problems, tuple(problems) or (shown,))


def missing_parts(answer: Any, names: Sequence[str]) -> list[str]:
    """Lines for what keeps an answer from being judged at all."""
    if not isinstance(answer, Mapping):
        return [f"the answer must be a dict with {', '.join(names)}, not {type(answer).__name__}"]
    problems = [f"{name} is missing" for name in names if name not in answer]
    problems += [f"{name} is still open (None)" for name in names if name in answer and answer[name] is None]
    unknown = sorted(str(name) for name in answer if name not in names)
    return problems + [f"{name} is not asked for; expected {', '.join(names)}" for name in unknown]


def is_near(value: Any, truth: float, *, relative: float = 0.0, absolute: float = 0.0) -> bool:
    """Whether a learner's number is the true one, within what rounding explains."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    if math.isinf(truth) or math.isinf(value):
        return bool(value == truth)
    return abs(float(value) - truth) <= max(abs(truth) * relative, absolute)

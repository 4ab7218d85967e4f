"""Plain JSON from dataclasses, tuples, enums, paths, numpy scalars."""

from __future__ import annotations

import dataclasses
import enum
import math
import pathlib
from typing import Any


def jsonable(value: Any) -> Any:
    """`value` in JSON types; NaN and infinities become null, because JSON has neither."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return jsonable(value._asdict())
    if isinstance(value, enum.Enum):
        return jsonable(value.value)
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(v) for v in value]
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

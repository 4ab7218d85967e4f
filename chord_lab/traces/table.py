"""The one table that every profile becomes, and what comes with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

NVTX_SEPARATOR = " > "  # outermost range first

# What a kernel row says, whoever recorded it. A missing value is NaN / <NA>, never 0.
KERNEL_COLUMNS: dict[str, Any] = {
    "name": "category",  # demangled where the file has it
    "start_us": "float64",  # from the first event of the file
    "time_us": "float64",  # of one launch; the mean in a summary
    "launches": "int32",  # 1, or the launches that a summary row stands for
    "grid": "category",  # "396x1x1": CTAs
    "block": "category",  # "128x1x1": threads
    "registers": "Int32",  # per thread
    "smem_bytes": "Int64",  # static + dynamic, per CTA, without what the driver reserves
    "device_index": "Int16",
    "stream": "Int64",
    "correlation": "Int64",
    "nvtx": "category",  # ranges open on the launching thread, joined by NVTX_SEPARATOR
}
METRIC_COLUMNS = ("kernel", "metric", "value", "unit", "text")
NVTX_COLUMNS = ("name", "start_us", "end_us", "time_us", "depth", "path", "thread", "domain")


@dataclass(frozen=True)
class Trace:
    """What a profile file says: kernels in one shape, plus notes of what the file lacks."""

    kind: str  # ncu-report, ncu-csv-raw, nsys-sqlite, torch-profiler, ...
    path: Path
    device: str | None  # as the driver reports it; several are joined by ", "
    kernels: pd.DataFrame  # KERNEL_COLUMNS, in order of start where the file has one
    nvtx: pd.DataFrame  # NVTX_COLUMNS: NVTX ranges, or a PyTorch profile's annotations
    metrics: pd.DataFrame  # METRIC_COLUMNS: `kernel` is a row of `kernels`; values in base units
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # tool, version, schema, rank: what the file tells of itself
    identity: tuple[dict[str, Any] | None, ...] = ()  # per kernel the record that it belongs to; () when none is known

    def metrics_of(self, kernel: int) -> dict[str, dict[str, Any]]:
        """``{metric: {"value": number or text, "unit": base unit}}`` of one row of `kernels`."""
        rows = self.metrics[self.metrics["kernel"] == kernel]
        return {
            str(m): {"value": v if t is None else t, "unit": str(u)}
            for m, v, u, t in zip(rows["metric"], rows["value"], rows["unit"], rows["text"], strict=True)
        }


def kernel_frame(columns: dict[str, Any]) -> pd.DataFrame:
    """A kernel table in its fixed columns and types; columns that the file lacks are empty.

    ``columns`` holds equally long arrays, categoricals or lists (of floats for whole numbers, NaN = absent).
    """
    import pandas as pd

    unknown = set(columns) - set(KERNEL_COLUMNS)
    if unknown:
        raise ValueError(f"not columns of a kernel table: {sorted(unknown)}")
    length = len(next(iter(columns.values()))) if columns else 0
    built = {}
    for name, dtype in KERNEL_COLUMNS.items():
        values = columns.get(name)
        if values is None:
            values = _absent(name, dtype, length)
        elif dtype.startswith("Int") and isinstance(values, list):
            values = _whole_numbers(values, dtype)
        built[name] = pd.Series(values, copy=False).astype(dtype)
    return pd.DataFrame(built)


def _absent(name: str, dtype: str, length: int) -> Any:
    import numpy as np
    import pandas as pd

    if name == "launches":
        return np.ones(length, dtype="int32")
    if dtype == "category":
        return pd.Categorical.from_codes(np.full(length, -1, dtype="int8"), categories=pd.Index([], dtype=object))
    if dtype == "float64":
        return np.full(length, np.nan)
    return nullable(np.zeros(length, "int64"), np.ones(length, "bool"), dtype)


def _whole_numbers(values: list[float], dtype: str) -> Any:
    """Floats of a text file as integers; a fraction or a number that does not fit is damage, hence absent."""
    import numpy as np

    floats = np.asarray(values, dtype="float64")
    limit = min(np.iinfo(dtype.lower()).max, 2**53)  # floats hold whole numbers exactly up to there
    good = np.isfinite(floats) & (np.abs(floats) <= limit)
    good &= np.where(good, floats, 0.5) % 1 == 0
    return nullable(np.where(good, floats, 0), ~good, dtype)


def nullable(values: np.ndarray, absent: np.ndarray, dtype: str) -> Any:
    """An integer column with <NA> where ``absent``; no detour over float, which loses digits past 2**53."""
    import pandas as pd

    return pd.arrays.IntegerArray(values.astype(dtype.lower()), absent.astype(bool))


def metric_frame(rows: list[tuple[int, str, float, str, str | None]]) -> pd.DataFrame:
    """The long metric table of ``(kernel row, metric, value, unit, text)``."""
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(METRIC_COLUMNS))
    return frame.astype({"kernel": "int32", "value": "float64", "metric": "category", "unit": "category"}).assign(
        text=frame["text"].astype(object).where(frame["text"].notna(), None)
    )


def nvtx_frame(columns: dict[str, Any] | None = None) -> pd.DataFrame:
    """A range table in its fixed columns; None gives an empty one."""
    import pandas as pd

    return pd.DataFrame(columns or {name: [] for name in NVTX_COLUMNS}, columns=list(NVTX_COLUMNS))


def dims(x: int, y: int, z: int) -> str:
    """``396x1x1``: one spelling of a grid or a block."""
    return f"{x}x{y}x{z}"


def plausible(time_us: float) -> float:
    """A kernel's time, NaN for what none can take: negative, or beyond all numbers (a damaged cell)."""
    return time_us if 0 <= time_us < math.inf else math.nan


def shorten(name: str, most: int) -> str:
    """A name in at most so many characters: kernels that differ in their last words alone still look different."""
    if len(name) <= most:
        return name
    tail = most // 2 - 2
    return f"{name[: most - 3 - tail]}...{name[len(name) - tail :]}"


def parse_dims(text: str) -> str | None:
    """``(128, 1, 1)``, ``[128,1,1]``, ``128x1x1`` or ``128`` -> ``128x1x1``; None when it is neither."""
    import re

    numbers = re.findall(r"\d+", text)
    if not 1 <= len(numbers) <= 3 or not re.fullmatch(r"[\s(\[]*\d+(?:[\s,x]+\d+)*[\s)\]]*", text):
        return None
    return dims(*(int(n) for n in [*numbers, "1", "1"][:3]))  # type: ignore[call-arg]

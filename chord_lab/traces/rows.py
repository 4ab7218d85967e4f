"""A trace as plain rows, for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from chord_lab.traces.table import Trace

BLOCK = 50_000  # rows turned into Python objects at a time


def kernel_rows(trace: Trace, limit: int = 0) -> Iterator[dict[str, Any]]:
    """Kernels one by one: grid and block as three numbers, absent values None, metrics by name with their unit."""
    metrics = _metrics_by_kernel(trace)
    for index, row in enumerate(_blocks(trace.kernels, limit)):
        for side in ("grid", "block"):
            row[side] = [int(size) for size in row[side].split("x")] if row[side] else None
        if trace.identity:
            row["identity"] = trace.identity[index]
        yield row | {"metrics": metrics.get(index, {})}


def range_rows(trace: Trace, limit: int = 0) -> Iterator[dict[str, Any]]:
    """NVTX ranges and annotations one by one."""
    yield from _blocks(trace.nvtx, limit)


def _blocks(frame: pd.DataFrame, limit: int) -> Iterator[dict[str, Any]]:
    import pandas as pd

    stop = min(len(frame), limit) if limit else len(frame)
    for at in range(0, stop, BLOCK):
        part = frame.iloc[at : min(at + BLOCK, stop)]
        plain = part.astype(object).where(part.notna(), None)
        yield from ({str(k): None if v is pd.NA else v for k, v in row.items()} for row in plain.to_dict("records"))


def _metrics_by_kernel(trace: Trace) -> dict[int, dict[str, dict[str, Any]]]:
    found: dict[int, dict[str, dict[str, Any]]] = {}
    rows = trace.metrics
    for kernel, name, value, unit, text in zip(
        rows["kernel"], rows["metric"].astype(str), rows["value"], rows["unit"].astype(str), rows["text"], strict=True
    ):
        found.setdefault(int(kernel), {})[name] = {"value": value if text is None else text, "unit": unit}
    return found

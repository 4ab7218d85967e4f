"""Which record a kernel belongs to: the innermost range around a launch of ours names the record's key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from chord_lab.traces.table import NVTX_SEPARATOR

KEY_PREFIX = "record "  # `measurement.profiled` and `measurement.layer_trace` write it


def key_in_path(path: Any) -> str | None:
    """The record key that a kernel's NVTX path ends with; None for other kernels."""
    last = path.split(NVTX_SEPARATOR)[-1] if isinstance(path, str) else ""
    return last.removeprefix(KEY_PREFIX) if last.startswith(KEY_PREFIX) else None


def kernel_identity(paths: Iterable[Any], rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, ...]:
    """Each kernel's row of ``rows`` (by their ``key``), None where it has none; () when no kernel has one."""
    by_key = {str(row["key"]): dict(row) for row in rows}
    if not by_key:
        return ()
    found = tuple(by_key.get(key_in_path(path) or "") for path in paths)
    return found if any(found) else ()

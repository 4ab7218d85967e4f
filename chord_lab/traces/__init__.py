"""Profiles of Nsight Compute, Nsight Systems and the PyTorch profiler, read into one kernel table.

`read_trace` tells by a file's content what it is; everything else is refused in one line that says what it is instead.
"""

from __future__ import annotations

from chord_lab.traces.reading import read_trace
from chord_lab.traces.table import KERNEL_COLUMNS, NVTX_SEPARATOR, Trace

__all__ = ["KERNEL_COLUMNS", "NVTX_SEPARATOR", "Trace", "read_trace"]

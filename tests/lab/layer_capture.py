"""A made PyTorch trace of whole layers, in the shape that Kineto writes on a GPU: what `layer_trace` records there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from w4a16_moe.schedule import Schedule

from chord_lab.records.attempt import Candidate, Point

TOP_K = 8
CLOCK = 5133164031215.413  # Kineto counts microseconds from its baseTimeNanoseconds
CPU = {"pid": 4242, "tid": 4242}


class _Kineto:
    """Events of one host thread that launches into stream 7 of GPU 0."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "ts": CLOCK, "pid": 4242, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler",
             "ts": CLOCK, "dur": 9e4, "args": {"Op count": 0}},
        ]  # fmt: skip
        self.host = self.gpu = CLOCK
        self.number = 0

    def launch(self, name: str, time_us: float, *, triton: bool = False, grid: int = 132, kind: str = "kernel") -> None:
        """An operator, its launch and the kernel: 6 us of the host, then on the GPU as soon as that is free."""
        self.number += 1
        ids = {"External id": self.number, "correlation": self.number}
        call = ("cuda_driver", "cuLaunchKernelEx") if triton else ("cuda_runtime", "cudaLaunchKernel")
        if kind == "gpu_memset":
            call = ("cuda_runtime", "cudaMemsetAsync")
        begin = max(self.host + 5.0, self.gpu + 1.0)
        args = {"device": 0, "context": 1, "stream": 7, **ids}
        if kind == "kernel":
            args |= {"registers per thread": 128, "shared memory": 53248, "grid": [grid, 1, 1], "block": [128, 1, 1]}
        gpu = {"pid": 0, "tid": 7}
        self.add("cpu_op", "aten::op", self.host, 6.0, CPU, {"External id": self.number})
        self.add(*call, self.host + 2.0, 2.5, CPU, {"cbid": 211, **ids})
        self.add(kind, name, begin, time_us, gpu, args)
        flow = {"id": self.number, "cat": "ac2g", "name": "ac2g"}
        self.events.append({"ph": "s", **flow, **CPU, "ts": self.host + 2.0})
        self.events.append({"ph": "f", **flow, **gpu, "ts": begin, "bp": "e"})
        self.host += 6.0
        self.gpu = begin + time_us

    def span(self, name: str, since: float, inset: float = 0.0) -> None:
        """An annotation from ``since`` until now, on the host and, as Kineto does, on the GPU; inner ones inset."""
        self.add("user_annotation", name, since + inset, self.host - since - 2 * inset, CPU, {})
        self.add("gpu_user_annotation", name, since + 5.0, self.host - since, {"pid": 0, "tid": 7}, {})

    def add(self, cat: str, name: str, ts: float, dur: float, place: dict[str, int], args: dict[str, Any]) -> None:
        """One complete event."""
        event = {"ph": "X", "cat": cat, "name": name, "ts": round(ts, 3), "dur": round(dur, 3), **place, "args": args}
        self.events.append(event)


def write_layers(path: Path, layers: list[tuple[Point, Point, Schedule, float, float]], rows: list[Any]) -> Path:
    """``layers``: gate_up, down, the schedule of both, their times; three repeats of each. ``rows``: of the records."""
    out = _Kineto()
    for gate_up, down, schedule, *times in layers:
        for _ in range(3):
            _layer(out, (gate_up, down), schedule, times)
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000}],
        "chord_lab_records": rows,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1790857026000000000,
        "traceEvents": out.events,
        "traceName": str(path),
    }
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        json.dump(document, stream)
    return path


def _layer(out: _Kineto, points: tuple[Point, Point], schedule: Schedule, times: list[float]) -> None:
    began = step = out.host
    out.launch("Memset (Device)", 1.2, kind="gpu_memset")
    out.launch("_align_in_one_launch_kernel", 5.5, triton=True, grid=1)
    out.span("routing", step)
    for point, time_us in zip(points, times, strict=True):
        step = out.host
        out.launch(f"{schedule.kernel}_kernel", time_us, triton=True, grid=396)
        out.span(f"record {Candidate(schedule=schedule, default=True).key_at(point)}", step, inset=0.4)
        out.span(f"{point.projection} {schedule.label()}", step)
        if point.projection == "gate_up":
            step = out.host
            for name in ("direct_copy", "silu", "mul", "direct_copy"):
                out.launch(f"void at::native::vectorized_elementwise_kernel<4, {name}>", 3.0)
            out.span("SwiGLU", step)
    step = out.host
    for _ in range(TOP_K):
        out.launch("void at::native::elementwise_kernel<128, 2, where>", 2.0)
        out.launch("void at::native::vectorized_elementwise_kernel<4, addcmul>", 2.2)
    out.span("combine", step)
    out.span(f"{points[0].scenario}, {points[0].routed_m} rows", began)

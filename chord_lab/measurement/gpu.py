"""What only a GPU can do: events around launches, L2 cleared in between, graph replay, clocks, ceilings.

The only module that times on a CUDA device. It runs in the measuring process (`bench.Bench`).
"""

from __future__ import annotations

import platform
import statistics
from typing import Any

import torch

from chord_lab.measurement.launch import Launch
from chord_lab.measurement.memory import FLUSH_BYTES
from chord_lab.measurement.nvml import Nvml
from chord_lab.measurement.serve import Fatal
from chord_lab.measurement.versions import kernels_hash, peer_versions, ptxas_version

MOST_LAUNCHES = 400  # of one repeat
LEAST_LAUNCHES = 5
COPY_BYTES = 2 * 2**30
DENSE = 8192


class GpuTimer:
    """Times launches on the one CUDA device that this process sees."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device is visible to this process")
        self.device = "cuda"
        torch.cuda.set_device(0)
        self.nvml = Nvml.of_current_device()
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._estimates: dict[int, float] = {}  # id of a launch -> ms from one launch to the next
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._keep: dict[int, Launch] = {}  # a launch whose id is a key above must not be collected

    def environment(self) -> dict[str, Any]:
        """Fields of `records.Environment`, and `capability` and `uuid`."""
        properties = torch.cuda.get_device_properties(0)
        return {
            "device_name": properties.name,
            "num_sms": properties.multi_processor_count,
            "capability": properties.major * 10 + properties.minor,
            "driver": self.nvml.driver_version(),
            "cuda": torch.version.cuda or "",
            "torch": torch.__version__,
            "triton": _triton_version(),
            "ptxas": ptxas_version(properties.major * 10 + properties.minor),
            "python": platform.python_version(),
            "power_limit_w": self.nvml.power_limit_w(),
            "max_sm_mhz": self.nvml.max_sm_mhz(),
            "kernels": kernels_hash(),
            "peers": peer_versions(),
            "uuid": self.nvml.uuid,
            "smem_per_cta": getattr(properties, "shared_memory_per_block_optin", 0),
            "smem_per_sm": getattr(properties, "shared_memory_per_multiprocessor", 0),
            "total_memory_bytes": properties.total_memory,
        }

    def free_bytes(self) -> int:
        """Free device memory, torch's own cache included."""
        free, _ = torch.cuda.mem_get_info(0)
        return free + torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0)

    def wait(self) -> None:
        """Wait for the device; raises what a launch did wrong."""
        torch.cuda.synchronize()

    def is_poisoned(self) -> bool:
        """After an illegal access every later call fails: only a new process helps."""
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device=self.device).item()
        except torch.cuda.OutOfMemoryError:
            return False
        except Exception:
            return True
        return False

    def repeat(self, launch: Launch, method: dict[str, Any], rep_ms: float, warmup_ms: float) -> dict[str, Any]:
        """Raw times of as many launches as fit `rep_ms`, each with a pair of events of its own, after discarded ones.

        The host enqueues ahead: clearing L2 takes longer than enqueueing a launch, so the events enclose GPU time.
        """
        run = self._replay(launch) if method["timer"] == "graph_replay" else launch.run
        each_ms = self._estimate_ms(launch, run)
        for _ in range(max(1, min(MOST_LAUNCHES, round(warmup_ms / each_ms)))):
            self._flush.zero_()
            run()
        count = max(LEAST_LAUNCHES, min(MOST_LAUNCHES, round(rep_ms / each_ms)))
        times = self._time(run, count)
        return {
            "times_us": [round(t * 1e3, 3) for t in times],
            "sm_mhz": self.nvml.sm_mhz(),
            "power_w": self.nvml.power_w(),
        }

    def ceiling(self, name: str, rep_ms: float, warmup_ms: float) -> dict[str, Any]:
        """``copy``: 2 GiB to 2 GiB, bytes read and written. ``dense_bf16``: 8192^3 matrix product by torch."""
        launch, work = _ceiling_launch(name, self.device)
        result = self.repeat(launch, {"timer": "cuda_event"}, rep_ms, warmup_ms)
        self.forget_all()
        del launch
        torch.cuda.empty_cache()
        return {**result, **work}

    def _time(self, run: Any, count: int) -> list[float]:
        """Milliseconds of `count` launches."""
        while len(self._events) < count:
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        for start, end in self._events[:count]:
            self._flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in self._events[:count]]

    def _estimate_ms(self, launch: Launch, run: Any) -> float:
        """Milliseconds from one launch to the next, clearing included: the median of five."""
        if id(launch) not in self._estimates:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            times = []
            for _ in range(5):
                start.record()
                self._flush.zero_()
                run()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            self._keep[id(launch)] = launch
            self._estimates[id(launch)] = max(statistics.median(times), 1e-3)
        return self._estimates[id(launch)]

    def _replay(self, launch: Launch) -> Any:
        """Replay of a captured launch: the host's cost of a launch does not show."""
        if id(launch) not in self._graphs:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                launch.run()  # lazy initialisation must not be captured
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    launch.run()
            except Exception as error:  # the stream and the allocator may still be capturing
                raise Fatal("a launch could not be captured") from error
            self._keep[id(launch)] = launch
            self._graphs[id(launch)] = graph
        return self._graphs[id(launch)].replay

    def forget_all(self) -> None:
        """Free graphs and estimates of a point that is closed."""
        self._graphs.clear()
        self._estimates.clear()
        self._keep.clear()
        torch.cuda.empty_cache()


def _ceiling_launch(name: str, device: str) -> tuple[Launch, dict[str, int]]:
    if name == "copy":
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        launch = Launch(lambda: target.copy_(source), name, "", 0)
        return launch, {"work_bytes": 2 * COPY_BYTES, "work_flops": 0}
    if name == "dense_bf16":
        left, right = (torch.randn((DENSE, DENSE), device=device).to(torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)
        launch = Launch(lambda: torch.mm(left, right, out=product), name, "", 0)
        return launch, {"work_bytes": 3 * 2 * DENSE**2, "work_flops": 2 * DENSE**3}
    raise ValueError(f"unknown ceiling {name!r}; known: copy, dense_bf16")


def _triton_version() -> str:
    import triton

    return triton.__version__

"""A timer and a launcher without a GPU, for tests: the measuring process then runs on CPU tensors."""

from __future__ import annotations

import time

from chord_lab.measurement.launch import Launch
from chord_lab.measurement.launchers import launcher_of


class CpuTimer:
    device = "cpu"

    def __init__(self, memory_bytes: int = 0):
        self.memory_bytes = memory_bytes

    def environment(self):
        return {"device_name": "CPU of a test", "num_sms": 1, "capability": 90}

    def free_bytes(self):
        return self.memory_bytes

    def forget_all(self):
        pass

    def wait(self):
        pass

    def is_poisoned(self):
        return False

    def repeat(self, launch, method, rep_ms, warmup_ms):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            launch.run()
            times.append((time.perf_counter() - start) * 1e6)
        return {"times_us": times, "sm_mhz": 0.0, "power_w": 0.0}

    def ceiling(self, name, rep_ms, warmup_ms):
        return {"times_us": [1.0], "sm_mhz": 0.0, "power_w": 0.0, "work_bytes": 1, "work_flops": 1}


def launchers(candidate):
    """The reference stands in for our kernels; num_stages picks a fault. Baselines run for real."""
    if candidate.implementation != "w4a16_moe":
        return launcher_of(candidate)

    def launch(tensors, candidate):
        fault = candidate.schedule.num_stages
        calls = []

        def run():
            calls.append(1)
            tensors.out.copy_(tensors.reference.to(tensors.out.dtype))
            if fault == 7:
                tensors.out[1] *= 3
            elif fault == 8:
                tensors.out[-1] = float("nan")
            elif fault == 6 and len(calls) > 4:  # right before timing, wrong after it
                tensors.out.mul_(2)

        kind = "grouped_masked" if fault == 5 else "indexed"
        rows = tensors.routing(candidate.schedule.block_m).num_tokens_padded
        return Launch(run, "reference", kind, int(rows))

    return launch

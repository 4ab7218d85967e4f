"""A measuring process without a device: times follow from the schedule, faults from its num_stages. For tests alone."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
import zlib

from chord_lab.measurement.serve import Fatal

FAULTS = {101: "segfault", 102: "hang", 103: "wrong", 104: "raise", 105: "memory", 106: "garbage", 110: "poison"}


class WrongResult(RuntimeError):
    status = "wrong_result"
    rule = "relative error"


def fake_time_us(schedule: dict, routed_m: int) -> float:
    """A valley along block_m, deterministic, a few percent apart."""
    spread = zlib.crc32(repr(sorted(schedule.items())).encode()) % 997 / 997
    return 300.0 * (1 + abs(schedule["block_m"] - 32) / 64 + 0.2 * spread) + routed_m / 100


class FakeBench:
    def __init__(
        self, sleep_s: float = 0.0, device: str = "NVIDIA H200", noise: float = 0.0, zero: bool = False, seed: int = 0
    ):
        self.sleep_s, self.device, self.noise, self.zero = sleep_s, device, noise, zero
        self.random = random.Random(seed)
        self.poisoned = False
        self.repeats_of_112 = 0

    def hello(self):
        return {"device_name": self.device, "num_sms": 132, "capability": 90, "triton": "fake", "memory_bytes": 0}

    def open(self, point, method):
        self.routed_m = sum(point["routing"]["tok_e"])
        self.candidates = {}
        return {}

    def check(self, key, candidate):
        schedule = candidate["schedule"]
        if schedule is not None:
            self._fault(FAULTS.get(schedule["num_stages"]))
        if self.poisoned:
            raise Fatal("the device context is lost") from RuntimeError("an illegal memory access was encountered")
        self.candidates[key] = candidate
        return {"rel_error": 1e-3, "ran_kernel": "fake", "ran_gemm_type": "indexed", "num_tokens_padded": 64}

    def _fault(self, fault):
        if fault == "segfault":
            ctypes.string_at(0)
        elif fault == "hang":
            while True:
                time.sleep(0.1)
        elif fault == "wrong":
            raise WrongResult("relative error 5.00e-01; at most 0.003")
        elif fault == "raise":
            raise RuntimeError("no such instruction\nsecond line")
        elif fault == "poison":  # as after an illegal access: the process answers, and nothing works in it any more
            self.poisoned = True
        elif fault == "memory":
            hoard = []
            while True:
                hoard.append(bytearray(os.urandom(1)) * (16 << 20))
                time.sleep(0.01)
        elif fault == "garbage":
            print('{"result": {"times_us": [0.001]}}\n\0\xff', flush=True)
            sys.stderr.write("garbage" * 1000)
            os.write(1, b"\xff\xfe{]\n" * 1000)
            os._exit(0)

    def repeat(self, key, rep_ms, warmup_ms):
        if self.sleep_s:
            time.sleep(self.sleep_s)
        schedule = self.candidates[key]["schedule"]
        if schedule is not None and schedule["num_stages"] == 112:
            self.repeats_of_112 += 1
            if self.repeats_of_112 == 3:
                ctypes.string_at(0)
        time_us = 250.0 if schedule is None else fake_time_us(schedule, self.routed_m)
        time_us = 0.0 if self.zero else time_us * (1 + self.random.gauss(0, self.noise))
        return {
            "times_us": [round(time_us, 3), round(time_us * 1.01, 3), round(time_us, 3)],
            "sm_mhz": 1980.0,
            "power_w": 500.0,
        }

    def recheck(self, key):
        schedule = self.candidates[key]["schedule"]  # a real process cannot launch what it did not check
        if schedule is not None and schedule["num_stages"] == 111:
            ctypes.string_at(0)
        return {"rel_error": 1.1e-3}

    def drop(self, key):
        self.candidates.pop(key, None)

    def load(self, key, seconds):
        assert key in self.candidates  # a real process cannot launch what it did not check

    def ceiling(self, name, rep_ms, warmup_ms):
        work = (
            {"work_bytes": 4 * 2**30, "work_flops": 0}
            if name == "copy"
            else {"work_bytes": 0, "work_flops": 2 * 8192**3}
        )
        return {"times_us": [1000.0], "sm_mhz": 1980.0, "power_w": 400.0, **work}


class FakeCompiler:
    def compile(self, schedule, problem, capability, interface):
        if schedule["num_stages"] == 109:
            ctypes.string_at(0)
        if schedule["num_stages"] == 107:
            raise MemoryError
        smem = 999999 if schedule["num_stages"] == 108 else 1000
        return {"registers": 100, "smem_bytes": smem, "spill_bytes": 0, "seconds": 0.0, "from_cache": True}

"""Clocks, power and load of a GPU through NVML; zeros where it is not there."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any


class Nvml:
    """One GPU as NVML sees it."""

    def __init__(self, handle: Any = None, module: Any = None, uuid: str = ""):
        self._handle = handle
        self._nvml = module
        self.uuid = uuid

    @staticmethod
    def _module() -> Any:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no package, no driver, no permission: every reading is 0
            return None
        return pynvml

    @classmethod
    def device_count(cls) -> int:
        """GPUs of this host that the driver reports; 0 without a driver."""
        nvml = cls._module()
        return int(nvml.nvmlDeviceGetCount()) if nvml else 0

    @classmethod
    def of_current_device(cls) -> Nvml:
        """The GPU that torch calls 0 in this process: found by its UUID, since CUDA may number GPUs otherwise."""
        nvml = cls._module()
        if nvml is None:
            return cls()
        import torch

        with contextlib.suppress(Exception):
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            return cls(nvml.nvmlDeviceGetHandleByUUID(uuid.encode()), nvml, uuid)
        return cls.of_visible(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])

    @classmethod
    def of_visible(cls, entry: str) -> Nvml:
        """The GPU of one CUDA_VISIBLE_DEVICES entry: an index or a UUID. No CUDA context is made."""
        nvml = cls._module()
        if nvml is None:
            return cls()
        with contextlib.suppress(Exception):
            if entry.startswith(("GPU-", "MIG-")):
                return cls(nvml.nvmlDeviceGetHandleByUUID(entry.encode()), nvml, entry)
            return cls(nvml.nvmlDeviceGetHandleByIndex(int(entry or 0)), nvml)
        return cls()

    def _read(self, name: str, *arguments: Any) -> Any:
        if self._nvml is None or self._handle is None:
            return None
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except Exception:
            return None

    def sm_mhz(self) -> float:
        """SM clock now, MHz."""
        return float(self._read("nvmlDeviceGetClockInfo", 1) or 0)  # 1 = NVML_CLOCK_SM

    def max_sm_mhz(self) -> float:
        """Highest SM clock, MHz."""
        return float(self._read("nvmlDeviceGetMaxClockInfo", 1) or 0)

    def power_w(self) -> float:
        """Board power now, watts."""
        return float(self._read("nvmlDeviceGetPowerUsage") or 0) / 1000

    def power_limit_w(self) -> float:
        """Enforced power limit, watts."""
        return float(self._read("nvmlDeviceGetEnforcedPowerLimit") or 0) / 1000

    def name(self) -> str:
        """Reported name; empty without NVML."""
        value = self._read("nvmlDeviceGetName") or ""
        return value.decode() if isinstance(value, bytes) else value

    def memory_bytes(self) -> int:
        """Total memory, bytes."""
        info = self._read("nvmlDeviceGetMemoryInfo")
        return int(info.total) if info else 0

    def busy(self) -> float | None:
        """Share of the last sample period in which some kernel ran; None where unknown."""
        rates = self._read("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.gpu / 100

    def driver_version(self) -> str:
        """Driver version; empty without NVML."""
        if self._nvml is None:
            return ""
        try:
            value = self._nvml.nvmlSystemGetDriverVersion()
        except Exception:
            return ""
        return value.decode() if isinstance(value, bytes) else value


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES leaves of the GPUs, as values for that variable; makes no CUDA context."""
    count = Nvml.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not count:
        return [str(index) for index in range(count)]
    entries = []
    for entry in (part.strip() for part in listed.split(",")):
        known = entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < count)
        if not known:  # CUDA itself stops at the first entry that it does not know
            break
        entries.append(entry)
    return entries


class BusyMonitor:
    """Mean busy share of a GPU while the block runs, sampled ten times a second from this process."""

    def __init__(self, gpu: Nvml, period_s: float = 0.1):
        self._gpu = gpu
        self._period = period_s
        self._stop = threading.Event()
        self.samples: list[float] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(self._period):
            value = self._gpu.busy()
            if value is not None:
                self.samples.append(value)

    def __enter__(self) -> BusyMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2)

    @property
    def share(self) -> float | None:
        """Mean busy share; None where NVML gave none."""
        return sum(self.samples) / len(self.samples) if self.samples else None

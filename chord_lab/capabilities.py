"""What this machine can do, and why not: GPU, compilers, profilers, peers. Probing never raises nor waits long."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from chord_lab.errors import UserError

MIN_NCU_FOR_NSIGHT_PYTHON = (2026, 2, 1)
MIN_NCU = (2024, 1)


class Gpu(NamedTuple):
    """One GPU as the driver reports it, whether CUDA may use it or not."""

    ordinal: int
    name: str
    uuid: str
    memory_bytes: int
    sms: int | None = None


class Check(NamedTuple):
    """One line of the doctor's report."""

    name: str
    ok: bool
    found: str  # version or description; "" when nothing is there
    remark: str = ""  # why not, and what to do


class Capability(NamedTuple):
    """One thing that a user may want to do."""

    name: str
    available: bool
    why_not: str = ""


class Report(NamedTuple):
    """Everything the doctor knows."""

    gpus: list[Gpu]
    visible: list[int]
    checks: list[Check]
    capabilities: list[Capability]


def select_visible(value: str | None, gpus: list[Gpu]) -> tuple[list[Gpu], str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, and a line saying what is wrong with it ("" if nothing).

    CUDA reads the list up to its first entry that names no GPU, so one bad entry hides the rest: that is said here.
    """
    if value is None:
        return gpus, ""
    if not value.strip():
        return [], "CUDA_VISIBLE_DEVICES is empty: it hides every GPU; unset it to use one"
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        match = [g for g in gpus if (entry.isdigit() and g.ordinal == int(entry)) or _names_uuid(entry, g.uuid)]
        if not match:
            have = ", ".join(f"{g.ordinal} ({g.uuid})" for g in gpus) or "none"
            tail = "" if entry != "-1" else "; -1 hides every GPU from there on"
            return chosen, f"CUDA_VISIBLE_DEVICES={value}: {entry!r} names no GPU{tail}; there are: {have}"
        if match[0] in chosen:
            return [], f"CUDA_VISIBLE_DEVICES={value}: {entry!r} is named twice, which hides every GPU"
        chosen.append(match[0])
    return chosen, ""


def _names_uuid(entry: str, uuid: str) -> bool:
    return entry.startswith(("GPU-", "MIG-")) and len(entry) > 4 and uuid.startswith(entry)


def diagnose() -> Report:
    """Probe everything."""
    gpus, driver = _gpus()
    visible, problem = select_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    torch_check, torch_sees = _torch()
    checks = [
        Check("python", sys.version_info >= (3, 11), sys.version.split()[0]),
        driver,
        Check("GPU", bool(visible), ", ".join(g.name for g in visible), problem or ("" if gpus else "none")),
        torch_check,
        _package("triton", "no wheel for this platform; measuring and offline compilation need Linux"),
        _ptxas(),
        _ncu(),
        _counters(),
        _nsight_python(),
        _package("ncu-report", "pip install 'chord-lab[nsight]': reads .ncu-rep files without a GPU"),
        _program("nsys", "records timelines; .sqlite exports of other machines are read without it"),
        _package("humming-kernels", "pip install 'chord-lab[peers]': the peer to compare with", module="humming"),
        _package("anywidget", "pip install 'chord-lab[lab]': figures that answer to sliders"),
        _package("optuna", "pip install 'chord-lab[optuna]': --search optuna"),
        _package("distributed", "pip install 'chord-lab[dask]': sweeps over many GPUs"),
        _records(),
    ]
    return Report(gpus, [g.ordinal for g in visible], checks, _capabilities({c.name: c for c in checks}, torch_sees))


def _capabilities(checks: dict[str, Check], torch_sees: bool) -> list[Capability]:
    def needs(name: str, *required: str, also: str = "") -> Capability:
        missing = [_why_missing(checks[r]) for r in required if not checks[r].ok]
        if also:
            missing.append(also)
        return Capability(name, not missing, "; ".join(missing))

    unseen = "" if torch_sees or not checks["GPU"].ok else f"torch sees no GPU ({checks['torch'].remark})"
    return [
        needs("replay recorded measurements", "records"),
        needs("predict without measuring", "records"),
        needs("compile offline for other GPUs", "triton", "ptxas"),
        needs("measure live", "GPU", "torch", "triton", also=unseen),
        needs("compare with Humming live", "GPU", "humming-kernels", also=unseen),
        needs("collect counters with ncu", "GPU", "ncu", "counters"),
        needs("collect counters in process", "GPU", "ncu", "counters", "nsight-python"),
        needs("read .ncu-rep files", "ncu-report"),
        needs("interactive figures", "anywidget"),
    ]


def _why_missing(check: Check) -> str:
    """The reason alone: the table above has the rest of the remark."""
    return f"no {check.name}" if check.remark in ("", "none") else f"{check.name}: {check.remark.split(';')[0]}"


def _gpus() -> tuple[list[Gpu], Check]:
    """GPUs from NVML, and the driver's own line."""
    try:
        import pynvml
    except ImportError:
        return [], Check("driver", False, "", "nvidia-ml-py is not installed: pip install 'chord-lab[gpu]'")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], Check("driver", False, "", f"no NVIDIA driver here ({error}); replay and prediction need none")
    try:
        driver, cuda = _word(pynvml.nvmlSystemGetDriverVersion()), pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = _word(pynvml.nvmlDeviceGetName(handle)), _word(pynvml.nvmlDeviceGetUUID(handle))
            gpus.append(Gpu(index, name, uuid, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)))
        return gpus, Check("driver", True, f"{driver}, CUDA up to {cuda // 1000}.{cuda % 1000 // 10}")
    except pynvml.NVMLError as error:
        return [], Check("driver", False, "", f"the driver answers with an error: {error}")
    finally:
        pynvml.nvmlShutdown()


def _word(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _torch() -> tuple[Check, bool]:
    """The torch line, and whether torch sees a GPU."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", False, "", f"not importable: {_first_line(error)}"), False
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    remark = "" if torch.version.cuda else "a CPU build sees no GPU: install a CUDA build of torch to measure"
    try:
        sees = bool(torch.version.cuda) and torch.cuda.is_available()
    except Exception as error:  # a broken driver raises many kinds
        return Check("torch", True, f"{torch.__version__} ({build})", _first_line(error)), False
    return Check("torch", True, f"{torch.__version__} ({build})", remark), sees


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _package(name: str, remark: str, module: str = "") -> Check:
    """A distribution's version; only its metadata is read."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, "", remark)
    if module and importlib.util.find_spec(module) is None:
        return Check(name, False, version, f"installed, but its module {module} is not found")
    return Check(name, True, version)


def _ptxas() -> Check:
    """The assembler that triton brings along."""
    try:
        spec = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return Check("ptxas", False, "", "comes with triton, which is not installed")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    text = _run([str(path), "--version"]) if path.exists() else None
    match = re.search(r"release ([\d.]+), V([\d.]+)", text or "")
    return Check("ptxas", match is not None, match[2] if match else "", "" if match else "triton's ptxas does not run")


def _run(command: list[str]) -> str | None:
    """Output of a short command; None if it cannot be run or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def version_tuple(text: str) -> tuple[int, ...]:
    """``2025.3.1.0`` -> (2025, 3, 1, 0); () if there is no version in it."""
    match = re.search(r"(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _ncu() -> Check:
    path = shutil.which("ncu")
    if path is None:
        return Check("ncu", False, "", "Nsight Compute is not on PATH; event timing works without it")
    text = _run([path, "--version"]) or ""
    match = re.search(r"Version ([\d.]+)", text)
    version = version_tuple(match[1]) if match else ()
    if not version:
        return Check("ncu", False, "", f"{path} does not say its version")
    if version < MIN_NCU:
        return Check("ncu", False, match[1] if match else "", "too old: 2024.1 or newer is needed")
    return Check("ncu", True, match[1] if match else "")


def _counters() -> Check:
    """Whether the driver lets this user read performance counters; that is the host's policy, not an image's fault."""
    try:
        text = Path("/proc/driver/nvidia/params").read_text("utf-8")
    except OSError:
        return Check("counters", False, "", "no NVIDIA driver here")
    admin_only = re.search(r"RmProfilingAdminOnly:\s*1", text) is not None
    if not admin_only:
        return Check("counters", True, "open to all users")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Check("counters", True, "administrators only; this user is one (a container may still be refused)")
    return Check(
        "counters",
        False,
        "administrators only",
        "host policy: the host's driver needs NVreg_RestrictProfilingToAdminUsers=0",
    )


def _nsight_python() -> Check:
    found = _package("nsight-python", "pip install 'chord-lab[gpu]' (Linux): counters from inside the process")
    if not found.ok:
        return found
    ncu = _ncu()
    if not ncu.ok or version_tuple(ncu.found) < MIN_NCU_FOR_NSIGHT_PYTHON:
        need = ".".join(map(str, MIN_NCU_FOR_NSIGHT_PYTHON))
        return Check("nsight-python", False, found.found, f"needs ncu {need} or newer; found {ncu.found or 'none'}")
    return found


def _program(name: str, remark: str) -> Check:
    path = shutil.which(name)
    return Check(name, path is not None, path or "", "" if path else remark)


def _records() -> Check:
    from chord_lab.records.places import described_recordings

    try:
        return Check("records", True, "; ".join(described_recordings()))
    except UserError as error:
        return Check("records", False, "", str(error))

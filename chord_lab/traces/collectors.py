"""What can record a profile here, and Nsight Compute as a child process. Clocks are never touched."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from chord_lab.capabilities import MIN_NCU, MIN_NCU_FOR_NSIGHT_PYTHON, version_tuple
from chord_lab.errors import UserError
from chord_lab.traces.counters import COUNTERS, STALL_METRIC, STALLS
from chord_lab.traces.reading import FORBIDDEN

COLLECTORS = ("ncu", "nsight-python", "cupti", "events")
EVENTS_WORK = "times by CUDA events work without: --collector events"

# Sections that the notebooks use: a report of them is a tenth of a full one
SECTIONS = (
    "LaunchStats",
    "Occupancy",
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "ComputeWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
)
METRIC_SETS = ("lab", "time", "full")  # or a comma-separated list of metrics


class Collector(NamedTuple):
    """One way to record a profile."""

    name: str
    available: bool
    found: str = ""  # version
    why_not: str = ""  # one line that says what to do


class Ncu(NamedTuple):
    """A Nsight Compute that can be run."""

    path: str
    version: tuple[int, ...]

    def text(self) -> str:
        """``2025.3.1.0``."""
        return ".".join(map(str, self.version))


def capabilities() -> tuple[Collector, ...]:
    """Every collector, and why not. Counters may still be forbidden by the host: only a run can tell."""
    try:
        ncu = find_ncu()
        first = Collector("ncu", True, ncu.text())
    except UserError as error:
        ncu, first = None, Collector("ncu", False, why_not=str(error))
    return (first, _nsight_python(ncu), _cupti(), Collector("events", True))


def find_ncu() -> Ncu:
    """The ncu on PATH, or in CHORD_LAB_NCU. Raises UserError when it is absent, without a version, or too old."""
    named = os.environ.get("CHORD_LAB_NCU") or "ncu"
    path = shutil.which(named)
    if path is None:
        raise UserError(
            f"Nsight Compute is not here: no {named} on PATH (it comes with the CUDA toolkit); {EVENTS_WORK}"
        )
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, timeout=60, check=False, stdin=subprocess.DEVNULL
        )
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{path} does not run ({type(error).__name__}); {EVENTS_WORK}") from None
    match = re.search(r"Version (\d+(?:\.\d+)+)", text)
    if match is None:
        raise UserError(f"{path} does not say its version; {EVENTS_WORK}")
    version = version_tuple(match[1])
    if version < MIN_NCU:
        need = ".".join(map(str, MIN_NCU))
        raise UserError(f"{path} is Nsight Compute {match[1]}, too old: {need} or newer is needed; {EVENTS_WORK}")
    return Ncu(path, version)


def _nsight_python(ncu: Ncu | None) -> Collector:
    found = _version("nsight-python")
    if found is None:
        return Collector("nsight-python", False, why_not="not installed: pip install 'chord-lab[gpu]' (Linux)")
    need = ".".join(map(str, MIN_NCU_FOR_NSIGHT_PYTHON))
    if ncu is None or ncu.version < MIN_NCU_FOR_NSIGHT_PYTHON:
        have = ncu.text() if ncu else "none"
        return Collector("nsight-python", False, found, f"needs ncu {need} or newer, found {have}: use --collector ncu")
    report = version_tuple(_version("ncu-report") or "")
    if report[:2] < ncu.version[:2]:
        have = ".".join(map(str, ncu.version[:2]))
        return Collector("nsight-python", False, found, f"needs ncu-report {have} or newer: pip install -U ncu-report")
    return Collector("nsight-python", True, found)


def _cupti() -> Collector:
    found = _version("nsight-python")
    if found is None or version_tuple(found) < (1, 1):
        return Collector("cupti", False, found or "", "needs nsight-python 1.1 or newer: pip install 'chord-lab[gpu]'")
    if importlib.util.find_spec("cupti") is None:
        return Collector("cupti", False, found, "needs CUPTI's bindings: pip install cupti-python")
    return Collector("cupti", True, found)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def ncu_options(metrics: str) -> list[str]:
    """What ``--metrics`` asks of ncu: a named set, or metrics by name. Raises UserError for anything else."""
    if metrics == "full":
        return ["--set", "full"]
    if metrics == "time":
        return ["--metrics", "gpu__time_duration.sum"]
    if metrics == "lab":
        return [*_sections(), "--metrics", ",".join(lab_metrics())]
    names = [name.strip() for name in metrics.split(",")]
    if not all(re.fullmatch(r"[A-Za-z_][\w.:]*", name) and "__" in name for name in names):
        legal = ", ".join(METRIC_SETS)
        raise UserError(f"--metrics {metrics!r}: legal are {legal}, or ncu metrics such as gpu__time_duration.sum")
    if "gpu__time_duration.sum" not in names:
        names.append("gpu__time_duration.sum")
    return ["--metrics", ",".join(names)]


def _sections() -> list[str]:
    return [option for section in SECTIONS for option in ("--section", section)]


def lab_metrics() -> list[str]:
    """Every counter and stall by its first name: sections differ between versions in what they collect."""
    measured = [c.metrics[0] for c in COUNTERS if not c.metrics[0].startswith(("launch__", "derived__"))]
    return [*measured, *(STALL_METRIC.format(stall) for stall in STALLS)]


def run_ncu(
    ncu: Ncu,
    target: Sequence[str],
    report: Path,
    *,
    metrics: str = "lab",
    environment: Mapping[str, str] | None = None,
    limit_s: float = 600.0,
) -> str:
    """Profile what ``target`` marks with cudaProfilerStart and Stop into ``report`` (.ncu-rep); what ncu printed.

    Raises UserError in one line when counters are forbidden, nothing was profiled, or the target failed.
    """
    command = [ncu.path, "--clock-control", "none", "--profile-from-start", "off", "--nvtx"]
    command += ["--target-processes", "application-only"]
    ending = ["--force-overwrite", "--export", str(report), *target]
    code, text = _run_group([*command, *ncu_options(metrics), *ending], environment, limit_s)
    if metrics == "lab" and "Failed to find metric" in text:  # a GPU that has not all of them
        code, text = _run_group([*command, *_sections(), *ending], environment, limit_s)
    problem = _problem(text)
    if problem:
        raise UserError(problem)
    if code != 0:
        raise UserError(f"ncu ended with code {code}: {_last_line(text)}")
    if not report.exists():
        raise UserError(f"ncu wrote no report: {_last_line(text)}")
    return text


def export_raw_csv(ncu: Ncu, report: Path, limit_s: float = 120.0) -> str:
    """The raw page of a report in base units, by ncu itself: for machines without `ncu-report`."""
    command = [ncu.path, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
    code, text = _run_group([*command, "--nvtx"], None, limit_s)
    if code != 0:  # a version that takes --nvtx for recording only
        code, text = _run_group(command, None, limit_s)
    if code != 0:
        raise UserError(f"ncu cannot export {report.name}: {_last_line(text)}")
    return text


def _run_group(command: Sequence[str], environment: Mapping[str, str] | None, limit_s: float) -> tuple[int, str]:
    """Run in a session of its own, so that an interrupt or the limit ends ncu and what it started."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=None if environment is None else dict(environment),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise UserError(f"ncu took more than {limit_s:.0f} s and was stopped") from None
        raise
    return process.returncode, output.decode("utf-8", "replace")


def _problem(text: str) -> str | None:
    """The reason in ncu's chatter, in one line; None when there is none."""
    if "ERR_NVGPUCTRPERM" in text:
        return FORBIDDEN
    if "driver resource was unavailable" in text:
        return "the counters are in use: another profiler (DCGM, a second ncu) holds them; stop it and try again"
    if "No kernels were profiled" in text:
        return "ncu profiled no kernel: the target ended before it launched one"
    error = next((line for line in text.splitlines() if line.startswith("==ERROR==")), None)
    return f"ncu failed: {error.removeprefix('==ERROR==').strip()}" if error else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"

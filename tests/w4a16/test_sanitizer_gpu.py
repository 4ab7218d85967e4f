"""No kernel reads or writes out of bounds, races on shared memory or misuses a barrier: NVIDIA's own tool looks."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("small_launches.py")
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "synccheck": "ERROR SUMMARY: 0 errors", "racecheck": "0 hazards"}


def sanitizer() -> str:
    """The program; a skip with the reason where there is none."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("compute-sanitizer is not installed")
    return found


def launches(output: str) -> int:
    """How many launches the script says it has compared."""
    match = re.search(r"^(\d+) launches compared", output, flags=re.M)
    return int(match[1]) if match else 0


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", list(CLEAN))
def test_compute_sanitizer_finds_nothing(tool):
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "99", "--print-limit", "5"]
    command += ["--target-processes", "application-only", sys.executable, str(SCRIPT)]
    # without torch's cache each tensor is an allocation of its own: a byte past its end is out of bounds
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer cannot watch this device here")
    assert done.returncode == 0, output[-3000:]
    assert CLEAN[tool] in output, output[-3000:]
    assert launches(done.stdout) > 30


LEGAL = """
import small_launches as script
from w4a16_moe import DEVICES, PROFILES, why_illegal
H200 = DEVICES["nvidia_h200"]
for profile, schedules in (("portable", script.PORTABLE), ("h200_decode_ep8", script.INDEXED)):
    for schedule in schedules:
        assert why_illegal(schedule, script.PROBLEM, PROFILES[profile], H200) is None, schedule.label()
    assert {"static", "semi_static", "dynamic"} <= {s.token_slicing for s in schedules}
assert {s.kernel for s in script.INDEXED} == {"mma_sync", "wgmma"} and any(s.stream_k for s in script.INDEXED)
assert {s.dequant for s in script.INDEXED} == {"subnormal", "exponent"} and any(s.split_k > 1 for s in script.PORTABLE)
"""


def test_every_kernel_family_and_slicing_is_among_the_launches():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    command = [sys.executable, "-c", LEGAL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

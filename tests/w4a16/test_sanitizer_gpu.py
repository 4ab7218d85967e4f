"""No kernel reads or writes out of bounds, races on shared memory or misuses a barrier: NVIDIA's own tool looks."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import w4a16_moe

SCRIPT = pathlib.Path(__file__).with_name("small_launches.py")
HOPPER = pathlib.Path(w4a16_moe.__file__).parent / "hopper"
# Accesses of the warp-specialised kernels that are ordered in ways racecheck does not follow: it reports both ends.
ORDERED = (
    # Triton's dispatcher: the roles meet, each in its own code, at `barrier.sync 1` before and after they read their
    # state. What Triton adds carries the kernel's first line.
    "def wgmma",
    "gl.warp_specialize(",
)
LAUNCHES = {"portable": 22, "indexed": 16, "grouped": 5}  # of each part: none may be left out unseen
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "synccheck": "ERROR SUMMARY: 0 errors", "racecheck": "0 hazards"}


def sanitizer() -> str:
    """The program; a skip with the reason where there is none."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("compute-sanitizer is not installed")
    return found


def unexplained(output: str) -> list[str]:
    """Places of racecheck's hazards, less those known to be ordered: ``tiles.py:12 source text``."""
    places = set(re.findall(r"access at \S+ in (\S+\.py):(\d+)", output))
    lines = {(f, n): (HOPPER / f).read_text().splitlines()[int(n) - 1] for f, n in places if (HOPPER / f).exists()}
    known = {place for place, line in lines.items() if any(text in line for text in ORDERED)}
    reported = len(re.findall(r"access at ", output))
    located = len(re.findall(r"access at \S+ in \S+\.py:\d+", output))
    found = [f"{f}:{n} {lines.get((f, n), '').strip()}" for f, n in sorted(places - known)]
    return found + [f"{reported - located} places without a source line"] * (reported > located)


def launches(output: str) -> int:
    """How many launches the script says it has compared."""
    match = re.search(r"^(\d+) launches compared", output, flags=re.M)
    return int(match[1]) if match else 0


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", list(CLEAN))
@pytest.mark.parametrize("part", list(LAUNCHES))
def test_compute_sanitizer_finds_nothing(part, tool):
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "99", "--print-limit", "10000"]
    command += ["--target-processes", "application-only", sys.executable, str(SCRIPT), part]
    # without torch's cache each tensor is an allocation of its own: a byte past its end is out of bounds
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer cannot watch this device here")
    if tool == "racecheck" and "Race reported" in output:
        assert not unexplained(output), output[-3000:]
    else:
        assert done.returncode == 0, output[-3000:]
        assert CLEAN[tool] in output, output[-3000:]
    assert launches(done.stdout) == LAUNCHES[part]


def report(*places: str) -> str:
    """A hazard as racecheck 2025.3 prints it, its accesses at lines of hopper/FILE that hold TEXT: ``FILE|TEXT``."""
    accesses = []
    for place in places:
        file, text = place.split("|")
        lines = (HOPPER / file).read_text().splitlines()
        number = next(n for n, line in enumerate(lines, 1) if text in line)
        accesses.append(f"access at wgmma_kernel+0x100 in {file}:{number}")
    first, *others = accesses
    tail = [f"=========     and Write {access} [3 hazards]" for access in others]
    return "\n".join([f"========= Error: Race reported between Read {first}", *tail])


def test_a_hazard_that_is_not_known_to_be_ordered_is_named():
    dispatcher = report("wgmma.py|def wgmma_kernel", "wgmma.py|gl.warp_specialize(")
    assert unexplained(dispatcher) == []
    found = unexplained(report("tiles.py|slots.index(slot).load(", "wgmma_body.py|entries = load_entries("))
    assert [place.split(":")[0] for place in found] == ["tiles.py", "wgmma_body.py"] and "load_entries" in found[1]
    nowhere = "= Error: Race reported between Read access at kernel+0x100"
    assert unexplained(nowhere) == ["1 places without a source line"]


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

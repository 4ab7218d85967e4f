"""The portable kernel's checks, in a child process: through Triton's interpreter everywhere, compiled on a GPU.

The interpreter is chosen when Triton is imported, so it needs a process of its own. A pass there shows indices, masks,
packing and slicing to be right; it says nothing about bf16 arithmetic, which only the GPU run checks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton has no build for this platform")

CHECKS = Path(__file__).parent / "portable_checks.py"


def run_checks(interpret: bool) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1" if interpret else "0"
    command = [sys.executable, "-m", "pytest", str(CHECKS), "-q", "-p", "no:cacheprovider", "--timeout=280"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=CHECKS.parents[2], check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def interpreter_runs_loops() -> bool:
    """Triton 3.6's interpreter turns one-element arrays into loop bounds, which numpy 2.4 no longer allows."""
    numpy = pytest.importorskip("numpy", reason="Triton's interpreter needs numpy")
    try:
        return bool(int(numpy.ones(1)))
    except TypeError:
        return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


def test_portable_kernel_through_the_interpreter():
    if not interpreter_runs_loops():
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not work with this numpy")
    passed = re.search(r"(\d+) passed", run_checks(interpret=True))
    assert passed and int(passed.group(1)) >= 80


@pytest.mark.gpu
def test_portable_kernel_on_the_gpu():
    passed = re.search(r"(\d+) passed", run_checks(interpret=False))
    assert passed and int(passed.group(1)) >= 80

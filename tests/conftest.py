"""What every test can rely on: a GPU or a reason, other Triton releases, and skips counted by reason."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Started in the background, a test run inherits "ignore Ctrl-C", and so would the programs whose Ctrl-C is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _why_no_gpu() -> str:
    """Empty when torch sees a CUDA GPU; otherwise the reason."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA GPU on this machine"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests with the reason. Those of one shape or schedule share a worker: packed, compiled once."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    for item in gpu_items:
        if group := _shape_of(item) or _parameter(item, "schedule"):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {group}"))
    items.sort(key=lambda item: _turn(item) if item.get_closest_marker("gpu") else 0)
    reason = _why_no_gpu() if gpu_items else ""
    for item in gpu_items:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _parameter(item: pytest.Item, name: str) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get(name, "")) if callspec else ""


def _shape_of(item: pytest.Item) -> str:
    return _parameter(item, "shape")


def _turn(item: pytest.Item) -> int:
    """Long GPU tests first, so that no worker ends alone with one."""
    return -2 if item.get_closest_marker("slow") else -1 if _shape_of(item) else 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped, and why, grouped by reason."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[re.sub(r"^Skipped: ", "", text)] += 1
    if reasons:
        terminalreporter.section(f"{sum(reasons.values())} skipped, by reason")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:5d}  {reason}")


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def triton_versions() -> dict[str, dict[str, str]]:
    """Environment variables under which a child Python imports each Triton release at hand: version -> variables.

    The installed release is always there. The others lie in ``.venv/triton-VERSION`` (`make test` puts them there) or
    in the folders that CHORD_LAB_TRITONS lists, separated by ``:``.
    """
    folders = sorted((ROOT / ".venv").glob("triton-*[0-9]"))
    folders += [pathlib.Path(text) for text in os.environ.get("CHORD_LAB_TRITONS", "").split(":") if text]
    found: dict[str, dict[str, str]] = {}
    for folder in [None, *folders]:
        paths = [str(folder)] if folder else []
        path = ":".join([*paths, str(ROOT), str(ROOT / "kernels")])
        child = {**os.environ, "PYTHONPATH": path}
        version = subprocess.run(
            [sys.executable, "-c", "import triton; print(triton.__version__)"],
            env=child,
            capture_output=True,
            text=True,
            check=False,
        )
        if version.returncode == 0:
            found.setdefault(version.stdout.strip(), child)
    if not found:
        pytest.skip("triton is not installed (it has no build for this platform)")
    return found

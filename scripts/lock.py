"""Write requirements.lock: exact versions for Linux and macOS, Python 3.11 and newer, from pyproject.toml.

Needs `uv` (it resolves for all platforms at once); `make lock` provides it. torch and triton are pinned here as a pair,
because torch's CUDA wheels ask for one exact triton. The CUDA libraries are left out: torch's own metadata pins them,
and its CPU build wants none of them.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PINS = ("torch==2.13.0", "triton==3.7.1; sys_platform == 'linux'", "setuptools>=77", "wheel")
HEADER = """\
# Exact versions that `make` installs. Written by `make lock` from pyproject.toml; do not edit.
# torch: PyPI's Linux wheel is the CUDA build. The CPU build, a tenth of its size, comes from another index:
# TORCH_INDEX=https://download.pytorch.org/whl/cpu make run
"""


def main() -> int:
    """Resolve, drop the CUDA libraries, replace the lock in one step."""
    with tempfile.TemporaryDirectory() as folder:
        pins = pathlib.Path(folder) / "pins.in"
        pins.write_text("\n".join(PINS) + "\n")
        command = ["uv", "pip", "compile", "--universal", "--python-version", "3.11", "--extra", "dev", "--upgrade"]
        command += ["--no-annotate", "--no-header", "--quiet", "--no-strip-markers", "pyproject.toml", str(pins)]
        resolved = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    lines = [line for line in resolved.splitlines() if line[:1].isalnum()]
    kept = [line for line in lines if not re.match(r"(nvidia|cuda)-", line) and not line.startswith("chord-lab")]
    unfinished = ROOT / "requirements.lock.tmp"
    unfinished.write_text(HEADER + "\n".join(kept) + "\n")
    unfinished.replace(ROOT / "requirements.lock")
    print(f"requirements.lock: {len(kept)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Build the project's virtual environment from requirements.lock. Standard library only: it runs before anything else.

    python3 scripts/bootstrap.py [--tritons]

`.venv` is built once for each content of the lock: a stamp names the lock, the interpreter and the folder it was built
for, so a changed lock, another Python or a moved checkout builds it anew. An interrupted build is thrown away (pip's
download cache keeps what was fetched), and a second `make` at the same time waits for the first one.
`--tritons` also puts the other Triton releases that the kernels are compiled with into `.venv/triton-VERSION`.
`TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes torch from there: a tenth of the size of PyPI's CUDA build.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "requirements.lock"
MINIMUM = (3, 11)
# Releases beside the locked one: what torch 2.11 and torch 2.14 pin.
OTHER_TRITONS = ("3.6.0", "3.8.0")
# Raise it when the way the environment is built changes.
RECIPE = "1"


def main(arguments: list[str]) -> int:
    """Bring `.venv` up to date; returns the exit code."""
    unknown = [argument for argument in arguments if argument != "--tritons"]
    if unknown:
        return complain(f"unknown argument {unknown[0]!r}; legal is --tritons")
    if sys.version_info < MINIMUM:
        return complain(
            f"Python {sys.version.split()[0]} is too old; 3.11 or newer is needed: make PYTHON=python3.12 ..."
        )
    with locked(ROOT / ".venv.lock"):
        try:
            build_environment()
            if "--tritons" in arguments and sys.platform == "linux":
                for version in OTHER_TRITONS:
                    install_triton(version)
        except subprocess.CalledProcessError as error:
            return complain(f"set-up stopped: {' '.join(map(str, error.cmd[:6]))} ... exited with {error.returncode}")
    return 0


def complain(message: str) -> int:
    """One line on stderr; the exit code for bad input."""
    print(f"bootstrap: {message}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Hold an advisory lock that the system drops when the process dies, however it dies."""
    import fcntl

    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("bootstrap: another make is building .venv; waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def stamp() -> pathlib.Path:
    """The file whose presence says: `.venv` is complete and fits this lock, interpreter and folder."""
    facts = "\0".join((RECIPE, LOCK.read_text(), sys.version, str(ROOT), os.environ.get("TORCH_INDEX", "")))
    return VENV / f"complete-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def build_environment() -> None:
    """Make `.venv` hold exactly what the lock says, and the project itself, editable."""
    finished = stamp()
    if finished.exists():
        return
    started = time.monotonic()
    shutil.rmtree(VENV, ignore_errors=True)
    print(f"bootstrap: building .venv with Python {sys.version.split()[0]} from requirements.lock", flush=True)
    if subprocess.run([sys.executable, "-c", "import ensurepip, venv"], check=False, capture_output=True).returncode:
        print("bootstrap: this Python has no venv module; on Debian: apt-get install python3-venv", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    num_packages = sum(line[:1].isalnum() for line in LOCK.read_text().splitlines())
    index = os.environ.get("TORCH_INDEX")
    pip_install("-r", str(LOCK), *(("--extra-index-url", index) if index else ()), num_packages=num_packages)
    pip_install("--no-deps", "--no-build-isolation", "-e", str(ROOT))
    finished.touch()
    print(f"bootstrap: .venv is ready after {time.monotonic() - started:.0f} s", flush=True)


def install_triton(version: str) -> None:
    """Unpack one more Triton release beside the locked one, importable by PYTHONPATH only."""
    folder = VENV / f"triton-{version}"
    if folder.exists():
        return
    unfinished = VENV / f"triton-{version}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)
    print(f"bootstrap: fetching triton {version} to compile with", flush=True)
    pip_install("--no-deps", "--no-compile", "--target", str(unfinished), f"triton=={version}")
    unfinished.rename(folder)


def pip_install(*arguments: str, num_packages: int = 0) -> None:
    """Run pip; show how far it is instead of its log, and the end of its log when it fails."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", *arguments]
    tail: deque[str] = deque(maxlen=30)
    collected = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line)
            if num_packages and line.startswith("Collecting "):
                collected += 1
                show_progress(f"{collected} of about {num_packages} packages", collected)
            elif line.startswith("Installing collected packages"):
                show_progress("unpacking", 0)
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    if process.returncode:
        sys.stderr.writelines(tail)
        raise subprocess.CalledProcessError(process.returncode, command)


def show_progress(text: str, count: int) -> None:
    """One line that rewrites itself on a terminal; every 25th step elsewhere."""
    if sys.stdout.isatty():
        print(f"\r\033[Kbootstrap: {text}", end="", flush=True)
    elif count % 25 == 0:
        print(f"bootstrap: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

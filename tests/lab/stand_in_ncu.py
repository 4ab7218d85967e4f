"""Stand-in executables of Nsight Compute."""

import os
import stat
import subprocess
import sys

TO_EXPORT = 'while [ "$1" != "--export" ]; do shift; done; : > "$2"'  # leaves an empty report


def executable(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def shell_ncu(folder, version, then):
    """An ncu that says this version and does ``then`` otherwise."""
    about = f'if [ "$1" = --version ]; then echo "Version {version} (build 1)"; exit 0; fi'
    return executable(folder, "ncu", f"#!/bin/sh\n{about}\n{then}\n")


def chord_lab(*arguments, path, cwd):
    environment = {**os.environ, "PATH": str(path), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("CHORD_LAB_NCU", None)
    return subprocess.run(
        [sys.executable, "-m", "chord_lab", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=120, env=environment, cwd=cwd,
    )  # fmt: skip

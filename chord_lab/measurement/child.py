"""The parent's side of a child process: commands with a time limit and a memory limit, and a verdict when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

POLL_S = 0.05  # how often memory and deadline are looked at while a command runs


class ChildFailure(Exception):
    """A command that did not end in a result. `status` is the record's; `lost` says whether the process is gone."""

    def __init__(self, status: str, reason: str, *, rule: str = "", lost: bool = False, error_type: str = ""):
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.rule = rule
        self.lost = lost
        self.error_type = error_type


class Child:
    """One process that runs `target` (``module:callable``) and answers commands."""

    def __init__(
        self,
        target: str,
        settings: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        log: pathlib.Path | None = None,
        memory_limit: int | None = None,
    ):
        self.memory_limit = memory_limit  # resident bytes of the process
        self._log = open(log or os.devnull, "ab", buffering=0)  # noqa: SIM115 (handed to the process)
        command_read, self._command = os.pipe()
        self._answer, answer_write = os.pipe()
        code = [sys.executable, "-m", "chord_lab.measurement.serve", str(command_read), str(answer_write)]
        self._process = subprocess.Popen(
            [*code, target, json.dumps(dict(settings or {}))],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(command_read, answer_write),
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        os.close(command_read)
        os.close(answer_write)
        self._buffer = b""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def call(self, command: str, timeout_s: float, **arguments: Any) -> Any:
        """The command's result; raises `ChildFailure` when it fails, dies, hangs past the limit or grows too large."""
        line = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
        try:
            self._write(line)
            answer = json.loads(self._read_line(time.monotonic() + timeout_s, timeout_s))
        except (BrokenPipeError, EOFError):
            raise self._died() from None
        if "error" in answer:
            raise self._failed(answer)
        return answer["result"]

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self._command, view) :]

    def _read_line(self, deadline: float, timeout_s: float) -> bytes:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answer], [], [], POLL_S)
            if ready:
                chunk = os.read(self._answer, 1 << 20)
                if not chunk:
                    raise EOFError
                self._buffer += chunk
                continue
            if time.monotonic() > deadline:
                self.kill()
                raise ChildFailure(
                    "timeout", f"no answer within {timeout_s:g} s; stopped", rule="time limit", lost=True
                )
            self._check_memory()
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _check_memory(self) -> None:
        resident = resident_bytes(self.pid)
        if self.memory_limit is None or resident <= self.memory_limit:
            return
        self.kill()
        reason = f"host memory passed {self.memory_limit / 2**30:.1f} GiB; stopped"
        raise ChildFailure("out_of_resources", reason, rule="host memory", lost=True)

    def _died(self) -> ChildFailure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        self.kill()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return ChildFailure("crashed", f"killed by {signal.Signals(-code).name}", rule="crash", lost=True)
        return ChildFailure("crashed", f"the process ended by itself (exit code {code})", rule="crash", lost=True)

    def _failed(self, answer: dict[str, Any]) -> ChildFailure:
        error = answer["error"]
        lost = bool(answer.get("fatal"))
        if lost:
            self.kill()
        status = error["status"] or _status_of(error["bases"], error["message"], lost)
        rule = error["rule"] or error["type"]
        return ChildFailure(
            status, f"{error['type']}: {error['message']}", rule=rule, lost=lost, error_type=error["type"]
        )

    def kill(self) -> None:
        """End the process and whatever it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def close(self) -> None:
        """Let it end by itself, then make sure."""
        for fd in (self._command, self._answer):
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self.kill()
        self._log.close()


def _status_of(bases: str, message: str, lost: bool) -> str:
    """The record's status for an exception's class names and message."""
    if "CompilationError" in bases or "CompileError" in bases:
        return "compile_error"
    if "OutOfResources" in bases or "OutOfMemoryError" in bases or "MemoryError" in bases:
        return "out_of_resources"
    if "out of memory" in message.lower():
        return "out_of_resources"
    if lost:
        return "crashed"
    return "launch_error"


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0

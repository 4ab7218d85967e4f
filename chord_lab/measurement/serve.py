"""A child process that answers one command after another: ``python -m chord_lab.measurement.serve``.

Commands and answers are JSON lines on two pipes of their own, so that whatever a candidate prints on stdout or stderr
lands in a log and cannot be taken for a result.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from typing import Any

from chord_lab.records.record import plain


class Fatal(RuntimeError):
    """The process is no longer fit to go on (a poisoned CUDA context): answer, then exit."""


def main(arguments: list[str]) -> int:
    """Serve until the parent closes the command pipe."""
    command_fd, answer_fd, target, settings = (
        int(arguments[0]),
        int(arguments[1]),
        arguments[2],
        json.loads(arguments[3]),
    )
    _die_with_parent()
    commands = os.fdopen(command_fd, "r", encoding="utf-8")
    answers = os.fdopen(answer_fd, "w", encoding="utf-8")
    module, _, name = target.partition(":")
    handler: Any = None
    for line in commands:
        request = json.loads(line)
        try:
            if handler is None:  # built on the first command, so that a failure to build is an answer too
                handler = getattr(importlib.import_module(module), name)(**settings)
            answer = {"result": plain(getattr(handler, request["command"])(**request["arguments"]))}
        except BaseException as error:
            answer = {"error": _error(error), "fatal": isinstance(error, (Fatal, SystemExit)) or handler is None}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer.get("fatal"):
            return 1
    return 0


def _error(error: BaseException) -> dict[str, str]:
    cause = error.__cause__ if isinstance(error, Fatal) and error.__cause__ else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return {
        "type": type(cause).__name__,
        "bases": " ".join(base.__name__ for base in type(cause).__mro__),
        "message": (lines[0] if lines else type(cause).__name__)[:400],
        "status": getattr(cause, "status", ""),
        "rule": getattr(cause, "rule", ""),
    }


def _die_with_parent() -> None:
    """A child must not outlive a killed parent, even while a candidate hangs."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    # As a script this module is `__main__`, and its `Fatal` would be another class than the one that handlers raise.
    from chord_lab.measurement.serve import main as serve

    sys.exit(serve(sys.argv[1:]))

"""What is launched again and again, and which kernels it ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """A prepared GEMM: `run()` enqueues it on the current stream and returns at once."""

    run: Callable[[], Any]
    ran_kernel: str  # what runs, by its own name
    ran_gemm_type: str  # indexed | grouped_contiguous | grouped_masked
    num_tokens_padded: int  # rows that it works on, padding included
    poison: Callable[[], None] | None = None  # for a launch with an output of its own
    collect: Callable[[], None] | None = None  # and how to gather that into the point's output


class GemmTypeMismatch(RuntimeError):
    """Another interface ran than was asked for."""

    status = "launch_error"
    rule = "gemm type"


class launched_kernels:
    """Names of the Triton kernels that were launched inside the block: what ran, not what was asked."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def _seen(self, metadata: Any) -> None:
        try:
            name = metadata.get().get("name")
        except Exception:  # another Triton's metadata: an exception in a hook would fail the launch
            name = None
        if name and name not in self.names:
            self.names.append(name)

    def __enter__(self) -> list[str]:
        try:
            from triton import knobs

            self._hooks = knobs.runtime.launch_enter_hook
            self._hooks.add(self._seen)
        except (ImportError, AttributeError):  # no such hook in this Triton: the caller falls back to the family's name
            self._hooks = None
        return self.names

    def __exit__(self, *_: object) -> None:
        if self._hooks is not None:
            self._hooks.remove(self._seen)

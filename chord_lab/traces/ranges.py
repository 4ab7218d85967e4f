"""Which named ranges were open when a kernel was launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from chord_lab.traces.table import NVTX_SEPARATOR

if TYPE_CHECKING:
    import numpy as np


class OpenRanges(NamedTuple):
    """Step function over time: from ``times[i]`` on, ``codes[i]`` is the open path (0: none)."""

    times: np.ndarray  # float64 or int64, sorted
    codes: np.ndarray  # int32 into PathBook.paths

    def at(self, when: np.ndarray) -> np.ndarray:
        """The path code open at each time."""
        import numpy as np

        if not len(self.times):
            return np.zeros(len(when), "int32")
        index = np.searchsorted(self.times, when, side="right") - 1
        return np.where(index >= 0, self.codes[np.maximum(index, 0)], 0).astype("int32")


class PathBook:
    """Paths numbered once: code 0 is the empty path."""

    def __init__(self) -> None:
        self.paths: list[tuple[str, ...]] = [()]
        self._codes: dict[tuple[int, str], int] = {}

    def child(self, parent: int, name: str) -> int:
        """The code of ``parent``'s path with ``name`` inside it."""
        code = self._codes.get((parent, name))
        if code is None:
            code = self._codes[parent, name] = len(self.paths)
            self.paths.append((*self.paths[parent], name))
        return code

    def join(self, outer: int, inner: int) -> int:
        """The code of the outer path followed by the inner one."""
        for name in self.paths[inner]:
            outer = self.child(outer, name)
        return outer

    def labels(self) -> list[str]:
        """Each path as text, by code."""
        return [NVTX_SEPARATOR.join(path) for path in self.paths]


def open_ranges(
    starts: np.ndarray, ends: np.ndarray, names: list[str], book: PathBook
) -> tuple[OpenRanges, np.ndarray, np.ndarray]:
    """What is open when, and each range's own depth (outermost 0) and path code.

    Ranges of one thread nest; process-wide ranges may overlap, then the path is in order of their starts. A range that
    ends where another starts is closed first. An infinite end is a range that was still open when the capture ended.
    """
    import numpy as np

    count = len(starts)
    depths, own = np.zeros(count, "int32"), np.zeros(count, "int32")
    # (time, ends before starts; of two that end together the later start first, of two that start the longer first)
    order = np.lexsort(
        (
            np.concatenate([-starts, -ends]),
            np.concatenate([np.zeros(count, "int8"), np.ones(count, "int8")]),
            np.concatenate([ends, starts]),
        )
    )
    zero_length = (ends <= starts).tolist()  # its end sorts before its start: never opened, cannot hold a launch
    events, codes, stack = [], [], [(-1, 0)]
    for event in order.tolist():
        index = event if event < count else event - count
        if zero_length[index]:
            if event >= count:
                depths[index], own[index] = len(stack) - 1, book.child(stack[-1][1], names[index])
            continue
        if event >= count:
            code = book.child(stack[-1][1], names[index])
            depths[index], own[index] = len(stack) - 1, code
            stack.append((index, code))
        else:
            _close(stack, index, names, book)
        events.append(event)
        codes.append(stack[-1][1])
    times = np.concatenate([ends, starts])[np.asarray(events, "int64")]
    return OpenRanges(times, np.asarray(codes, "int32")), depths, own


def _close(stack: list[tuple[int, int]], index: int, names: list[str], book: PathBook) -> None:
    if stack[-1][0] == index:
        stack.pop()
        return
    at = next(i for i in range(len(stack) - 1, 0, -1) if stack[i][0] == index)
    code = stack[at - 1][1]
    later = stack[at + 1 :]
    del stack[at:]
    for other, _ in later:  # ranges that overlap it without nesting stay open
        code = book.child(code, names[other])
        stack.append((other, code))

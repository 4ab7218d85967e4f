"""Chrome-trace JSON of any size as a stream of events; what odd writers leave behind is mended or named."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from chord_lab.errors import UserError
from chord_lab.traces.text_files import open_bytes

Progress = Callable[[str], None]
BUFFER = 1 << 20
GZIP_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)


# What the streaming parser cannot survive: it keeps the path of every open level (the square of the depth in memory),
# and dies of a whole number with more digits than Python converts.
MOST_OPENED, MOST_DIGITS = 20_000, 4_000
AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")


class Head(NamedTuple):
    """What stands before the list of events, and where the list is."""

    prefix: str  # ijson's path of one event
    values: dict[str, Any]  # schemaVersion, deviceProperties, distributedInfo, ...


def read_events(
    path: Path, head: Head, fresh: Callable[[], Callable[[Any], None]], progress: Progress | None = None
) -> list[str]:
    """Give every event to a sink made by ``fresh``; the notes on what was mended.

    A second sink is made when the file turns out to need mending: then all events are read again from the start.
    Raises UserError for a cut-off or damaged file, with the number of whole events before the damage.
    """
    import ijson

    counted = _Counted(fresh(), progress)
    try:
        _feed(path, head.prefix, counted, mended=False)
        return []
    except (ijson.JSONError, UnicodeDecodeError) as error:
        if _cut_off(error):
            return _cut_off_notes(path, head, counted.seen)
        first = error
    counted = _Counted(fresh(), progress)
    try:
        mended = _feed(path, head.prefix, counted, mended=True)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        if _cut_off(error):
            return _cut_off_notes(path, head, counted.seen)
        raise UserError(f"{path}: damaged JSON after {counted.seen:,} whole events ({_one_line(error)})") from None
    # nothing mended, and yet it could be read: what the first pass could not hold were numbers beyond 64 bits
    return mended or [f"numbers that fit no 64 bits are in the file ({_one_line(first)})"]


def _cut_off_notes(path: Path, head: Head, seen: int) -> list[str]:
    if head.prefix != "item":
        raise UserError(f"{path}: cut-off JSON: it ends after {seen:,} whole events")
    # the array form of a Chrome trace may lack its closing bracket
    return [f"the file ends inside its list of events; the {seen:,} whole ones are shown"]


class _Counted:
    """A sink that counts, so that a damaged file can be told by how far it was good."""

    def __init__(self, sink: Callable[[Any], None], progress: Progress | None) -> None:
        self.sink, self.progress, self.seen = sink, progress, 0

    def __call__(self, event: Any) -> None:
        self.sink(event)
        self.seen += 1
        if self.progress and self.seen % 200_000 == 0:
            self.progress(f"{self.seen:,} events")


def _feed(path: Path, prefix: str, sink: _Counted, mended: bool) -> list[str]:
    import ijson

    try:
        with open_bytes(path) as stream:
            guarded = _Guarded(path, stream)
            source: Any = _Mended(guarded) if mended else guarded
            # exact numbers are slower, and needed only where some do not fit 64 bits
            for event in ijson.items(source, prefix, use_float=not mended, buf_size=BUFFER):
                sink(event)
    except GZIP_DAMAGE as error:
        raise UserError(f"{path}: damaged or cut-off gzip file after {sink.seen:,} events ({error})") from None
    return source.notes() if mended else []


def read_head(path: Path) -> Head:
    """The values before the events. Raises UserError for JSON that is no trace, naming its keys."""
    import ijson

    values: dict[str, Any] = {}
    builder: Any = None
    key = ""
    try:
        with open_bytes(path) as stream:
            for prefix, event, value in ijson.parse(_Mended(_Guarded(path, stream)), buf_size=1 << 14):
                if prefix == "" and event == "start_array":
                    return Head("item", {})
                if prefix == "" and event not in ("start_map", "map_key"):
                    break
                if prefix == "traceEvents":
                    if event != "start_array":
                        raise UserError(f"{path}: JSON, but its traceEvents is no list of events")
                    return Head("traceEvents.item", values)
                if event == "map_key" and prefix == "":
                    key, builder = value, ijson.ObjectBuilder()
                elif builder is not None:
                    builder.event(event, value)
                    values[key] = getattr(builder, "value", None)
    except GZIP_DAMAGE as error:
        raise UserError(f"{path}: damaged or cut-off gzip file ({error})") from None
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged or cut-off JSON ({_one_line(error)})") from None
    keys = ", ".join(list(values)[:5]) or "none"
    raise UserError(f"{path}: JSON, but no trace: it has no traceEvents (its keys: {keys})")


def late_value(path: Path, key: str) -> Any:
    """A top-level value that the file may have after its events: a second pass over it, None when there is none."""
    import ijson

    with open_bytes(path) as stream:
        return next(ijson.items(_Mended(_Guarded(path, stream)), key, buf_size=BUFFER), None)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def _cut_off(error: Exception) -> bool:
    text = str(error).lower()
    return "premature eof" in text or "incomplete" in text


class _Guarded:
    """A byte stream that is refused before the parser dies of it. Looks at whole blocks: a hundredth of the parsing."""

    def __init__(self, path: Path, stream: Any) -> None:
        self.path, self.stream, self.tail = path, stream, b""

    def read(self, size: int = -1) -> bytes:
        """The next bytes as they are. Raises UserError for nesting or numbers that no trace has."""
        block = self.stream.read(size)
        opened = block.count(b"[") + block.count(b"{") - block.count(b"]") - block.count(b"}")
        if opened > MOST_OPENED:
            raise UserError(f"{self.path}: JSON nested {opened:,} levels deep: no trace")
        digits = (self.tail + block).translate(AS_ZEROS)
        if b"0" * MOST_DIGITS in digits:
            raise UserError(f"{self.path}: JSON with a number of more than {MOST_DIGITS:,} digits: no trace")
        self.tail = block[-MOST_DIGITS:]
        return block


class _Mended:
    """A byte stream made readable: invalid UTF-8 replaced, bare ``nan`` and ``inf`` (written by some versions) null."""

    BARE = re.compile(rb'(":\s*)[+-]?(?:nan|inf|NaN|Infinity)(?:\(ind\))?(?=\s*[,}])')

    def __init__(self, stream: Any) -> None:
        self.stream, self.rest = stream, b""
        self.numbers = self.bytes_replaced = 0

    def read(self, size: int = -1) -> bytes:
        """At least one byte until the end; cut at a line's end so that no number or character is torn."""
        if size == 0:
            return b""
        while True:
            chunk = self.stream.read(max(size, 1 << 16))
            block = self.rest + chunk
            end = max(block.rfind(b"\n"), block.rfind(b"}")) + 1 if chunk else len(block)
            if end or not chunk:
                self.rest = block[end:]
                return self._mend(block[:end])
            self.rest = block

    def _mend(self, block: bytes) -> bytes:
        block, numbers = self.BARE.subn(rb"\1null", block)
        self.numbers += numbers
        try:
            block.decode("utf-8")
        except UnicodeDecodeError:
            text = block.decode("utf-8", "replace")
            self.bytes_replaced += text.count("\ufffd")
            block = text.encode()
        return block

    def notes(self) -> list[str]:
        """What was mended, for the reader of the table."""
        notes = []
        if self.numbers:
            notes.append(f"{self.numbers} bare nan or inf values, which JSON does not allow, were read as missing")
        if self.bytes_replaced:
            notes.append(f"{self.bytes_replaced} bytes that are not UTF-8 are shown as \ufffd")
        return notes

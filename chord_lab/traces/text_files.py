"""Text tables with other programs' chatter around them."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from chord_lab.errors import UserError

GZIP_MAGIC = b"\x1f\x8b"


class Table(NamedTuple):
    """One CSV table found in a text: its header, its rows, how many lines in between were something else."""

    header: list[str]
    rows: list[list[str]]
    chatter: int


def open_bytes(path: Path) -> io.BufferedIOBase:
    """The file's bytes, unpacked when it is gzip."""
    with open(path, "rb") as raw:
        packed = raw.read(2) == GZIP_MAGIC
    return gzip.open(path, "rb") if packed else open(path, "rb")  # type: ignore[return-value]


def read_text(path: Path, limit: int = 1 << 30) -> tuple[str, list[str]]:
    """The whole text and notes on its encoding: UTF-8 with or without a mark, UTF-16 (PowerShell's redirection)."""
    try:
        with open_bytes(path) as stream:
            raw = stream.read(limit + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged or cut-off gzip file ({error})") from None
    if len(raw) > limit:
        raise UserError(f"{path}: more than {limit >> 20} MiB of text; a CSV report of a profile is far smaller")
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        try:
            return raw.decode("utf-16"), ["the text was UTF-16"]
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: damaged UTF-16 text ({error.reason} at byte {error.start})") from None
    try:
        return raw.decode("utf-8-sig"), []
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace"), ["the text is not all UTF-8; unreadable bytes are shown as \ufffd"]


def find_tables(text: str, is_header: Callable[[list[str]], bool]) -> Iterator[Table]:
    """Every table whose header row ``is_header`` accepts. A row belongs to it while it has as many fields."""
    header: list[str] | None = None
    rows: list[list[str]] = []
    chatter = 0
    for line in _logical_lines(text):
        fields = split_row(line)
        if is_header(fields):
            if header is not None and fields != header:
                yield Table(header, rows, chatter)
                rows, chatter = [], 0
            header = fields
        elif header is not None and len(fields) == len(header):
            rows.append(fields)
        elif header is not None and line.strip() and not line.startswith("=="):  # ==PROF== lines are no loss
            chatter += 1
    if header is not None:
        yield Table(header, rows, chatter)


def split_row(line: str) -> list[str]:
    """One CSV line as fields; none when it is no CSV."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:  # a NUL byte, a field of megabytes: not a row of ours
        return []


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, where a quoted field that spans lines (a rule's description) is kept together.

    A stray quote in chatter must not swallow the table: a line that does not start like a row is never continued.
    """
    pending = ""
    for line in text.splitlines():
        joined = f"{pending}\n{line}" if pending else line
        if joined.count('"') % 2 and joined.startswith('"') and joined.count("\n") < 50:
            pending = joined
            continue
        pending = ""
        yield joined
    if pending:
        yield from pending.split("\n")

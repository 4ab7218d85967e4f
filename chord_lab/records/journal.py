"""The journal of a run: one JSON line a record, on disk before the next candidate starts."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from chord_lab.errors import UserError
from chord_lab.records.record import Record, plain
from chord_lab.records.rows import from_row, to_row

LOCK_NAME = ".lock"
JOURNAL_GLOB = "journal-*.jsonl"
MOST_NOTICES = 5  # of one file, one a line; the rest is counted


def now() -> str:
    """The time for `Record.date`: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_run_id() -> str:
    """Sorts by time, unique without coordination."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


@dataclass
class ReadResult:
    """Records that could be read, and one line for each thing that could not."""

    records: list[Record] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    samples: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # (key, repeat) of unfinished attempts

    def extend(self, other: ReadResult) -> None:
        """Add another file's result."""
        self.records += other.records
        self.notices += other.notices
        self.samples += other.samples


class Journal:
    """Append-only writer of one run's own file in `directory`. Only one run may write there at a time (see `lock`)."""

    def __init__(self, directory: pathlib.Path, run_id: str):
        self.path = pathlib.Path(directory) / f"journal-{run_id}.jsonl"
        self.count = 0
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the run)
        self._end = self._file.seek(0, os.SEEK_END)  # end of the last whole line

    def append(self, record: Record) -> None:
        """Write, flush and sync one record. On a full disk the half line is taken back and a UserError says so."""
        self._write(to_row(record), sync=True)
        self.count += 1

    def append_sample(self, key: str, sample: dict[str, Any]) -> None:
        """Write one repeat of an attempt that has no record yet: a killed run does not lose it."""
        self._write({"sample_of": key, **sample}, sync=False)

    def _write(self, row: dict[str, Any], *, sync: bool) -> None:
        line = json.dumps(plain(row), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
            if sync:
                os.fsync(self._file.fileno())
            self._end += len(line)
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise UserError(
                f"{self.path}: {os.strerror(error.errno)}; {self.count} records of this run are kept: "
                "free some space and run again with --resume"
            ) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def lock(directory: pathlib.Path) -> Iterator[None]:
    """Hold `directory` for one run. The system drops the lock with the process, so kill -9 leaves no stale one."""
    directory = pathlib.Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = open(directory / LOCK_NAME, "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
    except FileExistsError:
        raise UserError(f"{directory} is a file; a run needs a directory") from None
    except OSError as error:
        raise UserError(f"{directory} cannot hold a run: {error.strerror}") from None
    with opened as file:
        try:
            _lock_file(file)
        except OSError:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise UserError(
                f"{directory} is in use by {holder}; wait for it, or choose another --out directory"
            ) from None
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename if hasattr(os, 'uname') else 'this host'}")
            file.flush()
        except OSError as error:
            raise UserError(f"{directory} cannot hold a run: {error.strerror}") from None
        yield


def _lock_file(file: Any) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_journal(path: pathlib.Path) -> ReadResult:
    """Every whole record of a journal; a torn last line, foreign lines and broken bytes are named and skipped."""
    result = ReadResult()
    try:
        data = pathlib.Path(path).read_bytes()
    except OSError as error:
        result.notices.append(f"{path}: cannot be read ({error.strerror}); skipped")
        return result
    if not data.strip(b"\0\n\r\t "):
        result.notices.append(f"{path}: empty; no record in it")
        return result
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip(b"\0\r\t "):
            continue
        try:
            row = json.loads(line.strip(b"\0").decode())
            if isinstance(row, dict) and "sample_of" in row:
                result.samples.append((row.pop("sample_of"), row))
            else:
                result.records.append(from_row(row))
        except UnicodeDecodeError:
            result.notices.append(f"{path}: line {number}: not UTF-8; skipped")
        except (ValueError, RecursionError) as error:
            torn = number == len(lines)  # a whole line ends in a line feed
            what = "torn (the run was cut off while writing it)" if torn else _one_line(error)
            result.notices.append(f"{path}: line {number}: {what}; skipped")
    more = len(result.notices) - MOST_NOTICES
    if more > 0:
        result.notices[MOST_NOTICES:] = [f"{path}: {more} more lines are no records; skipped"]
    return result


def _one_line(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    return " ".join(str(error).split())[:200]

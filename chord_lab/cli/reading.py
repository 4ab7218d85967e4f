"""Reading what runs left: records, with a line for what had to be skipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chord_lab.cli import notes
from chord_lab.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa


def read_run(path: Path, hint: str = "") -> pa.Table:
    """All records under a run's directory, or of one file. What was skipped is noted, once there is anything to read.

    hint: what to do where there is nothing.

    Raises:
        UserError: no record; the message says why in one line.
    """
    from chord_lab.records import read_tables

    table, notices = read_tables(path)
    if not len(table):
        why = f": {_less(notices[0], path)}" if notices else ""
        more = f" (and {len(notices) - 1} more such lines)" if len(notices) > 1 else ""
        raise UserError(f"{path} holds no records{why}{more}{hint}")
    say(notices)
    return table


def _less(notice: str, path: Path) -> str:
    """The notice without the name that the sentence has already."""
    return notice.removeprefix(f"{path}: ").removesuffix("; skipped")


def say(remarks: Sequence[str]) -> None:
    """Remarks on stderr, a line each."""
    for remark in remarks:
        notes.print(remark, style="yellow", markup=False, highlight=False, soft_wrap=True)


def cut_short(directory: Path) -> bool:
    """Whether the run in a directory did not finish."""
    from chord_lab.sweeps.run import read_manifest

    return directory.is_dir() and bool(read_manifest(directory).get("partial"))

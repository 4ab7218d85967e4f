"""An Nsight Systems SQLite export as tables of whole numbers; what it lacks is said in notes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chord_lab.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
LAUNCHES = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
METADATA = ("META_DATA_EXPORT", "EXPORT_META_DATA")
FETCH = 2_000  # rows that are Python objects at a time: they stay in the allocator's caches
BLOCK = 200_000  # rows of an array that is worked on at a time
ABSENT = -(2**63)  # stands for NULL while a column is an integer array
PID_SHIFT = 24  # globalTid and globalPid end in a thread id of 24 bits; all above it names the process
Progress = Callable[[str], None]


class Export:
    """One open export: its tables, what was found, what was missing."""

    def __init__(self, database: sqlite3.Connection, path: Path, progress: Progress) -> None:
        self.database, self.path, self.progress = database, path, progress
        self.notes: list[str] = []
        tables = [
            str(row[0]) for row in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table','view')")
        ]
        self.columns = {t: self._columns_of(t) for t in tables}
        known = {
            KERNELS,
            *LAUNCHES,
            "StringIds",
            "NVTX_EVENTS",
            "META_DATA_EXPORT",
            "EXPORT_META_DATA",
            "META_DATA_CAPTURE",
        }
        if not known & set(tables):
            shown = ", ".join(sorted(tables)[:5]) or "none"
            raise UserError(f"{path}: an SQLite file, but not an Nsight Systems export (its tables: {shown})")
        if KERNELS in self.columns:
            missing = {"start", "end"} - self.columns[KERNELS]
            if missing or not {"demangledName", "shortName"} & self.columns[KERNELS]:
                lacks = ", ".join(sorted(missing)) or "demangledName or shortName"
                raise UserError(f"{path}: its {KERNELS} table has no column {lacks}: not an Nsight Systems export")

    def _columns_of(self, table: str) -> set[str]:
        quoted = table.replace('"', '""')
        return {str(row[1]) for row in self.database.execute(f'PRAGMA table_info("{quoted}")')}

    def facts(self) -> dict[str, Any]:
        """Tool, version and schema."""
        table = next((t for t in METADATA if t in self.columns), None)
        if table is None or not {"name", "value"} <= self.columns[table]:
            self.notes.append("no metadata table: the export's version is unknown")
            return {"tool": "Nsight Systems"}
        pairs = dict(self.database.execute(f"SELECT name, value FROM {table}").fetchall())
        return {
            "tool": str(pairs.get("EXPORT_PRODUCT_NAME") or "Nsight Systems"),
            "version": pairs.get("EXPORT_PRODUCT_VERSION"),
            "schema": pairs.get("EXPORT_SCHEMA_VERSION"),
        }

    def devices(self, device_ids: list[int]) -> str | None:
        """Names of these GPUs."""
        if not device_ids:
            return None
        ids = ", ".join(map(str, device_ids))
        if not {"id", "name"} <= self.columns.get("TARGET_INFO_GPU", set()):
            self.notes.append(f"the file does not name its GPU (no TARGET_INFO_GPU table); kernels ran on device {ids}")
            return None
        found = dict(self.database.execute("SELECT id, name FROM TARGET_INFO_GPU").fetchall())
        names = dict.fromkeys(str(found[i]) for i in device_ids if found.get(i))
        if not names:
            self.notes.append(f"TARGET_INFO_GPU has no row for device {ids}")
        return ", ".join(names) or None

    def integers(self, table: str, wanted: list[str], where: str = "") -> np.ndarray:
        """``[rows, len(wanted)]`` int64, ABSENT for NULL and for columns that this schema lacks."""
        import numpy as np

        have = self.columns[table]
        terms = ", ".join(f'COALESCE("{c}", {ABSENT})' if c in have else str(ABSENT) for c in wanted)
        rows = self.database.execute(f"SELECT {terms} FROM {table} {where}")
        parts = list(blocks(rows, self.progress, table))
        return np.concatenate(parts) if parts else np.empty((0, len(wanted)), "int64")

    def strings(self, ids: np.ndarray) -> dict[int, str]:
        """Texts of StringIds; an id without a row is named by its number."""
        wanted = {int(i) for i in ids}
        found: dict[int, str] = {}
        if "StringIds" in self.columns:
            found = {i: str(v) for i, v in self.database.execute("SELECT id, value FROM StringIds") if i in wanted}
        lost = wanted - set(found)
        if lost:
            self.notes.append(f"{len(lost)} names are not in StringIds and are shown by number")
        return found | {i: f"<string {i}>" for i in lost}


def blocks(rows: sqlite3.Cursor, progress: Progress, what: str) -> Iterator[np.ndarray]:
    """Rows of whole numbers as int64 arrays of at most BLOCK rows; few of them are Python objects at a time."""
    import numpy as np

    done, parts = 0, []
    while fetched := rows.fetchmany(FETCH):
        parts.append(np.array(fetched, dtype="int64"))
        done += len(fetched)
        if len(parts) * FETCH >= BLOCK:
            yield np.concatenate(parts)
            parts.clear()
            progress(f"{done:,} {what}")
    if parts:
        yield np.concatenate(parts)


def categorical(codes: np.ndarray, texts: list[str]) -> pd.Categorical:
    """Categories by code, where unlike codes may have the same text and "" means none."""
    import numpy as np
    import pandas as pd

    distinct = list(dict.fromkeys(t for t in texts if t))
    place = {t: i for i, t in enumerate(distinct)}
    remap = np.asarray([place.get(t, -1) for t in texts], "int32")
    used = remap[codes] if len(codes) else np.empty(0, "int32")
    return pd.Categorical.from_codes(used, categories=pd.Index(distinct, dtype=object)).remove_unused_categories()

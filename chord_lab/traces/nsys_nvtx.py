"""NVTX ranges of an Nsight Systems export: by thread for push/pop, by process for start/end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chord_lab.traces.nsys_database import ABSENT, PID_SHIFT, Export
from chord_lab.traces.ranges import PathBook, open_ranges
from chord_lab.traces.table import nvtx_frame

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

PUSH_POP, START_END, DOMAIN_CREATE = 59, 60, 75  # eventType; ENUM_NSYS_EVENT_TYPE of the export says the same
RANGES = f"WHERE eventType IN ({PUSH_POP}, {START_END})"
Opened = dict[tuple[str, int], Any]  # ("thread", globalTid) or ("process", pid) -> OpenRanges


def first_start(export: Export) -> int | None:
    """Nanoseconds at which the first range starts."""
    if "NVTX_EVENTS" not in export.columns:
        return None
    row = export.database.execute(f"SELECT MIN(start) FROM NVTX_EVENTS {RANGES}").fetchone()
    return None if row[0] is None else int(row[0])


def read_ranges(export: Export, origin: int, book: PathBook) -> tuple[pd.DataFrame, Opened]:
    """All ranges, and what was open when: by thread for push/pop, by process for start/end."""
    import numpy as np

    if "NVTX_EVENTS" not in export.columns:
        export.notes.append("no NVTX ranges: the export has no NVTX_EVENTS table")
        return nvtx_frame(), {}
    wanted = ["start", "end", "eventType", "globalTid", "domainId", "textId"]
    table = export.integers("NVTX_EVENTS", wanted, RANGES)
    if not len(table):
        export.notes.append("no NVTX ranges were recorded")
        return nvtx_frame(), {}
    names = _range_names(export, table[:, 5])
    start, end = table[:, 0], table[:, 1]
    still_open = end == ABSENT
    if still_open.any():
        export.notes.append(f"{int(still_open.sum())} NVTX ranges were still open when the capture ended")
    end = np.where(still_open, 2**62, end)
    opened: Opened = {}
    depth, path = np.zeros(len(table), "int32"), np.zeros(len(table), "int32")
    lanes = np.where(table[:, 2] == PUSH_POP, table[:, 3], table[:, 3] >> PID_SHIFT)
    for style, event_type in (("thread", PUSH_POP), ("process", START_END)):
        for lane in np.unique(lanes[table[:, 2] == event_type]).tolist():
            mine = np.flatnonzero((lanes == lane) & (table[:, 2] == event_type))
            steps, depth[mine], path[mine] = open_ranges(start[mine], end[mine], [names[i] for i in mine], book)
            opened[style, lane] = steps
    paths = book.labels()
    return _frame(export, table, origin, {"name": names, "depth": depth, "path": [paths[p] for p in path]}), opened


def _range_names(export: Export, text_ids: np.ndarray) -> list[str]:
    """Each range's own text, else its registered string."""
    import numpy as np

    has_text = "text" in export.columns["NVTX_EVENTS"]
    rows: Any = export.database.execute(f"SELECT text FROM NVTX_EVENTS {RANGES}") if has_text else ()
    texts = [row[0] for row in rows]
    used = np.unique(text_ids[text_ids != ABSENT])
    registered = export.strings(used) if len(used) else {}
    ids = text_ids.tolist()
    interned: dict[str, str] = {}
    names = []
    for i, text_id in enumerate(ids):
        text = texts[i] if texts and texts[i] is not None else registered.get(text_id, "<unnamed range>")
        names.append(interned.setdefault(str(text), str(text)))
    return names


def _domains(export: Export) -> dict[tuple[int, int], str]:
    """Domain names by (process, domain id)."""
    have = export.columns["NVTX_EVENTS"]
    if not {"domainId", "text", "globalTid"} <= have:
        return {}
    text = "COALESCE(e.text, s.value)" if "textId" in have and "StringIds" in export.columns else "e.text"
    join = "LEFT JOIN StringIds s ON s.id = e.textId" if "s.value" in text else ""
    rows = export.database.execute(
        f"SELECT e.globalTid, e.domainId, {text} FROM NVTX_EVENTS e {join} WHERE e.eventType = {DOMAIN_CREATE}"
    )
    return {(int(tid or 0) >> PID_SHIFT, int(domain or 0)): str(name) for tid, domain, name in rows if name}


def _frame(export: Export, table: np.ndarray, origin: int, columns: dict[str, Any]) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    start_us = (table[:, 0] - origin) / 1e3
    end_us = np.where(table[:, 1] == ABSENT, np.nan, (table[:, 1] - origin) / 1e3)
    domains = _domains(export)
    keys = zip((table[:, 3] >> PID_SHIFT).tolist(), table[:, 4].tolist(), strict=True)
    frame = nvtx_frame(
        {
            "name": pd.Categorical(columns["name"]),
            "start_us": start_us,
            "end_us": end_us,
            "time_us": end_us - start_us,
            "depth": columns["depth"],
            "path": pd.Categorical(columns["path"]),
            "thread": table[:, 3],
            "domain": pd.Categorical([domains.get(key, "") for key in keys]),
        }
    )
    return frame.sort_values(["start_us", "depth"], kind="stable", ignore_index=True)

"""The captures that ship with the project, or any folder of them: read without NVIDIA's packages."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chord_lab.errors import UserError
from chord_lab.traces.join import points_frame
from chord_lab.traces.reading import read_trace
from chord_lab.traces.stored import STORED_SUFFIX
from chord_lab.traces.table import Trace

if TYPE_CHECKING:
    import pandas as pd

TIMELINE_SUFFIXES = (".json", ".json.gz", ".sqlite")


@dataclass(frozen=True)
class Library:
    """Captures of one folder: counters by point, and files with a timeline."""

    folder: Path
    counters: dict[str, Trace]  # stem -> stored trace
    timelines: dict[str, Path]  # file name -> file, read when it is looked at
    points: pd.DataFrame  # `points_frame` of all counters
    notices: tuple[str, ...]  # files that could not be read, one line each

    def ceilings(self) -> dict[str, float]:
        """``{"copy": GB/s, "dense_bf16": TFLOPS}`` measured beside the captures; the best where several were."""
        found: dict[str, float] = {}
        for trace in self.counters.values():
            for name, value in (trace.facts.get("ceilings") or {}).items():
                if value is not None:
                    found[name] = max(found.get(name, 0.0), float(value))
        return found

    def source(self) -> str:
        """For under a figure: device, date, tool."""
        if not len(self.points):
            return f"no captures in {self.folder}"
        devices = ", ".join(dict.fromkeys(str(d) for d in self.points["device_name"]))
        dates = sorted({str(d)[:10] for d in self.points["date"]})
        tools = {f"{t.facts.get('tool', '')} {t.facts.get('version', '')}".strip() for t in self.counters.values()}
        return f"recorded on {devices}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {', '.join(sorted(tools))}"

    def timeline(self, name: str) -> Trace:
        """The trace of one of `timelines`."""
        if name not in self.timelines:
            raise UserError(
                f"{name!r} is no timeline of {self.folder}; there are: {', '.join(self.timelines) or 'none'}"
            )
        return read_trace(self.timelines[name])

    def opening(self) -> Trace:
        """What a first look opens: the first file with a timeline; without one the first counters, and a note says so.

        Raises:
            UserError: nothing in the folder could be read.
        """
        if self.timelines:
            return self.timeline(next(iter(self.timelines)))
        if not self.counters:
            raise UserError(f"no captures in {self.folder}: `make nsight` records them on a GPU")
        trace = next(iter(self.counters.values()))
        note = "no trace of a whole layer is recorded here, these are kernels alone; `make nsight` on a GPU records one"
        return replace(trace, notes=(note, *trace.notes))

    def identities(self) -> dict[str, dict[str, Any]]:
        """Every record's row that the counters know, by key."""
        rows = (row for trace in self.counters.values() for row in trace.identity if row)
        return {str(row["key"]): row for row in rows}


def shipped_folders() -> list[Path]:
    """Folders of captures under data/nsight, one a device: of CHORD_LAB_DATA, the checkout, or the current folder."""
    for root in _roots():
        folders = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
        if folders:
            return folders
    return []


def _roots() -> list[Path]:
    named = os.environ.get("CHORD_LAB_DATA")
    places = [Path(named)] if named else [Path(__file__).parents[2] / "data", Path.cwd() / "data"]
    return [place / "nsight" for place in places]


def load_library(folder: str | Path | None = None) -> Library:
    """The captures of a folder; those shipped for the first device when None.

    Raises UserError when there is no such folder. A file that cannot be read is a notice, not an end.
    """
    if folder is None:
        shipped = shipped_folders()
        if not shipped:
            looked = ", ".join(map(str, _roots()))
            raise UserError(f"no captures (looked in {looked}): `make nsight` records them on a GPU")
        folder = shipped[0]
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder of captures")
    counters: dict[str, Trace] = {}
    notices: list[str] = []
    for path in sorted(folder.glob(f"*{STORED_SUFFIX}")):
        if path.name.endswith(f".records{STORED_SUFFIX}"):
            continue
        try:
            counters[path.stem] = read_trace(path)
        except UserError as error:
            notices.append(str(error))
    timelines = {p.name: p for p in sorted(folder.iterdir()) if p.name.endswith(TIMELINE_SUFFIXES)}
    return Library(folder, counters, timelines, points_frame(counters.values()), tuple(notices))

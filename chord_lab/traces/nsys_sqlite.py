"""Nsight Systems' SQLite export (`nsys export --type sqlite`), schemas 2.9 to 3.25 and alike.

Tables are made lazily: one that is missing means that nothing of its kind was recorded, and is said in a note.
Times in the file are nanoseconds; a kernel's launch is found by (process, correlation id).
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from chord_lab.errors import UserError
from chord_lab.traces.nsys_database import ABSENT, KERNELS, LAUNCHES, PID_SHIFT, Export, Progress, blocks, categorical
from chord_lab.traces.nsys_nvtx import Opened, first_start, read_ranges
from chord_lab.traces.ranges import PathBook
from chord_lab.traces.table import Trace, dims, kernel_frame, metric_frame, nullable

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


def read_nsys_sqlite(path: Path, progress: Progress | None = None) -> Trace:
    """Kernels and NVTX ranges of an export. Raises UserError for any other SQLite file, by name."""
    try:
        database = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        raise UserError(f"{path}: SQLite cannot open it ({error})") from None
    database.text_factory = lambda raw: raw.decode("utf-8", "replace")
    try:
        return _trace(Export(database, path, progress or (lambda _: None)))
    except sqlite3.Error as error:
        reason = " ".join(str(error).split())[:200]  # it may quote a damaged schema, lines and all
        raise UserError(f"{path}: damaged or incomplete SQLite file ({reason})") from None
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: a column of the export holds something other than whole numbers ({error})") from None
    finally:
        database.close()


def _trace(export: Export) -> Trace:
    facts = export.facts()
    kernels = _Kernels(export)
    starts = [int(kernels.raw["start"].min())] if len(kernels.raw["start"]) else []
    ranges_start = first_start(export)
    origin = min([*starts, *([] if ranges_start is None else [ranges_start])], default=0)
    book = PathBook()
    nvtx, opened = read_ranges(export, origin, book)
    frame = kernels.frame(origin, book, opened)
    return Trace(
        kind="nsys-sqlite",
        path=export.path,
        device=export.devices(kernels.device_ids()),
        kernels=frame,
        nvtx=nvtx,
        metrics=metric_frame([]),
        notes=(*export.notes, "no hardware counters: Nsight Systems records times only"),
        facts=facts,
    )


class _Kernels:
    """The kernel table while it is read: compact arrays by column, launch configurations numbered."""

    def __init__(self, export: Export) -> None:
        self.export = export
        self.shapes: dict[tuple[int, ...], int] = {}
        self.raw = self._arrays()

    def device_ids(self) -> list[int]:
        """GPUs that ran kernels."""
        return sorted({shape[9] for shape in self.shapes if shape[9] != ABSENT})

    def _arrays(self) -> dict[str, np.ndarray]:
        """Compact arrays by column; the wide chunk of Python rows never lives longer than its own turn."""
        import numpy as np

        if KERNELS not in self.export.columns:
            self.export.notes.append(
                f"no kernels: the export has no {KERNELS} table (CUDA tracing off, or nothing was launched)"
            )
        have = self.export.columns.get(KERNELS, set())
        name = "demangledName" if "demangledName" in have else "shortName"
        shape = ["gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread"]
        shape += ["staticSharedMemory", "dynamicSharedMemory", "deviceId"]
        identity = ["start", "end", name, "streamId", "correlationId", "globalPid"]
        terms = [f'COALESCE("{c}", {ABSENT})' if c in have else str(ABSENT) for c in identity + shape]
        parts: list[np.ndarray] = []
        codes: list[np.ndarray] = []
        if have:
            rows = self.export.database.execute(f"SELECT {', '.join(terms)} FROM {KERNELS}")
            for block in blocks(rows, self.export.progress, "kernels"):
                parts.append(block[:, : len(identity)].copy())
                codes.append(self._shape_codes(block[:, len(identity) :]))
        table = np.concatenate(parts) if parts else np.empty((0, len(identity)), "int64")
        del parts
        raw = {c: table[:, i] for i, c in enumerate(["start", "end", "name", "stream", "correlation", "process"])}
        raw["shape"] = np.concatenate(codes) if codes else np.empty(0, "int32")
        return raw

    def _shape_codes(self, block: np.ndarray) -> np.ndarray:
        """One small number per launch configuration: a file has few, however many launches."""
        import numpy as np
        import pandas as pd

        weights = np.random.default_rng(0).integers(1, 2**62, block.shape[1]) | 1
        inverse, _ = pd.factorize(block @ weights)  # a row's digest: hashing is 10 times faster than sorting rows
        first = np.unique(inverse, return_index=True)[1]
        distinct = block[first]
        if not np.array_equal(distinct[inverse], block):  # two configurations of one digest: sort the rows after all
            distinct, inverse = np.unique(block, axis=0, return_inverse=True)
        known = [self.shapes.setdefault(tuple(row), len(self.shapes)) for row in distinct.tolist()]
        return np.asarray(known, "int32")[inverse.reshape(-1)]

    def _paths(self, opened: Opened, book: PathBook) -> np.ndarray:
        """Path code of each kernel: what was open on its launching thread at the launch."""
        import numpy as np
        import pandas as pd

        kernels = len(self.raw["start"])
        codes = np.zeros(kernels, "int32")
        if not opened or not kernels:
            return codes
        tables = [t for t in LAUNCHES if t in self.export.columns and "correlationId" in self.export.columns[t]]
        if not tables:
            self.export.notes.append("no CUDA runtime calls: kernels cannot be matched with NVTX ranges")
            return codes
        calls = np.concatenate([self.export.integers(t, ["correlationId", "start", "globalTid"]) for t in tables])
        calls = calls[calls[:, 0] != ABSENT]
        launch = _match(self.raw["correlation"], self.raw["process"], calls)
        lost = int((launch < 0).sum())
        if lost:
            self.export.notes.append(
                f"{lost} of {kernels} kernels have no launch call in the file: no NVTX path for them"
            )
        if not len(calls):
            return codes
        when, thread = calls[launch, 1], calls[launch, 2]
        for (style, lane), steps in sorted(opened.items()):  # "process" sorts before "thread": the outer path first
            mine = np.flatnonzero((launch >= 0) & ((thread if style == "thread" else thread >> PID_SHIFT) == lane))
            inner = steps.at(when[mine])
            inverse, pairs = pd.factorize(codes[mine].astype("int64") << 32 | inner)
            joined = [book.join(pair >> 32, pair & 0xFFFFFFFF) for pair in pairs.tolist()]
            codes[mine] = np.asarray(joined, "int32")[inverse]
        return codes

    def frame(self, origin: int, book: PathBook, opened: Opened) -> pd.DataFrame:
        """KERNEL_COLUMNS in order of start."""
        import numpy as np
        import pandas as pd

        raw = self.raw
        time_ns = raw["end"] - raw["start"]
        backwards = int((time_ns < 0).sum())
        if backwards:
            self.export.notes.append(f"{backwards} kernels end before they start: their time is left out")
        paths = self._paths(opened, book)
        name_codes, ids = pd.factorize(raw["name"])
        texts = self.export.strings(ids) if len(ids) else {}
        shapes = (
            np.asarray(list(self.shapes), "int64").reshape(-1, 10)[raw["shape"]]
            if len(self.shapes)
            else np.empty((0, 10), "int64")
        )
        static, dynamic = (np.where(shapes[:, c] == ABSENT, 0, shapes[:, c]) for c in (7, 8))
        frame = kernel_frame(
            {
                "name": categorical(name_codes, [texts[int(i)] for i in ids]),
                "start_us": (raw["start"] - origin) / 1e3,
                "time_us": np.where(time_ns < 0, np.nan, time_ns / 1e3),
                "grid": self._dims(raw["shape"], 0),
                "block": self._dims(raw["shape"], 3),
                "registers": nullable(shapes[:, 6], shapes[:, 6] == ABSENT, "Int32"),
                "smem_bytes": nullable(static + dynamic, (shapes[:, 7] == ABSENT) & (shapes[:, 8] == ABSENT), "Int64"),
                "device_index": nullable(shapes[:, 9], shapes[:, 9] == ABSENT, "Int16"),
                "stream": nullable(raw["stream"], raw["stream"] == ABSENT, "Int64"),
                "correlation": nullable(raw["correlation"], raw["correlation"] == ABSENT, "Int64"),
                "nvtx": categorical(paths, book.labels()),
            }
        )
        if len(frame) and (np.diff(raw["start"]) < 0).any():
            frame = frame.sort_values("start_us", kind="stable", ignore_index=True)
        return frame

    def _dims(self, shape_codes: np.ndarray, first: int) -> pd.Categorical:
        import numpy as np

        texts = ["" if ABSENT in s[first : first + 3] else dims(*s[first : first + 3]) for s in self.shapes]
        return categorical(shape_codes, texts) if texts else categorical(np.empty(0, "int32"), [""])


def _match(correlation: np.ndarray, process: np.ndarray, calls: np.ndarray) -> np.ndarray:
    """Row of ``calls`` (correlationId, start, globalTid) that launched each kernel, -1 for none.

    Correlation ids restart in each process; old exports have no globalPid, then the id alone decides.
    """
    import numpy as np

    if not len(calls):
        return np.full(len(correlation), -1)
    call_key, kernel_key = calls[:, 0], correlation
    if not (process == ABSENT).any():
        # pid and correlation in one number: processes are few, so they are numbered
        processes = np.unique(np.concatenate([process >> PID_SHIFT, calls[:, 2] >> PID_SHIFT]))
        width = max(int(call_key.max()), int(kernel_key.max())) + 1 if len(kernel_key) else 1
        if len(processes) * width < 2**62:
            call_key = call_key + np.searchsorted(processes, calls[:, 2] >> PID_SHIFT) * width
            kernel_key = kernel_key + np.searchsorted(processes, process >> PID_SHIFT) * width
    order = np.argsort(call_key, kind="stable")
    at = np.minimum(np.searchsorted(call_key, kernel_key, sorter=order), len(order) - 1)
    found = order[at]
    return np.where(call_key[found] == kernel_key, found, -1)

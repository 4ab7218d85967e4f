"""Tuning tables: which schedule serves which number of routed rows, in one JSON file per device and profile.

    {"format": "w4a16-moe-tuning/1", "device": "nvidia_h200", "profile": "h200_decode_ep8",
     "provenance": {"date": ..., "records": ..., "toolchain": ..., "method": ..., "tuned_for": ...},
     "tables": [{"problem": {...}, "rows": [{"min_m": 0, "max_m": 160, "schedule": {...}, "measured_m": [160],
                                             "verdict": "win", "note": ""}, ..., {"min_m": 400, "max_m": null, ...}]}]}

A row covers min_m < routed_m <= max_m. Rows start at 0, neither gap nor overlap, and the last is open (max_m null).
"""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from .problem import MoeProblem
from .profiles import PROFILES, Profile, get_profile
from .schedule import Kernel, Schedule

FORMAT = "w4a16-moe-tuning/1"
VERDICTS = ("win", "tie", "default")  # default: a row pinned to the default schedule without a winner


@dataclass(frozen=True, kw_only=True)
class TuningRow:
    """The schedule for min_m < routed_m <= max_m."""

    min_m: int
    max_m: int | None  # None: open
    schedule: Schedule
    measured_m: tuple[int, ...] = ()  # routed_m of the measurements behind the row
    verdict: str = "win"
    note: str = ""

    def covers(self, routed_m: int) -> bool:
        """Whether the row serves that many rows."""
        return self.min_m < routed_m and (self.max_m is None or routed_m <= self.max_m)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "min_m": self.min_m,
            "max_m": self.max_m,
            "schedule": self.schedule.to_dict(),
            "measured_m": list(self.measured_m),
            "verdict": self.verdict,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class ProblemTable:
    """The rows of one problem, checked: every routed_m of at least 1 has exactly one."""

    problem: MoeProblem
    rows: tuple[TuningRow, ...]

    def __post_init__(self) -> None:
        where = f"table of {_shape(self.problem)}"
        if not self.rows:
            raise ValueError(f"{where} has no rows")
        if self.rows[0].min_m != 0:
            raise ValueError(f"{where}: the first row starts at min_m {self.rows[0].min_m}, not 0")
        for row, following in zip(self.rows, self.rows[1:], strict=False):
            if row.max_m is None:
                raise ValueError(f"{where}: the row after min_m {row.min_m} is open but not the last")
            if following.min_m != row.max_m:
                kind = "gap" if following.min_m > row.max_m else "overlap"
                raise ValueError(f"{where}: {kind} between max_m {row.max_m} and the next min_m {following.min_m}")
        for row in self.rows:
            if row.max_m is not None and row.max_m <= row.min_m:
                raise ValueError(f"{where}: row ({row.min_m}, {row.max_m}] covers nothing")
            outside = [m for m in row.measured_m if not row.covers(m)]
            if outside:
                raise ValueError(f"{where}: measured_m {outside[0]} lies outside its row ({row.min_m}, {row.max_m}]")
        if self.rows[-1].max_m is not None:
            raise ValueError(f"{where}: the last row ends at {self.rows[-1].max_m}; it must be open (max_m null)")

    def row_for(self, routed_m: int) -> TuningRow:
        """The one row that serves ``routed_m`` >= 1."""
        if routed_m < 1:
            raise ValueError(f"routed_m={routed_m}: rows serve 1 and more; 0 rows need no launch")
        edges = [row.max_m for row in self.rows if row.max_m is not None]
        return self.rows[bisect_left(edges, routed_m)]

    def measured_m(self) -> list[int]:
        """Every measured routed_m behind the table, ascending."""
        return sorted({m for row in self.rows for m in row.measured_m})


@dataclass(frozen=True, kw_only=True)
class TuningFile:
    """All tables of one device and profile."""

    device: str
    profile: Profile
    tables: tuple[ProblemTable, ...]
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[MoeProblem] = set()
        for table in self.tables:
            if table.problem in seen:
                raise ValueError(f"two tables for {_shape(table.problem)}")
            seen.add(table.problem)
            for row in table.rows:
                if row.schedule.kernel not in self.profile.kernels:
                    raise ValueError(_foreign_kernel(row.schedule.kernel, self.profile))

    def table_for(self, problem: MoeProblem) -> ProblemTable | None:
        """The table of that problem; one that differs in top_k alone (which rows of x are shared) serves as well."""
        same = [t for t in self.tables if t.problem == problem]
        alike = [t for t in self.tables if _but_top_k(t.problem) == _but_top_k(problem)]
        return next(iter(same or alike), None)

    def to_dict(self) -> dict[str, Any]:
        """The file's JSON."""
        return {
            "format": FORMAT,
            "device": self.device,
            "profile": self.profile.name,
            "provenance": self.provenance,
            "tables": [
                {"problem": t.problem.to_dict(), "rows": [row.to_dict() for row in t.rows]} for t in self.tables
            ],
        }

    def save(self, path: str | Path) -> None:
        """Write to a temporary name, then rename."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def load(path: str | Path, *, profile: str | None = None, device: str | None = None) -> TuningFile:
    """Read and check a file. Every refusal is a ValueError of one line that starts with the path.

    ``profile`` and ``device``, when given, must be the file's: weights packed for one profile cannot run another's
    kernels.
    """
    path = Path(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({str(error).splitlines()[0]})") from None
    try:
        file = from_dict(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if profile is not None and file.profile.name != profile:
        raise ValueError(f"{path}: is for profile {file.profile.name}, asked for profile {profile}")
    if device is not None and file.device != device:
        raise ValueError(f"{path}: is for device {file.device}, asked for device {device}")
    return file


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys stand once; JSON's reader would drop the first of two."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in made if keys.count(key) > 1)!r} stands twice")
    return made


def from_dict(raw: Any) -> TuningFile:
    """The checked file behind its JSON value."""
    _fields(raw, "file", required=("format", "device", "profile", "tables"), optional=("provenance",))
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']!r}; this version reads {FORMAT!r}")
    if not isinstance(raw["device"], str) or not raw["device"]:
        raise ValueError(f"device {raw['device']!r} must be a device slug such as nvidia_h200")
    provenance = raw.get("provenance", {})
    if not isinstance(provenance, dict):
        raise ValueError("provenance must be an object")
    profile = get_profile(raw["profile"]) if isinstance(raw["profile"], str) else _refuse_profile(raw["profile"])
    tables = tuple(_table(entry, profile) for entry in _list(raw["tables"], "tables"))
    return TuningFile(device=raw["device"], profile=profile, provenance=provenance, tables=tables)


def _table(raw: Any, profile: Profile) -> ProblemTable:
    _fields(raw, "table", required=("problem", "rows"))
    _fields(raw["problem"], "problem", required=("num_experts", "N", "K"), optional=("group_size", "top_k"))
    problem = MoeProblem(**raw["problem"])
    return ProblemTable(problem=problem, rows=tuple(_row(entry, profile) for entry in _list(raw["rows"], "rows")))


def _row(raw: Any, profile: Profile) -> TuningRow:
    _fields(raw, "row", required=("min_m", "max_m", "schedule"), optional=("measured_m", "verdict", "note"))
    schedule = raw["schedule"]
    kernel = str(schedule.get("kernel")) if isinstance(schedule, dict) else ""
    if kernel in get_args(Kernel) and kernel not in profile.kernels:
        raise ValueError(_foreign_kernel(kernel, profile))
    measured = _list(raw.get("measured_m", []), "measured_m")
    for name, value in (("min_m", raw["min_m"]), *(("measured_m", m) for m in measured)):
        _whole(name, value)
    if raw["max_m"] is not None:
        _whole("max_m", raw["max_m"])
    if raw.get("verdict", "win") not in VERDICTS:
        raise ValueError(f"verdict {raw['verdict']!r}: legal are {', '.join(VERDICTS)}")
    if not isinstance(schedule, dict):
        raise ValueError(f"schedule must be an object, not {type(schedule).__name__}")
    return TuningRow(
        min_m=raw["min_m"],
        max_m=raw["max_m"],
        schedule=Schedule.from_dict(schedule),
        measured_m=tuple(measured),
        verdict=raw.get("verdict", "win"),
        note=str(raw.get("note", "")),
    )


def _fields(raw: Any, what: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    if not isinstance(raw, dict):
        raise ValueError(f"{what} must be an object, not {type(raw).__name__}")
    for name in required:
        if name not in raw:
            raise ValueError(f"{what} lacks the field {name!r}")
    foreign = sorted(set(raw) - set(required) - set(optional))
    if foreign:
        raise ValueError(f"{what} has the unknown field {foreign[0]!r}; known: {', '.join((*required, *optional))}")


def _list(raw: Any, what: str) -> list[Any]:
    if not isinstance(raw, list):
        raise ValueError(f"{what} must be a list, not {type(raw).__name__}")
    return raw


def _whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, not {value!r}")


def _refuse_profile(value: Any) -> Profile:
    raise ValueError(f"profile {value!r} must be one of {', '.join(PROFILES)}")


def _foreign_kernel(kernel: str, profile: Profile) -> str:
    homes = ", ".join(p.name for p in PROFILES.values() if kernel in p.kernels)
    own = ", ".join(profile.kernels)
    return f"a row for kernel {kernel} (profiles {homes}) cannot serve profile {profile.name} (kernels {own})"


def _but_top_k(problem: MoeProblem) -> tuple[int, int, int, int]:
    return problem.num_experts, problem.N, problem.K, problem.group_size


def _shape(problem: MoeProblem) -> str:
    return f"E={problem.num_experts} N={problem.N} K={problem.K} top_k={problem.top_k}"

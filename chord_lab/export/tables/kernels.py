"""Tables in the kernel package's own format, written atomically, with provenance, and proved against the resolver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from w4a16_moe.devices import DEVICES
from w4a16_moe.legality import why_illegal
from w4a16_moe.problem import MoeProblem
from w4a16_moe.profiles import get_profile
from w4a16_moe.resolve import BUNDLED, resolve_schedule
from w4a16_moe.schedule import Schedule
from w4a16_moe.tables import ProblemTable, TuningFile, TuningRow, load

from chord_lab.errors import UserError
from chord_lab.export.tables.beside import beside
from chord_lab.export.tables.points import TablePoint, table_rows


@dataclass(frozen=True, kw_only=True)
class KernelTables:
    """Everything an export of one device and profile needs."""

    device: str  # slug
    profile: str
    points: tuple[TablePoint, ...]
    provenance: dict[str, Any]


def package_path(device: str, profile: str, root: Path | None = None) -> Path:
    """Where the resolver looks for a table: in the kernel package, or under another `root`."""
    return (root or BUNDLED) / device / f"{profile}.json"


def build(tables: KernelTables, *, merge: bool = False, existing: TuningFile | None = None) -> TuningFile:
    """The tuning file. Of `existing`, tables of other problems are kept, and rows beyond what was tried (`beside`).

    Raises:
        UserError: no point, a schedule that is illegal there, or one of another profile's kernels.
    """
    if not tables.points:
        raise UserError(f"nothing to export for profile {tables.profile}: no point was measured")
    by_problem: dict[MoeProblem, list[TablePoint]] = {}
    for point in tables.points:
        by_problem.setdefault(point.problem, []).append(point)
    made, old_rows = [], []
    for problem, points in by_problem.items():
        rows = table_rows([_with_default(p, tables) for p in points], merge=merge)
        for row in rows:
            _require_legal(row.schedule, problem, tables)
        before = next((t.rows for t in existing.tables if t.problem == problem), ()) if existing else ()
        joined = beside(before, rows, [p.routed_m for p in points])
        old_rows += [f"{_shape(problem)} ({r.min_m}, {r.max_m or 'open'}]" for r in joined.kept]
        made.append(ProblemTable(problem=problem, rows=joined.rows))
    kept = [t for t in existing.tables if t.problem not in by_problem] if existing else []
    made.sort(key=lambda t: (t.problem.num_experts, -t.problem.N * t.problem.K, t.problem.top_k))
    provenance = dict(tables.provenance)
    if (kept or old_rows) and existing:
        shapes = [_shape(t.problem) for t in kept]
        provenance["kept"] = {"tables": shapes, "rows": old_rows, "provenance": existing.provenance}
    return TuningFile(
        device=tables.device, profile=get_profile(tables.profile), tables=(*made, *kept), provenance=provenance
    )


def legal_points(tables: KernelTables) -> tuple[KernelTables, list[str]]:
    """The same with winners that this version calls illegal taken out, and a remark for each.

    Records outlive rules: what ran when it was recorded may be refused by a later kernel. The default then stays.
    """
    kept, remarks = [], []
    for point in tables.points:
        reason = _why_illegal(point.schedule, point.problem, tables) if point.schedule else None
        if reason and point.schedule:
            place = f"{point.projection} at {point.routed_m} rows"
            remarks.append(
                f"{place}: {point.schedule.label()} is illegal in this version ({reason}); the default stays"
            )
            point = replace(point, schedule=None, verdict="none", time_us=None, within=frozenset())  # noqa: PLW2901
        legal = frozenset(s for s in point.within if not _why_illegal(s, point.problem, tables))
        kept.append(replace(point, within=legal))
    return replace(tables, points=tuple(kept)), remarks


def _with_default(point: TablePoint, tables: KernelTables) -> TablePoint:
    """A point without a winner needs a default that runs: the recorded one, else what the package chooses there."""
    if point.schedule or (point.default and not _why_illegal(point.default, point.problem, tables)):
        return point
    resolved = resolve_schedule(point.problem, max(1, point.routed_m), tables.profile, tables.device)
    return replace(point, default=resolved.schedule)


def _why_illegal(schedule: Schedule, problem: MoeProblem, tables: KernelTables) -> str | None:
    """Why the device's kernels refuse it; None if they do not, or if the device is unknown."""
    device = DEVICES.get(tables.device)
    illegal = why_illegal(schedule, problem, get_profile(tables.profile), device) if device else None
    return str(illegal) if illegal else None


def _require_legal(schedule: Schedule, problem: MoeProblem, tables: KernelTables) -> None:
    profile = get_profile(tables.profile)
    if schedule.kernel not in profile.kernels:
        raise UserError(
            f"schedule {schedule.label()} is another profile's: {tables.profile} runs {', '.join(profile.kernels)}"
        )
    reason = _why_illegal(schedule, problem, tables)
    if reason:
        raise UserError(f"schedule {schedule.label()} is illegal for {_shape(problem)} in {tables.profile}: {reason}")


def write(file: TuningFile, path: Path, points: Iterable[TablePoint]) -> int:
    """Write atomically, then prove that the resolver serves every point's row. Returns the number of points proved.

    Raises:
        UserError: the file cannot be written, or the resolver disagrees (the file is left for inspection).
    """
    try:
        file.save(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    proved = 0
    for point in points:
        resolved = resolve_schedule(point.problem, point.routed_m, file.profile, file.device, tables=path)
        table = file.table_for(point.problem)
        assert table is not None
        expected = table.row_for(point.routed_m).schedule
        if resolved.schedule != expected or resolved.table != str(path):
            raise UserError(
                f"{path}: at {point.routed_m} rows the resolver gives "
                f"{resolved.schedule.label() if resolved.schedule else 'nothing'}, the table {expected.label()}"
            )
        proved += 1
    return proved


class Difference(NamedTuple):
    """A range of routed_m where two files disagree."""

    problem: str
    min_m: int
    max_m: int | None  # None: open
    old: str | None  # schedule label; None: no table there before
    new: str | None


def differences(old: TuningFile | None, new: TuningFile) -> list[Difference]:
    """Where the schedule changes, in ranges min_m < routed_m <= max_m."""
    found = []
    for table in new.tables:
        before = old.table_for(table.problem) if old else None
        rows = _overlay(before.rows if before else (), table.rows)
        found += [Difference(_shape(table.problem), *row) for row in rows if row[2] != row[3]]
    return found


def _overlay(
    old: Sequence[TuningRow], new: Sequence[TuningRow]
) -> list[tuple[int, int | None, str | None, str | None]]:
    """Ranges in which neither side changes, neighbours with the same pair joined."""
    edges = sorted({row.max_m for row in (*old, *new) if row.max_m is not None})
    ranges: list[tuple[int, int | None, str | None, str | None]] = []
    for low, high in zip([0, *edges], [*edges, None], strict=True):
        inside = low + 1
        pair = (_label_at(old, inside), _label_at(new, inside))
        if ranges and ranges[-1][2:] == pair:
            ranges[-1] = (ranges[-1][0], high, *pair)
        else:
            ranges.append((low, high, *pair))
    return ranges


def _label_at(rows: Sequence[TuningRow], routed_m: int) -> str | None:
    return next((row.schedule.label() for row in rows if row.covers(routed_m)), None)


class Check(NamedTuple):
    """Proof that a file serves every number of rows once, as the resolver does."""

    path: str
    device: str
    profile: str
    tables: int
    rows: int
    checked_m: tuple[int, int]
    unsupported: list[str]  # rows that no measured point supports
    warnings: list[str]


def check(path: str | Path, *, largest: int = 20000) -> Check:
    """Every routed_m from 0 to `largest`: exactly one row covers it (none covers 0), and the resolver gives that row.

    Raises:
        UserError: not a table of the package, or a disagreement; the message says where.
    """
    file = load_table(path)
    unsupported, warnings = [], []
    for table in file.tables:
        _check_table(file, table, Path(path), largest)
        unsupported += [
            f"{_shape(table.problem)} ({row.min_m}, {'open' if row.max_m is None else row.max_m}]"
            for row in table.rows
            if not row.measured_m
        ]
        device = DEVICES.get(file.device)
        for row in table.rows if device else ():
            illegal = why_illegal(row.schedule, table.problem, file.profile, device)  # type: ignore[arg-type]
            if illegal:
                warnings.append(f"{_shape(table.problem)} {row.schedule.label()} is illegal: {illegal}")
    if file.device not in DEVICES:
        warnings.append(f"device {file.device} is unknown here: legality of its schedules was not checked")
    rows = sum(len(table.rows) for table in file.tables)
    return Check(str(path), file.device, file.profile.name, len(file.tables), rows, (0, largest), unsupported, warnings)


def _check_table(file: TuningFile, table: ProblemTable, path: Path, largest: int) -> None:
    where = f"{path}: {_shape(table.problem)}"
    if resolve_schedule(table.problem, 0, file.profile, file.device, tables=path).rule != "empty":
        raise UserError(f"{where}: 0 rows must resolve to an empty result")
    edges = [m for row in table.rows for m in (row.min_m, row.max_m or 0)]
    beyond = [m + d for m in edges for d in (0, 1) if m + d > largest]
    for routed_m in (*range(1, largest + 1), *sorted(set(beyond)), 2**30, 2**30 + 1):
        covering = [row for row in table.rows if row.covers(routed_m)]
        if len(covering) != 1:
            raise UserError(f"{where}: {len(covering)} rows cover routed_m {routed_m}; there must be exactly one")
        resolved = resolve_schedule(table.problem, routed_m, file.profile, file.device, tables=path)
        if resolved.schedule != covering[0].schedule or resolved.row != covering[0]:
            raise UserError(f"{where}: the resolver and the row disagree at routed_m {routed_m}")


def load_table(path: str | Path) -> TuningFile:
    """A table of the kernel package; its refusals as one line.

    Raises:
        UserError: see `w4a16_moe.tables.load`.
    """
    try:
        return load(path)
    except ValueError as error:
        raise UserError(str(error)) from None


def _shape(problem: MoeProblem) -> str:
    return f"E={problem.num_experts} N={problem.N} K={problem.K}"

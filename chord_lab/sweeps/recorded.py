"""Plans from records: what was recorded of a scenario, newest run first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from chord_lab.errors import UserError
from chord_lab.records.decode import decode, group
from chord_lab.records.record import Environment
from chord_lab.routing.draws import canonical_draw
from chord_lab.sweeps.plan import Plan

if TYPE_CHECKING:
    import pyarrow as pa

LIKENESS_COLUMNS = tuple(name for name in Environment.__dataclass_fields__ if name not in ("python", "peers"))


def recorded_scenarios(table: pa.Table) -> list[str]:
    """Scenarios that the table has records of."""
    return sorted(name for name in table["scenario"].unique().to_pylist() if name)


def of_scenario(
    table: pa.Table,
    scenario: str,
    *,
    tokens: str | Sequence[int] = "all",
    draws: Sequence[str] | None = None,
    projections: Sequence[str] | None = None,
    profile: str | None = None,
    kernels: Sequence[str] | None = None,
    seed: int | None = None,
) -> tuple[pa.Table, list[str]]:
    """A scenario's rows and its run's ceilings; where a point was recorded by several runs, the newest. And remarks."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def one_of(column: str, values: Sequence[object]) -> pa.ChunkedArray:
        words = table[column].cast(table.schema.field(column).type)
        kind = words.type.value_type if pa.types.is_dictionary(words.type) else words.type
        return pc.is_in(words.cast(kind), value_set=pa.array(list(values), kind))

    mask = one_of("scenario", [scenario])
    if draws is not None:
        asked = {canonical_draw(draw) for draw in draws}
        have = table["draw"].unique().to_pylist()
        named = [draw for draw in have if draw and canonical_draw(str(draw)) in asked]
        mask = pc.and_(mask, one_of("draw", named))
    for column, values in (("projection", projections), ("profile", [profile] if profile else None)):
        if values is not None:
            mask = pc.and_(mask, one_of(column, values))
    for column, numbers in (("num_tokens", None if isinstance(tokens, str) else tokens), ("seed", seed)):
        if numbers is not None:
            mask = pc.and_(mask, one_of(column, [numbers] if isinstance(numbers, int) else numbers))
    if kernels is not None:  # the default stays to be beaten, and peers come along
        stays = pc.or_(pc.fill_null(table["default"], False), pc.invert(one_of("kind", ["candidate"])))
        mask = pc.and_(mask, pc.or_(stays, pc.fill_null(one_of("kernel", kernels), False)))
    chosen = table if pc.all(mask).as_py() else table.filter(mask)
    if not len(chosen):
        raise UserError(_why_none(table, scenario, tokens, draws, projections, profile, kernels, seed))
    chosen, remarks = newest_runs(chosen)
    run_ids = chosen["run_id"].unique().to_pylist()
    ceilings = table.filter(pc.and_(one_of("run_id", run_ids), one_of("kind", ["ceiling"])))
    if not len(ceilings):
        return chosen, remarks
    return pa.concat_tables([chosen, ceilings]).unify_dictionaries().combine_chunks(), remarks


def _why_none(table: pa.Table, scenario: str, *chosen: object) -> str:
    """What there is instead: other scenarios, or other points of this one."""
    import pyarrow.compute as pc

    names = recorded_scenarios(table)
    if scenario not in names:
        have = f"recorded are: {', '.join(names) or 'none'}"
        return f"no records of {scenario}; {have}; --source predict needs none of its own, --source live a GPU"
    rows = table.filter(pc.equal(table["scenario"].cast("string"), scenario))
    columns = ("num_tokens", "draw", "seed", "projection", "profile")
    have = "; ".join(f"{name} {', '.join(map(str, sorted(rows[name].unique().to_pylist())))}" for name in columns)
    lists = [v if isinstance(v, Sequence) and not isinstance(v, str) else [v] for v in chosen if v not in (None, "all")]
    wanted = "; ".join(", ".join(map(str, values)) for values in lists)
    return f"no records of {scenario} at {wanted}; recorded: {have}"


def newest_runs(table: pa.Table) -> tuple[pa.Table, list[str]]:
    """Of each point, the rows of the newest run in one environment; a remark says what was left out.

    A prediction never takes the place of a measurement, however new it is.
    """
    decoded = decode(table)
    runs, first = group(table.select(["run_id", *LIKENESS_COLUMNS]))
    dates, sources = (table[name].take(first).to_pylist() for name in ("date", "source"))
    ages = np.array([f"{source != 'predicted':d} {date}" for source, date in zip(sources, dates, strict=True)])
    by_age = np.argsort(np.argsort(ages, kind="stable"), kind="stable")  # rank of each run, newest highest
    age = by_age[runs]
    points = decoded.point_of_row
    newest = np.full(len(decoded.points) + 1, -1)
    candidates = np.array([c.kind == "candidate" for c in decoded.candidates] or [False])
    counts = (points >= 0) & candidates[decoded.candidate_of_row]
    np.maximum.at(newest, points[counts], age[counts])
    keep = (points < 0) | (newest[points] < 0) | (age == newest[points])
    if keep.all():
        return table, []
    return table.filter(keep), [
        f"{int((~keep).sum())} records of older or predicted runs at the same points are left out"
    ]


def recorded_plan(table: pa.Table) -> Plan:
    """The plan that tries again what the table holds; defaults are those of the time of recording."""
    decoded = decode(table)
    is_default = table["default"].combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)
    ours = np.array([c.kind == "candidate" for c in decoded.candidates] or [False])  # peers come along by themselves
    rows = np.flatnonzero((decoded.point_of_row >= 0) & ours[decoded.candidate_of_row])
    chosen = decoded.candidate_of_row[rows].astype(np.int32)
    flagged = is_default[rows]
    # a candidate that is the default somewhere stands in the list a second time, marked as such
    twins = np.unique(chosen[flagged])
    candidates = [*decoded.candidates, *(replace(decoded.candidates[i], default=True) for i in twins)]
    chosen[flagged] = len(decoded.candidates) + np.searchsorted(twins, chosen[flagged])
    pairs = np.stack([decoded.point_of_row[rows].astype(np.int32), chosen], axis=1)
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    pairs = pairs[order]
    fresh = np.ones(len(pairs), dtype=bool)
    fresh[1:] = (np.diff(pairs, axis=0) != 0).any(axis=1)
    return Plan(decoded.points, candidates, pairs[fresh])

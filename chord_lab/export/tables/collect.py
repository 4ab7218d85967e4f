"""From a run's records to what the exporters need: one set of points per device and profile, with its provenance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from w4a16_moe.devices import device_slug
from w4a16_moe.problem import MoeProblem
from w4a16_moe.profiles import PROFILES

from chord_lab import __version__
from chord_lab.analysis.selection import METHOD_COLUMNS, is_missing
from chord_lab.errors import UserError
from chord_lab.export.tables.kernels import KernelTables
from chord_lab.export.tables.points import Missing, TablePoint, missing_points
from chord_lab.records import to_frame
from chord_lab.routing.draws import canonical_draw
from chord_lab.scenarios import get_scenario
from chord_lab.sweeps.recorded import newest_runs
from chord_lab.sweeps.winners import MARGIN, Winner, winners

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class Collected(NamedTuple):
    """What a run offers for export."""

    tables: list[KernelTables]
    winners: list[Winner]  # behind the tables, one a point
    missing: list[Missing]
    remarks: list[str]
    frame: pd.DataFrame  # the records behind it, newest run of each chosen point, failures and peers included


def collect(
    table: pa.Table,
    *,
    draw: str | None = None,
    profile: str | None = None,
    scenario: str | None = None,
    mixed: Sequence[Winner] | None = None,
    traffic: dict[str, Any] | None = None,
) -> Collected:
    """Winners of one routing draw, by device and profile.

    draw: the one that the table is for; when None, the scenario's own draw, or the only one recorded. mixed: verdicts
    for a mix of draws (`sweeps.traffic`), which then make the table; traffic: that mix, for the table's header.

    Raises:
        UserError: no candidates, an unknown draw, or several draws and no rule to choose one.
    """
    table, remarks = newest_runs(table)
    frame = to_frame(table)
    known = winners(table) if mixed is None else mixed
    found = [w for w in known if profile in (None, w.profile) and scenario in (None, w.scenario)]
    if not found:
        have = ", ".join(sorted({str(s) for s in frame["scenario"].dropna().unique()} - {""})) or "none"
        raise UserError(f"no candidate of our kernels to export; recorded scenarios: {have}")
    chosen = [w for w in found if canonical_draw(w.draw) == canonical_draw(_draw_for(w.scenario, found, draw))]
    if not chosen:
        raise UserError(f"no record of draw {draw!r}; recorded: {', '.join(sorted({w.draw for w in found}))}")
    left_out = sorted({w.draw for w in found} - {w.draw for w in chosen})
    if left_out:
        remarks = [*remarks, f"draws not used for this export: {', '.join(left_out)} (choose with --draw)"]
    _refuse_double(chosen)
    problems = _problems(frame)
    frame = _behind(frame, chosen, mixed is not None)
    chosen, shared = _one_a_place(chosen, problems)
    remarks = [*remarks, *shared]
    groups: dict[tuple[str, str], list[Winner]] = {}
    for w in chosen:
        if w.profile not in PROFILES:
            raise UserError(f"these records are of profile {w.profile!r}, unknown here; known: {', '.join(PROFILES)}")
        if not device_slug(w.device):
            raise UserError("these records name no device: a table cannot say where it acts")
        groups.setdefault((w.device, w.profile), []).append(w)
    tables = []
    for (device, name), members in sorted(groups.items()):
        points = tuple(_point(w, problems) for w in members)
        tables.append(
            KernelTables(
                device=device_slug(device), profile=name, points=points, provenance=_provenance(frame, members, traffic)
            )
        )
    return Collected(tables, chosen, _missing(chosen, problems), remarks, frame)


def _draw_for(scenario: str, found: Sequence[Winner], draw: str | None) -> str:
    if draw is not None:
        return draw
    have = sorted({w.draw for w in found if w.scenario == scenario})
    try:
        own = get_scenario(scenario).draw
    except UserError:
        own = "uniform"
    if own in have:
        return own
    if len(have) > 1:
        raise UserError(f"{scenario} was recorded under several draws ({', '.join(have)}); choose one with --draw")
    return have[0]


def _refuse_double(chosen: Sequence[Winner]) -> None:
    """Two verdicts at one place come from unlike environments, seeds or methods: no table may mix them."""
    seen: dict[tuple[Any, ...], Winner] = {}
    for w in chosen:
        key = (w.device, w.profile, w.scenario, w.projection, w.routed_m)
        other = seen.setdefault(key, w)
        if other is not w:
            raise UserError(
                f"{w.scenario} {w.projection} at {w.routed_m} rows was measured twice in unlike ways "
                f"(seeds {other.seed} and {w.seed}, runs {other.run_id} and {w.run_id}); export them apart"
            )


def _behind(frame: pd.DataFrame, chosen: Sequence[Winner], mixed: bool) -> pd.DataFrame:
    """The records at the chosen points, failures and peers included; a mix's draw is several draws."""
    keep = frame["kind"] != "ceiling"
    for column in ("scenario", "profile", *(() if mixed else ("draw",))):
        keep &= frame[column].isin({getattr(w, column) for w in chosen})
    return frame[keep]


def _one_a_place(
    chosen: Sequence[Winner], problems: dict[tuple[str, str], MoeProblem]
) -> tuple[list[Winner], list[str]]:
    """One verdict for each problem and number of rows: prefill and decode grids can name the same GEMM."""
    found: dict[tuple[Any, ...], Winner] = {}
    remarks = []
    for w in chosen:
        key = (w.device, w.profile, problems[w.scenario, w.projection], w.routed_m)
        other = found.setdefault(key, w)
        if other is w:
            continue
        kept, left = (w, other) if _weight(w) > _weight(other) else (other, w)
        found[key] = kept
        if kept.schedule != left.schedule:
            remarks.append(
                f"{w.projection} at {w.routed_m} rows is a point of {kept.scenario} and of {left.scenario} with unlike "
                f"verdicts: the table follows {kept.scenario}"
            )
    return list(found.values()), remarks


def _weight(w: Winner) -> tuple[bool, int, int]:
    """What a verdict rests on."""
    return w.verdict != "none", w.candidates - w.failed, w.num_rounds


def _problems(frame: pd.DataFrame) -> dict[tuple[str, str], MoeProblem]:
    columns = ["num_experts", "N", "K", "group_size", "top_k"]
    rows = frame[frame["N"].notna()].drop_duplicates(["scenario", "projection", *columns])
    found: dict[tuple[str, str], MoeProblem] = {}
    for row in rows[["scenario", "projection", *columns]].itertuples(index=False):
        problem = MoeProblem(**{name: int(getattr(row, name)) for name in columns})
        if found.setdefault((str(row.scenario), str(row.projection)), problem) != problem:
            raise UserError(
                f"scenario {row.scenario} {row.projection} stands for two different problems in these records"
            )
    return found


def _point(w: Winner, problems: dict[tuple[str, str], MoeProblem]) -> TablePoint:
    problem = problems[w.scenario, w.projection]
    routes = problems.get((w.scenario, "gate_up"), problem).top_k  # of one token on this GPU
    return TablePoint(
        problem=problem,
        projection=w.projection,
        num_tokens=w.routed_m // routes,
        routed_m=w.routed_m,
        verdict=w.verdict,
        schedule=w.schedule,
        time_us=w.time_us,
        default=w.default_schedule,
        default_us=w.default_time_us,
        within=frozenset(w.within),
    )


def _missing(chosen: Sequence[Winner], problems: dict[tuple[str, str], MoeProblem]) -> list[Missing]:
    """Published points of each scenario without a result, and points where everything failed."""
    found: list[Missing] = []
    for name in sorted({w.scenario for w in chosen}):
        members = [w for w in chosen if w.scenario == name]
        projections = sorted({w.projection for w in members})
        try:
            published = [p.routed_m for p in get_scenario(name).points if p.published]
        except UserError:
            published = sorted({w.routed_m for w in members})
        profiles = sorted({w.profile for w in members})
        for profile in profiles:
            points = [_point(w, problems) for w in members if w.profile == profile]
            missing = missing_points(points, dict.fromkeys(projections, published))
            beside = f" in profile {profile}" if len(profiles) > 1 else ""
            found += [m._replace(reason=m.reason + beside) for m in missing]
    return found


def _provenance(
    frame: pd.DataFrame, members: Sequence[Winner], traffic: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a table's header says about where it comes from."""
    runs = sorted({w.run_id for w in members})
    rows = frame[frame["run_id"].isin(runs) & (frame["kind"] == "candidate")]
    for column in ("profile", "scenario", "draw"):  # those of this table alone: a run may hold other ones
        rows = rows[rows[column].isin({getattr(w, column) for w in members})] if not traffic else rows

    def seen(column: str) -> Any:
        values = [v for v in rows[column].unique() if not is_missing(v) and str(v) != ""] if column in rows else []
        plain = [v.item() if hasattr(v, "item") else v for v in values]
        return plain[0] if len(plain) == 1 else plain or None

    dates = sorted(w.date for w in members)
    toolchain = {name: seen(name) for name in ("torch", "triton", "ptxas", "cuda", "driver", "kernels")}
    return {
        "date": f"{dates[0]} to {dates[-1]}" if dates[0] != dates[-1] else dates[0],
        "device_name": members[0].device,
        "records": {"runs": runs, "source": sorted({w.source for w in members}), "candidates": len(rows)},
        "toolchain": {name: value for name, value in toolchain.items() if value is not None},
        "method": {name: seen(name) for name in METHOD_COLUMNS},
        "tuned_for": {
            "scenarios": sorted({w.scenario for w in members}),
            "draws": sorted({w.draw for w in members}),
            "seeds": sorted({w.seed for w in members}),
            **({"traffic": traffic} if traffic else {}),
        },
        "margin": MARGIN,
        "written_by": f"chord-lab {__version__}",
    }

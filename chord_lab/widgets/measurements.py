"""Records as panels ask for them: by point, cached, and growing while a live sweep runs."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from w4a16_moe.devices import DEVICES, Device
from w4a16_moe.legality import Illegality, why_illegal
from w4a16_moe.profiles import get_profile
from w4a16_moe.resolve import resolve_schedule
from w4a16_moe.schedule import Schedule

from chord_lab import analysis
from chord_lab.analysis.timeline import Card
from chord_lab.errors import UserError
from chord_lab.measurement.predict import LEAST_RECORDS, CostModel, fit, samples_of
from chord_lab.records import Record, read_tables, to_frame, to_table
from chord_lab.records.places import data_directory
from chord_lab.scenarios import get_scenario
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.winners import Winner, winners
from chord_lab.widgets.selection import Selection


class Measurements:
    """A records frame with the questions that panels ask."""

    def __init__(self, table: pa.Table, notices: Sequence[str] = ()):
        self.table = table
        self.frame = to_frame(table)
        self.notices = list(notices)  # files and lines that were skipped, one line each
        self._answers: dict[Any, Any] = {}

    @classmethod
    def recorded(cls, *paths: str | pathlib.Path) -> Measurements:
        """Everything under `paths` (journals and Parquet files); what ships in data/ when none is given.

        Raises:
            UserError: no record there.
        """
        folders = [pathlib.Path(path) for path in paths] or [data_directory()]
        table, notices = read_tables(folders)
        if not len(table):
            raise UserError(f"no record under {', '.join(map(str, folders))}")
        return cls(_as_recorded(table), notices)

    @classmethod
    def empty(cls) -> Measurements:
        """Nothing yet: for a sweep that is about to fill it."""
        return cls(to_table([]))

    def add(self, fresh: Sequence[Any]) -> None:
        """Take in records, or Arrow tables of them, of a running sweep; answers are computed anew."""
        records = [item for item in fresh if isinstance(item, Record)]
        tables = [item for item in fresh if not isinstance(item, Record)]
        tables += [to_table(records)] if records else []
        if tables:
            whole = pa.concat_tables([self.table, *tables], promote_options="permissive")
            self.table = whole.unify_dictionaries().combine_chunks()
            self.frame = to_frame(self.table)
            self._answers.clear()

    @property
    def scenarios(self) -> list[str]:
        """Scenarios with a timed candidate."""
        return self.once("scenarios", lambda: sorted(map(str, analysis.candidates(self.frame)["scenario"].unique())))

    @property
    def device(self) -> Device:
        """The card of the records."""
        slugs = self.frame["device"].dropna().unique()
        return DEVICES.get(str(slugs[0]) if len(slugs) else "", DEVICES["nvidia_h200"])

    @property
    def card(self) -> Card:
        """Measured ceilings of that card."""
        return self.once("card", lambda: analysis.card_of(self.frame))

    def of_scenario(self, scenario: str, profile: str | None = None) -> pd.DataFrame:
        """Records of a scenario, its peers, and the ceilings of the run.

        Weights are packed for one profile, so schedules of two never compete: those of `profile`, or of the scenario's
        own (any other where that was not recorded), are given.
        """

        def part() -> pd.DataFrame:
            frame, chosen = self.frame, profile or self.profile_of(scenario)
            candidate = frame["kind"] == "candidate"
            kept = (frame["scenario"] == scenario) & (~candidate | (frame["profile"] == chosen))
            return frame[kept | (frame["kind"] == "ceiling")].reset_index(drop=True)

        return self.once(("scenario", scenario, profile), part)

    def profile_of(self, scenario: str) -> str:
        """The scenario's own profile, or the first recorded one where that was not recorded."""

        def choose() -> str:
            frame, own = self.frame, get_scenario(scenario).profile
            mine = frame[(frame["scenario"] == scenario) & (frame["kind"] == "candidate")]
            recorded = sorted(map(str, mine["profile"].dropna().unique()))
            return own if own in recorded or not recorded else recorded[0]

        return self.once(("profile", scenario), choose)

    def draws(self, scenario: str) -> list[str]:
        """Routing draws that were measured."""
        frame = self.of_scenario(scenario)
        return sorted(map(str, frame.loc[frame["kind"] == "candidate", "draw"].dropna().unique()))

    def at(self, chosen: Selection) -> pd.DataFrame:
        """Every record of the chosen point: candidates, peers and failures, fastest first."""

        def part() -> pd.DataFrame:
            frame = self.of_scenario(chosen.scenario)
            here = (frame["projection"] == chosen.projection) & (frame["routed_m"] == chosen.routed_m)
            here &= (frame["draw"] == chosen.draw) & (frame["seed"] == chosen.seed)
            return frame[here].sort_values("time_us", kind="stable").reset_index(drop=True)

        key = ("at", chosen.scenario, chosen.projection, chosen.routed_m, chosen.draw, chosen.seed)
        return self.once(key, part)

    def schedules_at(self, chosen: Selection) -> dict[Schedule, dict[str, Any]]:
        """Schedule -> its fastest record's row at the chosen point, fastest first."""

        def part() -> dict[Schedule, dict[str, Any]]:
            rows = analysis.candidates(self.at(chosen)) if len(self.at(chosen)) else self.at(chosen)
            found: dict[Schedule, dict[str, Any]] = {}
            for row in rows.to_dict("records"):
                schedule = analysis.schedule_of_row(row)
                if schedule is not None:
                    found.setdefault(schedule, {str(name): value for name, value in row.items()})
            return found

        key = ("schedules", chosen.scenario, chosen.projection, chosen.routed_m, chosen.draw, chosen.seed)
        return self.once(key, part)

    def default_at(self, chosen: Selection) -> Schedule:
        """What the package runs untuned there: the recorded default, else its heuristic."""
        recorded = self.at(chosen)
        if len(recorded):
            marked = recorded[(recorded["kind"] == "candidate") & (recorded["default"] == True)]  # noqa: E712
            schedule = analysis.schedule_of_row(marked.iloc[0]) if len(marked) else None
            if schedule is not None:
                return schedule
        resolved = resolve_schedule(chosen.problem, chosen.routed_m, self.profile_of(chosen.scenario), None)
        if resolved.schedule is None:
            raise UserError("0 rows: nothing is launched")
        return resolved.schedule

    def schedule_or_best(self, chosen: Selection) -> Schedule:
        """The selected schedule; without one the fastest recorded; without a record the default."""
        if chosen.schedule is not None:
            return chosen.schedule
        return next(iter(self.schedules_at(chosen)), None) or self.default_at(chosen)

    def broken(self, chosen: Selection, schedule: Schedule) -> Illegality | None:
        """The rule that a schedule breaks at the chosen point; None where it may run."""
        return why_illegal(schedule, chosen.problem, get_profile(self.profile_of(chosen.scenario)), self.device)

    def predict(self, chosen: Selection, schedule: Schedule) -> float | None:
        """Microseconds that the cost model expects of a schedule that was not timed; None where nothing may run.

        With too few records to fit, the tile simulation answers.
        """
        if not chosen.routed_m or self.broken(chosen, schedule):
            return None
        if self.model is None:
            return analysis.timeline_info(chosen.problem, schedule, chosen.tok_e(), self.card).simulated_us
        [point] = scenario_points(
            chosen.layer,
            tokens=[chosen.num_tokens],
            draws=[chosen.draw],
            seed=chosen.seed,
            projections=(chosen.projection,),
        )
        return float(self.model.predict_us(point, [schedule])[0])

    @property
    def model(self) -> CostModel | None:
        """The cost model fitted to these records; takes a few seconds the first time."""

        def fitted() -> CostModel | None:
            samples = samples_of(self.table, self.device)
            return fit(samples, self.device) if len(samples) >= LEAST_RECORDS else None

        return self.once("model", fitted)

    def fit_ahead(self) -> None:
        """Fit the model in the background, so that the first prediction need not wait for it."""
        threading.Thread(target=lambda: self.model, name="fit cost model", daemon=True).start()

    def crossover(self, scenario: str, projection: str, draw: str) -> analysis.CrossoverInfo:
        """Time of each block_m at each token count."""

        def compute() -> analysis.CrossoverInfo:
            frame, note = self.alike(scenario)
            info = analysis.crossover_info(frame, projection=projection, draw=draw)
            return info._replace(source=info.source + note)

        return self.once(("crossover", scenario, projection, draw), compute)

    def alike(self, scenario: str) -> tuple[pd.DataFrame, str]:
        """The largest part of a scenario's records that may be ranked together; what was left out, for the source."""
        frame = self.of_scenario(scenario)
        gemms, ceilings = frame[frame["kind"] != "ceiling"], frame[frame["kind"] == "ceiling"]
        kept = analysis.newest_versions(next(iter(analysis.environments(gemms)), gemms))
        if len(kept) == len(gemms):
            return frame, ""
        left_out = f"; {len(gemms) - len(kept)} records of another environment left out"
        return pd.concat([kept, ceilings], ignore_index=True), left_out

    def winners(self, scenario: str, draw: str | None = None, profile: str | None = None) -> list[Winner]:
        """The verdict at each measured point of a scenario, in its own profile unless another is named."""

        def compute() -> list[Winner]:
            mask = pc.equal(self.table["scenario"].cast(pa.string()), scenario)
            run_ids = self.table.filter(mask)["run_id"].cast(pa.string()).unique()
            ceilings = pc.and_(
                pc.equal(self.table["kind"].cast(pa.string()), "ceiling"),
                pc.is_in(self.table["run_id"].cast(pa.string()), value_set=run_ids),
            )
            return winners(self.table.filter(pc.or_(mask, ceilings)))

        name = profile or self.profile_of(scenario)
        return [w for w in self.once(("winners", scenario), compute) if w.profile == name and draw in (None, w.draw)]

    def source(self, frame: pd.DataFrame | None = None) -> str:
        """Where numbers come from, in one line."""
        return analysis.source_line(self.frame if frame is None else frame)

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, remembered until records are added."""
        if key not in self._answers:
            self._answers[key] = compute()
        return self._answers[key]


def _as_recorded(table: pa.Table) -> pa.Table:
    """What was live when it was written is recorded when it is read."""
    index = table.schema.get_field_index("source")
    source = table["source"].cast(pa.string())
    source = pc.if_else(pc.equal(source, "live"), "recorded", source)
    return table.set_column(index, table.schema.field(index), source.cast(table.schema.field(index).type))

"""Search in large spaces: Optuna proposes, the measuring session times each batch beside the default.

The study of each point is kept in ``search.journal`` beside the run's journal, so that a resumed search goes on where
it stopped. What may not run is told to the sampler without being launched.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
from w4a16_moe.devices import Device
from w4a16_moe.profiles import get_profile
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.records.attempt import Candidate, Point, Sink
from chord_lab.records.intervals import paired_ratio
from chord_lab.records.record import Environment, Record, candidate_key
from chord_lab.records.statistics import round_medians_us
from chord_lab.sweeps.plan import Plan
from chord_lab.sweeps.space import candidates, default_schedule, grids

SAMPLERS = ("tpe", "grid")
BATCH = 12  # candidates timed together beside the default
PER_POINT = 96  # candidates of a point when no budget says otherwise


class Session(Protocol):
    """What measures a plan; keeps its child processes from one plan to the next."""

    environment: Environment

    def measure(self, plan: Any, sink: Sink) -> None:
        """See `Measure`."""


class SearchMeasure:
    """The `Measure` protocol that chooses its own candidates at the points of a plan."""

    source = "live"

    def __init__(
        self,
        open_session: Callable[[], AbstractContextManager[Session]],
        device: Device,
        directory: pathlib.Path,
        *,
        space: str = "full",
        sampler: str = "tpe",
        per_point: int = PER_POINT,
        seed: int = 0,
    ):
        if sampler not in SAMPLERS:
            raise UserError(f"search sampler {sampler!r}: legal are {', '.join(SAMPLERS)}")
        self.open_session = open_session
        self.device = device
        self.directory = pathlib.Path(directory)
        self.space = space
        self.sampler = sampler
        self.per_point = per_point
        self.seed = seed

    def measure(self, plan: Plan, sink: Sink) -> None:
        """Search at each point of the plan; the plan's own candidates (the default) come first."""
        with self.open_session() as session:
            for point, first in plan.by_point():
                if sink.out_of_budget():
                    return
                _PointSearch(self, point, first, session, sink).run()


class _PointSearch:
    """The study of one point."""

    def __init__(self, search: SearchMeasure, point: Point, first: list[Candidate], session: Session, sink: Sink):
        self.search = search
        self.point = point
        self.default = next(c for c in first if c.default)
        self.session = session
        self.sink = sink
        self.seen: dict[Schedule, float | None] = {}  # what was timed, as a multiple of the default's time
        self.num_moved = 0
        self.knobs = _search_space(get_profile(point.profile).kernels, search.space)
        self.legal = _Legal(point, search.device, search.space, self.default.schedule)
        self.study = _study(search, point, self.knobs, session.environment)

    def run(self) -> None:
        """Batches until the point has its number of candidates, the space is used up, or the budget is."""
        self._recall()
        while len(self.seen) < self.search.per_point and not self.sink.out_of_budget():
            asked = self._ask()
            if not asked:
                break
            chosen = [self.default, *(Candidate(schedule=s) for _, s in asked)]
            plan = Plan([self.point], chosen, np.array([[0, i] for i in range(len(chosen))], dtype=np.int32))
            heard = _Listener(self.sink)
            self.session.measure(plan, heard)
            ratios = heard.ratios(self.default)
            for trial, schedule in asked:
                self._tell(trial, schedule, ratios.get(schedule))
        self.sink.note(
            f"{self.point.label()}: {len(self.seen)} of {self.legal.size} legal candidates tried; "
            f"{self.num_moved} proposals that may not run or were known were moved to the nearest that may"
        )

    def _recall(self) -> None:
        """Trials of an interrupted search: those that never ended are closed, the others count."""
        import optuna

        for trial in self.study.get_trials(deepcopy=False):
            if trial.state == optuna.trial.TrialState.RUNNING:
                self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            elif trial.state == optuna.trial.TrialState.COMPLETE:
                schedule = _schedule_of(trial.params)
                self.seen[schedule] = trial.value
                self.legal.take(schedule)

    def _ask(self) -> list[tuple[Any, Schedule]]:
        """The next batch of schedules that were not timed yet; a proposal that may not run is moved to the nearest."""
        import optuna

        asked: list[tuple[Any, Schedule]] = []
        for _ in range(min(BATCH, self.search.per_point - len(self.seen))):
            trial = self.study.ask()
            schedule = _suggest(trial, self.knobs)
            if not self.legal.is_free(schedule):
                self.num_moved += 1
                nearest = self.legal.nearest(schedule)
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
                if nearest is None:
                    break
                self.study.enqueue_trial(_params_of(nearest, self.knobs))
                trial = self.study.ask()
                schedule = _suggest(trial, self.knobs)
            self.legal.take(schedule)
            asked.append((trial, schedule))
        return asked

    def _tell(self, trial: Any, schedule: Schedule, ratio: float | None) -> None:
        import optuna

        self.seen[schedule] = ratio
        if ratio is None:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(trial, ratio)


class _Legal:
    """The legal schedules of a point that were not tried yet, and which of them is nearest to a proposal."""

    def __init__(self, point: Point, device: Device, space: str, default: Schedule | None):
        self.schedules = [v.schedule for v in candidates(point, device, space) if not v.rule and v.schedule != default]
        self.size = len(self.schedules)
        self._index = {schedule: i for i, schedule in enumerate(self.schedules)}
        self._free = np.ones(self.size, dtype=bool)
        self._codes: list[dict[Any, int]] = [{} for _ in fields(Schedule)]
        self._matrix = np.array([self._row(s) for s in self.schedules], dtype=np.int32).reshape(self.size, -1)

    def is_free(self, schedule: Schedule) -> bool:
        """Legal and not tried."""
        index = self._index.get(schedule)
        return index is not None and bool(self._free[index])

    def take(self, schedule: Schedule) -> None:
        """Tried now."""
        if schedule in self._index:
            self._free[self._index[schedule]] = False

    def nearest(self, schedule: Schedule) -> Schedule | None:
        """The free schedule that differs in the fewest knobs; None when all were tried."""
        if not self._free.any():
            return None
        differing = (self._matrix != np.array(self._row(schedule), dtype=np.int32)).sum(axis=1)
        return self.schedules[int(np.where(self._free, differing, differing.max() + 1).argmin())]

    def _row(self, schedule: Schedule) -> list[int]:
        values = [getattr(schedule, f.name) for f in fields(Schedule)]
        return [codes.setdefault(value, len(codes)) for codes, value in zip(self._codes, values, strict=True)]


class _Listener:
    """A sink that passes everything on and remembers what was timed."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self.records: list[Record] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def append(self, record: Record) -> None:
        """Pass on and remember."""
        self.records.append(record)
        self._sink.append(record)

    def ratios(self, default: Candidate) -> dict[Schedule, float]:
        """Each schedule's time over the default's in the same rounds."""
        times = {
            r.schedule: dict(zip(r.rounds, round_medians_us(r), strict=True))
            for r in self.records
            if r.status == "ok" and r.schedule is not None
        }
        assert default.schedule is not None
        reference = times.get(default.schedule, {})
        paired = {schedule: paired_ratio(mine, reference) for schedule, mine in times.items()}
        return {schedule: ratio.estimate for schedule, ratio in paired.items() if ratio}


def _study(search: SearchMeasure, point: Point, knobs: dict[str, list[Any]], environment: Environment) -> Any:
    """The point's trials in this environment: what another one timed is no trial here."""
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise UserError("--search optuna needs optuna: pip install 'chord-lab[optuna]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    search.directory.mkdir(parents=True, exist_ok=True)
    sampler: Any = (
        optuna.samplers.TPESampler(seed=search.seed, n_startup_trials=2 * BATCH)
        if search.sampler == "tpe"
        else optuna.samplers.GridSampler(knobs, seed=search.seed)
    )
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(search.directory / "search.journal"))),
        study_name=candidate_key(point=point, environment=environment.stamp()),
        load_if_exists=True,
        sampler=sampler,
        direction="minimize",
    )


def _search_space(kernels: Sequence[str], space: str) -> dict[str, list[Any]]:
    """Knobs by name; a knob of one kernel is told apart from another's."""
    knobs: dict[str, list[Any]] = {"kernel": list(kernels)}
    usual = {f.name: f.default for f in fields(Schedule)}
    for kernel in kernels:
        mine = grids(kernel, space)
        for name in dict.fromkeys(name for grid in mine for name in grid):
            values = [value for grid in mine for value in grid.get(name, (usual[name],))]
            knobs[f"{kernel}.{name}"] = list(dict.fromkeys(values))
    return knobs


def _suggest(trial: Any, knobs: dict[str, list[Any]]) -> Schedule:
    kernel = trial.suggest_categorical("kernel", knobs["kernel"])
    values = {
        name.split(".", 1)[1]: trial.suggest_categorical(name, choices)
        for name, choices in knobs.items()
        if name.startswith(f"{kernel}.")
    }
    return Schedule(kernel=kernel, **values)


def _params_of(schedule: Schedule, knobs: dict[str, list[Any]]) -> dict[str, Any]:
    mine = {n: getattr(schedule, n.split(".", 1)[1]) for n in knobs if n.startswith(f"{schedule.kernel}.")}
    return {"kernel": schedule.kernel, **mine}


def _schedule_of(params: dict[str, Any]) -> Schedule:
    kernel = params["kernel"]
    values = {name.split(".", 1)[1]: v for name, v in params.items() if name.startswith(f"{kernel}.")}
    return Schedule(kernel=kernel, **values)


def search_plan(points: Sequence[Point], device: Device) -> Plan:
    """A plan of the defaults alone: a search finds the rest."""
    defaults = [Candidate(schedule=default_schedule(p, device), default=True) for p in points if p.routed_m]
    kept = [p for p in points if p.routed_m]
    return Plan(kept, defaults, np.array([[i, i] for i in range(len(kept))], dtype=np.int32).reshape(-1, 2))

"""Prediction: a cost model fitted to records, that answers a plan and orders candidates.

log(time / floor) is a ridge regression on waves, padding, bytes, FLOPs, occupancy and knobs (`features`) with their
products, plus a smooth correction (kernel ridge) from records of the same problem and kernel. Its error on points that
it was not fitted to is measured by `evaluate`, and shown wherever predictions are.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from w4a16_moe.devices import DEVICES, Device
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.measurement.features import CONTINUOUS, features, floor_us, least_us, matrix
from chord_lab.records.attempt import Candidate, Point, Sink, record_of
from chord_lab.records.decode import decode
from chord_lab.records.frames import to_frame
from chord_lab.records.journal import now
from chord_lab.records.parquet import read_tables, to_table
from chord_lab.records.places import data_directory
from chord_lab.records.record import CompileFacts, Environment, Method

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[np.float64]
RIDGE = 1.0
KERNEL_RIDGE = 0.03
LENGTH = 2.5  # of the correction, in standard deviations of the features
MOST_ANCHORS = 1500  # records that a correction rests on: its cost grows with their cube
LEAST_RECORDS = 30


@dataclass(frozen=True)
class Sample:
    """One measured candidate."""

    point: Point
    schedule: Schedule
    facts: CompileFacts
    time_us: float


@dataclass
class CostModel:
    """A fitted model; see `fit`."""

    device: Device
    mean: Array
    scale: Array
    weights: Array
    anchors: dict[tuple[MoeProblem, str], tuple[Array, Array]] = field(default_factory=dict)
    facts: dict[tuple[MoeProblem, Schedule], CompileFacts] = field(default_factory=dict)
    kernels: frozenset[str] = frozenset()

    def predict_us(self, point: Point, schedules: Sequence[Schedule]) -> Array:
        """Microseconds of each schedule at a point."""
        unknown = {s.kernel for s in schedules} - self.kernels
        if unknown:
            raise UserError(
                f"no records of kernel {', '.join(sorted(unknown))} on {self.device.slug}: cannot predict it"
            )
        if not len(schedules):
            return np.empty(0)
        known = [self.facts.get((point.problem, s)) for s in schedules]
        rows = [features(point, s, f, self.device) for s, f in zip(schedules, known, strict=True)]
        scaled = (matrix(rows) - self.mean) / self.scale
        logs = _expand(scaled) @ self.weights
        for kernel in {s.kernel for s in schedules}:
            anchors = self.anchors.get((point.problem, kernel))
            if anchors is not None:
                mine = np.array([s.kernel == kernel for s in schedules])
                logs[mine] += _kernel(scaled[mine], anchors[0]) @ anchors[1]
        times, least = floor_us(point) * np.exp(logs), least_us(point)
        # beyond what was recorded the fit may promise what the card cannot do; the order of such candidates stays
        return np.where(times < least, least * (1 + 1e-6 * times / least), times)

    def order(self, point: Point, schedules: list[Schedule]) -> list[Schedule]:
        """Fastest by prediction first."""
        if {s.kernel for s in schedules} - self.kernels:
            return schedules
        return [schedules[i] for i in np.argsort(self.predict_us(point, schedules), kind="stable")]


def fit(samples: Sequence[Sample], device: Device) -> CostModel:
    """Fit to measured candidates of one device."""
    if len(samples) < LEAST_RECORDS:
        raise UserError(f"{len(samples)} records of {device.slug} are too few to fit a cost model ({LEAST_RECORDS})")
    raw = matrix([features(s.point, s.schedule, s.facts, device) for s in samples])
    mean, scale = raw.mean(axis=0), raw.std(axis=0)
    scale[scale < 1e-9] = 1.0
    scaled = (raw - mean) / scale
    target: Array = np.log(np.array([s.time_us / floor_us(s.point) for s in samples], dtype=np.float64))
    expanded = _expand(scaled)
    gram = expanded.T @ expanded + RIDGE * np.eye(expanded.shape[1])
    weights: Array = np.linalg.solve(gram, expanded.T @ target).astype(np.float64)
    model = CostModel(device, mean, scale, weights, kernels=frozenset(s.schedule.kernel for s in samples))
    model.facts = {(s.point.problem, s.schedule): s.facts for s in samples}
    rest = target - expanded @ weights
    groups: dict[tuple[MoeProblem, str], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault((sample.point.problem, sample.schedule.kernel), []).append(index)
    for key, members in groups.items():
        chosen = np.array(members)[:: max(1, -(-len(members) // MOST_ANCHORS))]
        near = scaled[chosen]
        gram = _kernel(near, near) + KERNEL_RIDGE * np.eye(len(chosen))
        model.anchors[key] = (near, np.linalg.solve(gram, rest[chosen]))
    return model


def _expand(scaled: Array) -> Array:
    """1, each feature, and the products of continuous features."""
    count = len(CONTINUOUS)
    upper = np.triu_indices(count)
    products = scaled[:, upper[0]] * scaled[:, upper[1]]
    by_flag = (scaled[:, count:, None] * scaled[:, None, :4]).reshape(len(scaled), -1)  # knobs act with the load
    return np.concatenate([np.ones((len(scaled), 1)), scaled, products, by_flag], axis=1)


def _kernel(a: Array, b: Array) -> Array:
    distance = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    return np.exp(-np.maximum(distance, 0) / (2 * LENGTH**2 * a.shape[1] / 10))


def samples_of(table: pa.Table, device: Device) -> list[Sample]:
    """Every timed candidate of a device."""
    frame = to_frame(table.select(["status", "kind", "device", "times_us", "registers", "smem_bytes", "spill_bytes"]))
    decoded = decode(table)
    fine = (frame.kind == "candidate") & (frame.device == device.slug) & frame.time_us.notna()
    found = []
    for row in np.flatnonzero(fine.to_numpy()):
        schedule = decoded.candidates[decoded.candidate_of_row[row]].schedule
        if schedule is not None:
            facts = CompileFacts(registers=_whole(frame.registers[row]), smem_bytes=_whole(frame.smem_bytes[row]))
            point = decoded.points[decoded.point_of_row[row]]
            found.append(Sample(point, schedule, facts, float(frame.time_us[row])))
    return found


def _whole(value: Any) -> int | None:
    return None if value is None or np.isnan(value) else int(value)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well points are predicted that the model was not fitted to."""

    records: int
    points: int
    median_error: float  # median of |predicted / measured - 1|
    p90_error: float
    median_regret: float  # median over points: measured time of the predicted winner / best measured time - 1
    p90_regret: float
    worst_regret: float
    worst: str  # the point of it


def evaluate(samples: Sequence[Sample], device: Device, folds: int = 5) -> Evaluation:
    """Leave points out in turn (a whole token count of a scenario at a time), predict them from the rest."""
    places = sorted({_place(s) for s in samples})
    if len(places) < 2:
        raise UserError("one recorded point cannot be held out: the error of a prediction needs at least two")
    folds = min(folds, len(places))
    fold_of = {place: index % folds for index, place in enumerate(places)}
    errors: list[float] = []
    regrets: list[tuple[float, str]] = []
    for fold in range(folds):
        model = fit([s for s in samples if fold_of[_place(s)] != fold], device)
        held: dict[Point, list[Sample]] = {}
        for sample in samples:
            if fold_of[_place(sample)] == fold and sample.schedule.kernel in model.kernels:
                held.setdefault(sample.point, []).append(sample)
        for point, members in held.items():
            predicted = model.predict_us(point, [s.schedule for s in members])
            measured = np.array([s.time_us for s in members])
            errors += list(np.abs(predicted / measured - 1))
            regrets.append((float(measured[np.argmin(predicted)] / measured.min() - 1), point.label()))
    values = np.array([regret for regret, _ in regrets])
    return Evaluation(
        records=len(errors),
        points=len(regrets),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        median_regret=float(np.median(values)),
        p90_regret=float(np.quantile(values, 0.9)),
        worst_regret=max(regrets)[0],
        worst=max(regrets)[1],
    )


def _place(sample: Sample) -> tuple[str, int]:
    """What is held out together: another draw or seed of the same token count gives half the answer away."""
    return (sample.point.scenario, sample.point.num_tokens)


class PredictMeasure:
    """The `Measure` protocol from a cost model: every number is marked as predicted."""

    source = "predicted"

    def __init__(self, model: CostModel, basis: str):
        self.model = model
        self.basis = basis  # what the model was fitted to, for the reader

    def measure(self, plan: Any, sink: Sink) -> None:
        """A predicted record for every candidate of the plan."""
        environment = Environment(
            device=self.model.device.slug, device_name=f"{self.model.device.slug} (predicted from {self.basis})"
        )
        sink.started(environment)
        method = Method(timer="cost_model", l2="cleared")
        records = []
        for point, candidates in plan.by_point():
            chosen: list[Candidate] = [c for c in candidates if c.schedule is not None]
            times = self.model.predict_us(point, [c.schedule for c in chosen if c.schedule is not None])
            records += [
                record_of(
                    point,
                    candidate,
                    run_id=sink.run_id,
                    date=now(),
                    source="predicted",
                    environment=environment,
                    method=method,
                    times_us=((round(float(time), 3),),),
                    rounds=(0,),
                )
                for candidate, time in zip(chosen, times, strict=True)
            ]
        sink.append_table(to_table(records))


def recorded_samples(data: pathlib.Path | None, device: Device) -> tuple[list[Sample], str]:
    """Timed candidates of a device under the data directory, and where they came from."""
    table, _ = read_tables(data_directory(data))
    samples = samples_of(table, device)
    if not samples:
        have = sorted({str(d) for d in table["device"].unique().to_pylist()}) or ["none"]
        raise UserError(f"no records of {device.slug} to predict from; recorded devices: {', '.join(have)}")
    dates = sorted(str(d)[:10] for d in table["date"].unique().to_pylist())
    return samples, f"{len(samples)} records, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"


def predictor_from_data(data: pathlib.Path | None, device: Device) -> PredictMeasure:
    """A predictor fitted to the recorded measurements of a device."""
    samples, basis = recorded_samples(data, device)
    return PredictMeasure(fit(samples, device), basis)


def known_device(slug: str) -> Device:
    """Limits of a device by slug."""
    if slug not in DEVICES:
        raise UserError(f"device {slug!r} is unknown; known: {', '.join(DEVICES)}")
    return DEVICES[slug]

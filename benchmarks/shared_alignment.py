"""One routing alignment for both projections of a layer, beside one for each.

    python -m benchmarks.shared_alignment [--records data/nvidia_h200] [--out out]

A serving stack that aligns tokens once per layer ties gate_up and down to one block_m. Measured at every published
point of the EP8 and TP8 scenarios, interleaved, in one process on a GPU:

    independent   align, gate_up, align, down: each projection with its own fastest recorded schedule
    shared        align, gate_up, down: the fastest recorded pair of schedules that have the same block_m

plus the alignments alone. CUDA graphs of the whole sequence, L2 cleared before each replay. Both outputs are compared
with the reference first. Writes ``OUT/shared-alignment-DATE.pq``: a row for each point, arrangement and round.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from w4a16_moe.problem import MoeProblem
from w4a16_moe.reference import TOLERANCE
from w4a16_moe.routing import align_to_blocks
from w4a16_moe.schedule import Schedule

from chord_lab.cli.measuring import visible_gpus
from chord_lab.errors import UserError
from chord_lab.measurement.bench import Timer
from chord_lab.measurement.child import ChildFailure
from chord_lab.measurement.compile_ahead import CompileAhead, Job
from chord_lab.measurement.launch import Launch
from chord_lab.measurement.launchers import launch_ours
from chord_lab.measurement.live import require_gpu
from chord_lab.measurement.stage import job_of
from chord_lab.measurement.tensors import Layer, PointTensors
from chord_lab.records.attempt import Candidate, Point
from chord_lab.records.journal import now
from chord_lab.records.parquet import read_tables
from chord_lab.sweeps.points import scenario_points
from chord_lab.sweeps.winners import candidate_times

SCENARIOS = ("kimi-k2/ep8/decode", "kimi-k2/ep8/prefill", "kimi-k2/tp8/decode", "kimi-k2/tp8/prefill")
LOAD_S, RELOAD_S = 1.5, 0.2  # discarded: past the power controller's first dip, and after the pause between points
GRAPH = {"timer": "graph_replay"}


@dataclass(frozen=True)
class Arrangement:
    """Schedules of gate_up and down, and whether one alignment serves both."""

    name: str  # independent | shared
    schedules: tuple[Schedule, Schedule]

    def block_ms(self) -> list[int]:
        """block_m of each alignment that has to be made."""
        sizes = [schedule.block_m for schedule in self.schedules]
        return sizes[:1] if self.name == "shared" else sizes


Times = dict[Schedule, float]  # microseconds


def arrangements(gate_up: Times, down: Times) -> tuple[Arrangement, Arrangement]:
    """The fastest independent pair, and the fastest with one block_m, of recorded times of both projections."""
    independent = (min(gate_up, key=gate_up.__getitem__), min(down, key=down.__getitem__))
    common = {s.block_m for s in gate_up} & {s.block_m for s in down}
    if not common:
        raise UserError("no block_m was recorded for both projections")

    def fastest(times: Times, block_m: int) -> Schedule:
        return min((s for s in times if s.block_m == block_m), key=times.__getitem__)

    pairs = [(fastest(gate_up, size), fastest(down, size)) for size in sorted(common)]
    shared = min(pairs, key=lambda pair: gate_up[pair[0]] + down[pair[1]])
    return Arrangement("independent", independent), Arrangement("shared", shared)


class LayerBench:
    """Tensors of the two points of a layer on one device, and the launches to be timed.

    The GEMMs read alignments made beforehand; those of the timed sequence are made anew each time and thrown away.
    """

    def __init__(self, gate_up: Point, down: Point, timer: Timer, layers: dict[MoeProblem, Layer]) -> None:
        """`layers` keeps the packed weights from one point to the next."""
        self.points = (gate_up, down)
        for point in self.points:
            layers.setdefault(point.problem, Layer(point.problem, timer.device))
        self.tensors = [PointTensors(p, layers[p.problem], timer.device) for p in self.points]
        self.timer = timer

    def align(self, block_ms: Sequence[int]) -> None:
        """The alignments of one arrangement."""
        for block_m in block_ms:
            align_to_blocks(self.tensors[0].topk_ids, self.points[0].problem.num_experts, block_m)

    def launches(self, made: Arrangement) -> dict[str, Launch]:
        """The whole sequence, and its alignments alone; refuses schedules that compute something else."""
        gemms = []
        for tensors, schedule in zip(self.tensors, made.schedules, strict=True):
            tensors.poison()
            gemms.append(launch_ours(tensors, Candidate(schedule=schedule)))
            gemms[-1].run()
            self.timer.wait()
            if not tensors.error() <= TOLERANCE:
                raise UserError(f"{tensors.point.label()}: {schedule.label()} has relative error {tensors.error():.1e}")
        first, second = made.block_ms()[:1], made.block_ms()[1:]

        def sequence() -> None:
            self.align(first)
            gemms[0].run()
            self.align(second)
            gemms[1].run()

        whole = Launch(sequence, "align+gate_up+down", "indexed", 0)
        alone = Launch(lambda: self.align(made.block_ms()), "align", "", 0)
        return {made.name: whole, f"{made.name}, alignment alone": alone}

    def rows(self, both: Sequence[Arrangement], rounds: int, rep_ms: float, load_s: float) -> Iterator[dict[str, Any]]:
        """Interleaved rounds of everything, the order rotated."""
        what = [(made, name, launch) for made in both for name, launch in self.launches(made).items()]
        end = time.monotonic() + load_s
        while time.monotonic() < end:
            self.timer.repeat(what[0][2], GRAPH, 50.0, 0.0)
        for number in range(rounds):
            for made, name, launch in what[number % len(what) :] + what[: number % len(what)]:
                yield {
                    "scenario": self.points[0].scenario,
                    "num_tokens": self.points[0].num_tokens,
                    "routed_m": self.points[0].routed_m,
                    "draw": self.points[0].routing.draw,
                    "arrangement": name,
                    "gate_up": made.schedules[0].label(),
                    "down": made.schedules[1].label(),
                    "round": number,
                    **self.timer.repeat(launch, GRAPH, rep_ms, 2.0),
                }


def place_of(point: Point) -> tuple[str, str, str, int, str, int]:
    """As in `candidate_times`, less the run."""
    routing = point.routing
    return (point.scenario, point.projection, point.profile, point.num_tokens, routing.draw, routing.seed)


Work = list[tuple[Point, Point, tuple[Arrangement, Arrangement]]]


def recorded_layers(table: pa.Table) -> Work:
    """Every published point that both projections were recorded at, and its arrangements."""
    recorded = {  # less the run
        place[:-1]: {schedule: timed.time_us for schedule, timed in times.items()}
        for place, times in candidate_times(table).items()
    }
    work: Work = []
    for name in SCENARIOS:
        gate_ups, downs = (scenario_points(name, tokens="published", projections=[p]) for p in ("gate_up", "down"))
        for gate_up, down in zip(gate_ups, downs, strict=True):
            first, second = (recorded.get(place_of(point)) for point in (gate_up, down))
            if first is None or second is None:
                print(f"{gate_up.label()}: not recorded for both projections; left out", file=sys.stderr)
                continue
            work.append((gate_up, down, arrangements(first, second)))
    return work


def measure(timer: Timer, work: Work, rounds: int, rep_ms: float) -> Iterator[list[dict[str, Any]]]:
    """The rows of each point; its kernels were compiled by other processes while those before it were timed."""
    environment = timer.environment()
    about = {key: environment.get(key) for key in ENVIRONMENT}
    jobs = [_jobs(points, both) for *points, both in work]
    ahead = CompileAhead(environment["capability"])
    layers: dict[MoeProblem, Layer] = {}
    try:
        ahead.submit(job for some in jobs for job in some)
        for number, (gate_up, down, both) in enumerate(work):
            for job in jobs[number]:
                _compiled(ahead, job)
            timer.forget_all()
            load_s = RELOAD_S if number else LOAD_S
            found = LayerBench(gate_up, down, timer, layers).rows(both, rounds, rep_ms, load_s)
            yield [{**row, "date": now(), **about} for row in found]
    finally:
        ahead.close()


def _compiled(ahead: CompileAhead, job: Job) -> None:
    try:
        ahead.result(job).result()
    except ChildFailure as failure:
        raise UserError(f"{job[0].label()} does not compile: {failure.reason}") from failure


def _jobs(points: Sequence[Point], both: Sequence[Arrangement]) -> list[Job]:
    pairs = [pair for made in both for pair in zip(points, made.schedules, strict=True)]
    return [job_of(point, Candidate(schedule=schedule)) for point, schedule in pairs]


ENVIRONMENT = ("device_name", "driver", "torch", "triton", "kernels")


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each point: medians in microseconds and shared over independent."""
    medians: dict[Any, dict[str, list[float]]] = {}
    for row in rows:
        place = medians.setdefault((row["scenario"], row["num_tokens"]), {})
        place.setdefault(row["arrangement"], []).append(statistics.median(row["times_us"]))
    lines = []
    for (scenario, tokens), times in medians.items():
        apart, once = (statistics.median(times[name]) for name in ("independent", "shared"))
        alone = statistics.median(times["independent, alignment alone"])
        lines.append(
            f"{scenario:<22} {tokens:>6} tokens  independent {apart:8.1f} us (alignments {alone:5.1f})  "
            f"shared {once:8.1f} us  ratio {once / apart:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure on this machine's GPU, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=pathlib.Path, default=pathlib.Path("data/nvidia_h200"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rep-ms", type=float, default=15.0)
    arguments = parser.parse_args()
    require_gpu(visible_gpus())
    from chord_lab.measurement.gpu import GpuTimer

    work = recorded_layers(read_tables(arguments.records)[0])
    if not work:
        raise UserError(f"{arguments.records} holds no point of {', '.join(SCENARIOS)} with both projections")
    rows: list[dict[str, Any]] = []
    try:
        for found in measure(GpuTimer(), work, arguments.rounds, arguments.rep_ms):
            rows += found
            print(summary(found), flush=True)
    finally:
        if rows:
            print(f"{write(rows, arguments)}: {len(rows)} rows")


def write(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> pathlib.Path:
    """What was measured, also when it was stopped half way."""
    path: pathlib.Path = arguments.out / f"shared-alignment-{rows[0]['date'][:10]}.pq"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".tmp"), compression="zstd")
    path.with_suffix(".tmp").replace(path)
    return path


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"shared_alignment: {error}")

"""Profiling one point under several schedules: counters by a collector, times by events, one set of files."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chord_lab.cli import notes
from chord_lab.errors import UserError

if TYPE_CHECKING:
    from chord_lab.measurement.live import LiveSettings
    from chord_lab.records import Record
    from chord_lab.records.attempt import Candidate, Point
    from chord_lab.traces import Trace

MOST_TOKENS = 1 << 20
Jobs = Sequence[tuple["Point", "Candidate"]]


class Profiled(NamedTuple):
    """What a profile run wrote."""

    name: str  # stem of its files
    files: list[Path]
    trace: Trace | None  # None: times by events alone
    records: list[Record]


def chosen_jobs(
    scenario: str,
    schedules: Sequence[str],
    *,
    projection: str = "gate_up",
    tokens: int | None = None,
    draw: str | None = None,
    seed: int = 0,
    profile: str | None = None,
) -> list[tuple[Point, Candidate]]:
    """The attempts that a command line names: one point, each schedule once, each legal on this device."""
    from w4a16_moe.legality import why_illegal
    from w4a16_moe.profiles import get_profile

    from chord_lab.cli.measuring import DEFAULT_DEVICE
    from chord_lab.cli.schedule_text import parse_schedule
    from chord_lab.records.attempt import Candidate
    from chord_lab.scenarios import get_scenario
    from chord_lab.sweeps.points import scenario_points
    from chord_lab.sweeps.space import default_schedule, device_named

    found = get_scenario(scenario)
    count = tokens if tokens is not None else max(p.num_tokens for p in found.points)
    if not 1 <= count <= MOST_TOKENS:
        raise UserError(f"--tokens {count}: legal are 1 to {MOST_TOKENS}")
    (point,) = scenario_points(
        found, tokens=[count], draws=[draw] if draw else None, seed=seed, projections=[projection], profile=profile
    )
    device = _device() or device_named(DEFAULT_DEVICE)
    default = default_schedule(point, device)
    jobs = []
    for text in dict.fromkeys(schedules):
        schedule = parse_schedule(text, default)
        problem = why_illegal(schedule, point.problem, get_profile(point.profile), device)
        if problem is not None:
            raise UserError(
                f"--schedule {text!r} ({schedule.label()}) is not legal here: {problem.rule}: {problem.reason}"
            )
        jobs.append((point, Candidate(schedule=schedule, default=schedule == default)))
    return list(dict.fromkeys(jobs))  # "default" and its own label are one schedule


def _device() -> Any:
    """Limits of the visible GPU when it is a known one."""
    from w4a16_moe.devices import DEVICES, device_slug

    from chord_lab.cli.measuring import visible_gpus
    from chord_lab.measurement.nvml import Nvml

    gpus = visible_gpus()
    name = Nvml.of_visible(gpus[0]).name() if gpus else None
    return DEVICES.get(device_slug(name)) if name else None


def chosen_collector(collector: str) -> str:
    """The collector to use. Raises UserError in one line when it is not available, with what to do."""
    from chord_lab.traces.collectors import COLLECTORS, capabilities

    legal = ("auto", *COLLECTORS)
    if collector not in legal:
        raise UserError(f"--collector {collector!r}: legal are {', '.join(legal)}")
    found = {c.name: c for c in capabilities()}
    if collector == "auto":  # a child process disturbs nothing here and works with every version since 2024
        collector = next((n for n in ("ncu", "nsight-python") if found[n].available), "ncu")
    if not found[collector].available:
        raise UserError(f"{found[collector].why_not}{_no_gpu_remark()}")
    return collector


def _no_gpu_remark() -> str:
    from chord_lab.cli.measuring import visible_gpus

    return "" if visible_gpus() else " (nor is there a CUDA GPU here)"


def run_profile(
    jobs: Jobs, out: Path, *, collector: str, metrics: str = "lab", name: str = "", live: LiveSettings | None = None
) -> Profiled:
    """Profile and time the jobs, then put their files into ``out``: all or none. ``live``: how the timing is done.

    Counters come first: what is forbidden or missing shows within seconds, before anything was measured.
    """
    from chord_lab.traces.collectors import ncu_options

    if collector == "events" and live is None:
        _require_gpu()
    ncu_options(metrics)  # a mistyped metric is refused before anything runs
    name = name or file_stem(jobs)
    # beside the destination, so that the finished files only need to be renamed
    with (
        _unwound_by_sigterm(),
        tempfile.TemporaryDirectory(prefix=".chord-profile-", dir=_existing_parent(out)) as work,
    ):
        folder = Path(work)
        live = live or live_settings(len(jobs))
        trace = _collect(jobs, folder / f"{name}.ncu-rep", collector, metrics, live.worker.bench_settings)
        records = _event_records(jobs, folder / "events", live)
        joined = _finished(trace, records, [candidate.key_at(point) for point, candidate in jobs])
        files = _write(folder, joined, records, name)
        out.mkdir(parents=True, exist_ok=True)
        for file in files:
            os.replace(file, out / file.name)
    return Profiled(name, [out / file.name for file in files], joined, records)


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM (a job's end, a closing container) ends like Ctrl-C: ncu is stopped, half-made files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _existing_parent(out: Path) -> Path:
    existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--out {out}: {existing} is no folder that can be written to")
    return existing


def file_stem(jobs: Jobs) -> str:
    """``kimi-k2-ep8-decode-gate_up-320-uniform-1f2e3d4c``: the same attempts replace their files, others add theirs."""
    point = jobs[0][0]
    keys = "".join(sorted(candidate.key_at(point) for point, candidate in jobs))
    digest = hashlib.sha256(keys.encode()).hexdigest()[:8]
    text = f"{point.scenario}-{point.projection}-{point.routed_m}-{point.routing.draw}-{digest}"
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)


def _collect(jobs: Jobs, report: Path, collector: str, metrics: str, bench: Mapping[str, Any]) -> Trace | None:
    if collector == "events":
        return None
    from chord_lab.measurement.profiled import spec_of
    from chord_lab.traces.collectors import find_ncu
    from chord_lab.traces.nsight_rows import trace_of_rows

    chosen = [] if metrics in ("lab", "time", "full") else metrics.split(",")
    spec_path, result_path = report.with_name("spec.json"), report.with_name("result.json")
    spec_path.write_text(json.dumps(spec_of(jobs, collector, chosen, bench)), encoding="utf-8")
    target = [sys.executable, "-m", "chord_lab.measurement.profiled", str(spec_path), str(result_path)]
    notes.print(f"profiling {len(jobs)} schedules with {collector}", highlight=False)
    if collector != "ncu":
        result = _run_target(target, result_path)
        return trace_of_rows(result, report.with_suffix(".json"), tool=collector)
    return _collect_ncu(find_ncu(), target, report, metrics, result_path)


def _collect_ncu(ncu: Any, target: Sequence[str], report: Path, metrics: str, result_path: Path) -> Trace:
    from chord_lab.traces.collectors import export_raw_csv, run_ncu
    from chord_lab.traces.ncu_csv import read_ncu_csv
    from chord_lab.traces.ncu_report import available, read_ncu_report

    try:
        run_ncu(ncu, target, report, metrics=metrics, environment=child_environment())
    except UserError:
        _raise_target_error(result_path)  # the target's own reason says more than ncu's about it
        raise
    _raise_target_error(result_path)
    # the machine with the GPU may lack ncu-report: then ncu itself exports the same figures
    trace = read_ncu_csv(report, export_raw_csv(ncu, report), []) if available() else read_ncu_report(report)
    return replace(trace, facts=trace.facts | {"version": ncu.text()})


def child_environment() -> dict[str, str]:
    """The environment of a child that must find the same packages as this process."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in (*sys.path, os.environ.get("PYTHONPATH", "")) if p)}


def _raise_target_error(result_path: Path) -> None:
    if result_path.exists():
        error = json.loads(result_path.read_text(encoding="utf-8")).get("error")
        if error:
            raise UserError(f"cannot profile here: {error}")


def _run_target(target: Sequence[str], result_path: Path) -> dict[str, Any]:
    import subprocess

    done = subprocess.run(target, capture_output=True, check=False, env=child_environment(), stdin=subprocess.DEVNULL)
    _raise_target_error(result_path)
    if done.returncode or not result_path.exists():
        last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it printed nothing"])[-1]
        raise UserError(f"the profiled process ended with code {done.returncode}: {last[:200]}")
    result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
    return result


def _require_gpu() -> None:
    from chord_lab.cli.measuring import visible_gpus

    if not visible_gpus():
        raise UserError("profiling needs a CUDA GPU and none is visible (`chord-lab doctor` says why)")


def live_settings(num_candidates: int) -> LiveSettings:
    """How profiled attempts are timed: three rounds of each at least, none leaves early, no peers."""
    from chord_lab.cli.measuring import visible_gpus
    from chord_lab.measurement.live import LiveSettings
    from chord_lab.measurement.rounds import RoundsPolicy
    from chord_lab.measurement.worker import WorkerSettings

    gpus = visible_gpus()
    return LiveSettings(
        worker=WorkerSettings(gpu=gpus[0] if gpus else None),
        policy=RoundsPolicy(min_rounds=3, keep=(num_candidates,)),
        peers="none",
        baseline=False,
    )


def _event_records(jobs: Jobs, folder: Path, live: LiveSettings) -> list[Record]:
    """The same attempts timed by CUDA events the way a sweep times them, ceilings beside them."""
    import numpy as np

    from chord_lab.measurement.live import LiveMeasure
    from chord_lab.records import read_records
    from chord_lab.sweeps.plan import Plan
    from chord_lab.sweeps.run import run

    points = list(dict.fromkeys(point for point, _ in jobs))
    candidates = list(dict.fromkeys(candidate for _, candidate in jobs))
    pairs = sorted((points.index(p), candidates.index(c)) for p, c in jobs)
    plan = Plan(points, candidates, np.array(pairs, dtype=np.int32).reshape(-1, 2))
    notes.print(f"timing {len(jobs)} schedules by CUDA events", highlight=False)
    run(plan, LiveMeasure(live), folder)
    return list(read_records(folder).records)


def _finished(trace: Trace | None, records: Sequence[Record], order: Sequence[str]) -> Trace | None:
    from chord_lab.traces.join import with_identity

    if trace is None:
        return None
    ceilings = {r.ran_kernel: _ceiling(r) for r in records if r.kind == "ceiling" and r.status == "ok"}
    return with_identity(replace(trace, facts=trace.facts | {"ceilings": ceilings}), records, order)


def _ceiling(record: Record) -> float | None:
    """GB/s of the copy, TFLOPS of the dense product."""
    from chord_lab.records import bandwidth_gbps, tflops

    return tflops(record) if record.work_flops else bandwidth_gbps(record)


def _write(folder: Path, joined: Trace | None, records: Sequence[Record], name: str) -> list[Path]:
    from chord_lab.records import write_parquet
    from chord_lab.traces.stored import STORED_SUFFIX, write_stored

    write_parquet(records, folder / f"{name}.records.parquet")
    files = [folder / f"{name}.records.parquet"]
    if joined is not None:
        write_stored(joined, folder / f"{name}{STORED_SUFFIX}")
        files.append(folder / f"{name}{STORED_SUFFIX}")
        if (folder / f"{name}.ncu-rep").exists():
            files.append(folder / f"{name}.ncu-rep")
    return files

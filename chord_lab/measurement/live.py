"""Live measurement on one GPU: this process plans and writes, a child measures, other children compile ahead."""

from __future__ import annotations

import pathlib
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from w4a16_moe.devices import DEVICES, device_slug

from chord_lab.errors import UserError
from chord_lab.measurement.child import ChildFailure
from chord_lab.measurement.compile_ahead import SERVER, CompileAhead
from chord_lab.measurement.contest import LOAD_S, Contest
from chord_lab.measurement.features import floor_us
from chord_lab.measurement.memory import FLUSH_BYTES
from chord_lab.measurement.peers.ahead import HUMMING_AHEAD, PeersAhead
from chord_lab.measurement.rounds import RoundsPolicy
from chord_lab.measurement.stage import Stage, job_of
from chord_lab.measurement.worker import Worker, WorkerSettings
from chord_lab.records.attempt import Candidate, Point, Sink
from chord_lab.records.journal import now
from chord_lab.records.record import Environment, Method, Record

GRAPH_BELOW_US = 500.0  # floor of a point's time: below, the host's 50 to 200 us for a launch may show on a busy host
CEILINGS = ("copy", "dense_bf16")


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """How a live run is done; `worker`, `compile_server` and `peer_server` name what the child processes run."""

    worker: WorkerSettings = field(default_factory=WorkerSettings)
    policy: RoundsPolicy = field(default_factory=RoundsPolicy)
    compile_server: str = SERVER
    peer_server: str = HUMMING_AHEAD
    jobs: int | None = None  # compiling processes; one per core but one when None
    peers: str = "own"  # see `peers.ahead.PEERS`
    baseline: bool = True
    ceilings: bool = True
    load_s: float = LOAD_S
    log: pathlib.Path | None = None  # what child processes print


class LiveMeasure:
    """The `Measure` protocol on a GPU."""

    source = "live"

    def __init__(self, settings: LiveSettings | None = None):
        self.settings = settings or LiveSettings()

    def measure(self, plan: Any, sink: Sink) -> None:
        """Measure every candidate of the plan that this environment has no record of yet."""
        with self.session() as session:
            session.measure(plan, sink)

    def session(self) -> LiveSession:
        """Child processes that stay from one plan to the next."""
        return LiveSession(self.settings)


class LiveSession:
    """The child processes of one GPU, kept from one plan to the next."""

    def __init__(self, settings: LiveSettings):
        self.settings = settings
        self._stack = ExitStack()
        self.worker = Worker(settings.worker)
        self._stack.callback(self.worker.close)
        try:
            self._hello = self.worker.hello()
        except BaseException:
            self._stack.close()
            raise
        self.environment = environment_from(self._hello)
        self._ahead: CompileAhead | None = None
        self._visited: set[Point] = set()

    def __enter__(self) -> LiveSession:
        return self

    def welcome_guests(self, point: Point) -> None:
        """Let peers and the baseline run at a point again: they did not when it was visited."""
        self._visited.discard(point)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, plan: Any, sink: Sink) -> None:
        """See `LiveMeasure.measure`."""
        sink.started(self.environment)
        done = sink.done(self.environment)
        work = [(point, missing(point, all_, done)) for point, all_ in plan.by_point()]
        work = [(point, left) for point, left in work if left]
        if not work:
            return
        self._compile(work)
        fresh = [point for point, _ in work if point not in self._visited]  # a search comes back to a point
        peers = self._peers_ahead(sink, fresh)
        try:
            if fresh:
                self._ceilings(sink)
            for point, left in work:
                if sink.out_of_budget():
                    return
                self._point(point, left, peers, sink, done)
                self._visited.add(point)
            if fresh:
                self._ceilings(sink)
        finally:
            peers.close()

    def _compile(self, work: list[tuple[Point, list[Candidate]]]) -> None:
        settings = self.settings
        if self._ahead is None:
            capability = self._hello.get("capability", 0)
            self._ahead = CompileAhead(capability, jobs=settings.jobs, server=settings.compile_server, log=settings.log)
            self._stack.callback(self._ahead.close)
        for priority, (point, left) in enumerate(work):
            self._ahead.submit([job_of(point, c) for c in sorted(left, key=lambda c: not c.default)], priority)

    def _peers_ahead(self, sink: Sink, points: list[Point]) -> PeersAhead:
        settings = self.settings
        peers = PeersAhead(settings.peers, sink, server=settings.peer_server, gpu=settings.worker.gpu, log=settings.log)
        peers.submit(points)
        return peers

    def _point(self, point: Point, left: list[Candidate], peers: PeersAhead, sink: Sink, done: Collection[str]) -> None:
        method = self._method(timer_of(point))
        contest = Contest(
            point, self.worker, sink, policy=self.settings.policy, environment=self.environment, method=method
        )
        try:
            self.worker.open(point, method)
        except ChildFailure as failure:
            sink.note(f"{point.label()}: {failure.reason}")
            for candidate in left:
                contest.fail(candidate, failure)
            return

        def guests() -> list[Candidate]:
            found = peers.candidates(point)
            if self.settings.baseline and point.interface == "indexed" and point not in self._visited:
                found.append(Candidate(kind="baseline", implementation="torch_dequant_bf16"))
            return [guest for guest in found if guest.key_at(point) not in done]

        assert self._ahead is not None
        Stage(contest, self._ahead, smem_limit(self.environment)).run(left, guests)

    def _method(self, timer: str) -> Method:
        policy = self.settings.policy
        return Method(
            timer=timer,
            l2="cleared",
            timed="gemm",
            flush_bytes=FLUSH_BYTES,
            warmup_ms=policy.warmup_ms,
            rep_ms=policy.rep_ms,
            load_s=self.settings.load_s,
        )

    def _ceilings(self, sink: Sink) -> None:
        """What the device can do at best, measured in this very run and in repeats as long as a candidate's."""
        policy = self.settings.policy
        for name in CEILINGS if self.settings.ceilings else ():
            result: dict[str, Any]
            try:
                answers = [
                    self.worker.ceiling(name, policy.rep_ms, policy.warmup_ms) for _ in range(policy.confirm_rounds)
                ]
                result = {
                    "times_us": tuple(tuple(answer["times_us"]) for answer in answers),
                    "rounds": tuple(range(len(answers))),
                    "sm_mhz": tuple(answer["sm_mhz"] for answer in answers),
                    "power_w": tuple(answer["power_w"] for answer in answers),
                    "work_bytes": answers[0]["work_bytes"],
                    "work_flops": answers[0]["work_flops"],
                }
            except ChildFailure as failure:
                result = {"status": failure.status, "rule": failure.rule, "reason": failure.reason}
            sink.append(
                Record(
                    run_id=sink.run_id,
                    date=now(),
                    kind="ceiling",
                    implementation=name,
                    environment=self.environment,
                    method=self._method("cuda_event"),
                    ran_kernel=name,
                    **result,
                )
            )


def timer_of(point: Point) -> str:
    """How launches of a point are timed: from a graph where the host's share could show.

    A grouped launch is a public call with its checks and, for masked rows, a second kernel: always from a graph.
    """
    return "graph_replay" if point.interface != "indexed" or floor_us(point) < GRAPH_BELOW_US else "cuda_event"


def missing(point: Point, candidates: list[Candidate], done: Collection[str]) -> list[Candidate]:
    """What has no record yet, and the default beside it, even if it has one: times are compared within rounds."""
    left = [c for c in candidates if c.key_at(point) not in done]
    if left and not any(c.default for c in left):
        left = [*(c for c in candidates if c.default), *left]
    return left


def environment_from(hello: dict[str, Any]) -> Environment:
    """The environment that a measuring process reports."""
    known = {k: v for k, v in hello.items() if k in Environment.__dataclass_fields__}
    return Environment(**{"device": device_slug(hello["device_name"]), **known})


def smem_limit(environment: Environment) -> int:
    """Shared memory a CTA may use on this device; 0 where it is not known."""
    device = DEVICES.get(environment.device)
    return device.smem_per_cta if device else 0


def require_gpu(gpus: Collection[str]) -> None:
    """One line for who asks to measure live where nothing can."""
    if not gpus:
        raise UserError(
            "--source live needs a CUDA GPU and none is visible (`chord-lab doctor` says why); "
            "--source replay uses recorded measurements"
        )

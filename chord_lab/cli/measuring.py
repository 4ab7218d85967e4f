"""What the measuring commands share: choosing a source, making its `Measure` and its plan."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from chord_lab.cli import console, notes
from chord_lab.cli.reading import read_run, say
from chord_lab.errors import UserError

if TYPE_CHECKING:
    from w4a16_moe.devices import Device

    from chord_lab.records.attempt import Measure, Point
    from chord_lab.sweeps.plan import Plan
    from chord_lab.sweeps.run import Run

SEARCHES = ("grid", "optuna", "optuna-grid")
SOURCES = ("auto", "live", "replay", "predict")
DEFAULT_DEVICE = "nvidia_h200"  # what a plan is judged for where there is no GPU


@dataclass(kw_only=True)
class Request:
    """What was asked for on the command line."""

    scenario: str
    source: str = "auto"
    draws: list[str] = field(default_factory=list)
    seed: int | None = None  # of the draws; None: 0 where they are drawn, any where they are replayed
    tokens: str = "all"
    projections: list[str] = field(default_factory=list)
    profile: str | None = None
    kernels: list[str] = field(default_factory=list)
    space: str = "focus"
    peers: str = "own"
    min_rounds: int = 1
    rep_ms: float = 20.0
    data: pathlib.Path | None = None
    device: str = DEFAULT_DEVICE
    jobs: int | None = None
    rounds: dict[str, Any] = field(default_factory=dict)  # other fields of `RoundsPolicy`
    search: str = "grid"
    budgeted: bool = False  # whether candidates may be left over, so that their order matters
    most: int | None = None  # candidates allowed, where a search shares them out among points
    dask: str | None = None

    def token_counts(self) -> str | list[int]:
        """``all``, ``published``, or numbers, each once."""
        if self.tokens in ("all", "published"):
            return self.tokens
        parts = [part.strip() for part in self.tokens.split(",")]
        if not all(part.isdecimal() and len(part) <= 9 for part in parts):
            raise UserError(f"--points {self.tokens!r}: legal are all, published, or token counts such as 20,40")
        return list(dict.fromkeys(map(int, parts)))

    def check(self) -> None:
        """Refuse what no source could mean, whether or not this one would use it."""
        from w4a16_moe.profiles import PROFILES

        from chord_lab.measurement.peers.ahead import PEERS
        from chord_lab.routing.draws import parse_draw
        from chord_lab.scenarios import PROJECTIONS
        from chord_lab.sweeps.space import SPACES, device_named

        self.token_counts()
        device_named(self.device)
        for draw in self.draws:
            parse_draw(draw)
        kernels = sorted({kernel for profile in PROFILES.values() for kernel in profile.kernels})
        named = [("profile", [self.profile] if self.profile else [], PROFILES), ("kernel", self.kernels, kernels)]
        named += [("projection", self.projections, PROJECTIONS), ("space", [self.space], SPACES)]
        named += [("peers", [self.peers], PEERS), ("search", [self.search], SEARCHES)]
        for name, values, legal in named:
            for value in values:
                if value not in legal:
                    raise UserError(f"--{name} {value!r}: legal are {', '.join(legal)}")
        if self.seed is not None and abs(self.seed) >= 1 << 63:
            raise UserError(f"--seed must be below 2^63, not {self.seed}")
        if self.dask is not None and not self.dask.strip():
            raise UserError("--dask is empty; legal: local, cuda, or an address such as tcp://host:8786")
        counts = {"--jobs": self.jobs, "--min-rounds": self.min_rounds, "--rep-ms": self.rep_ms}
        for option, count in counts.items():
            if count is not None and not (count > 0 and math.isfinite(count)):
                raise UserError(f"{option} must be more than 0, not {count:g}")

    def without_effect(self) -> list[str]:
        """Options that were set and that a replay cannot follow: it has what was recorded."""
        plain = Request(scenario=self.scenario)
        names = {"space": "--space", "peers": "--peers", "min_rounds": "--min-rounds", "rep_ms": "--rep-ms"}
        names |= {"jobs": "--jobs", "device": "--device"}
        return [option for name, option in names.items() if getattr(self, name) != getattr(plain, name)]

    def about(self) -> dict[str, Any]:
        """For the run's manifest."""
        return {
            "scenario": self.scenario,
            "draws": self.draws,
            "seed": self.seed,
            "points": self.tokens,
            "projections": self.projections,
            "profile": self.profile,
            "space": self.space,
            "search": self.search,
        }


def check_budget(seconds: float | None, candidates: int | None = None) -> None:
    """Refuse a budget that is none."""
    for name, value in (("--budget-seconds", seconds), ("--budget-candidates", candidates)):
        if value is not None and not value > 0:  # nan too
            raise UserError(f"{name} must be more than 0, not {value:g}")


@contextmanager
def interruptible(out: pathlib.Path) -> Iterator[None]:
    """Ctrl-C ends in one line and exit code 130: what was measured is on disk."""
    try:
        yield
    except KeyboardInterrupt:
        notes.print(f"stopped; what was measured is in {out}: go on with --resume", markup=False, soft_wrap=True)
        raise SystemExit(130) from None


def chosen_source(source: str) -> str:
    """``auto`` is live where a GPU is visible, else replay."""
    if source not in SOURCES:
        raise UserError(f"--source {source!r}: legal are {', '.join(SOURCES)}")
    if source == "auto":
        return "live" if visible_gpus() else "replay"
    return source


def source_of(request: Request) -> str:
    """The source of a request: a cluster measures live, whatever this host has."""
    if request.dask is not None:
        if request.source not in ("auto", "live"):
            raise UserError(f"--dask measures live; --source {request.source} needs no workers")
        return "live"
    return chosen_source(request.source)


def visible_gpus() -> list[str]:
    """GPUs that this process may use, as values of CUDA_VISIBLE_DEVICES."""
    from chord_lab.measurement.nvml import visible_gpus as ask

    return ask()


def prepare(request: Request, out: pathlib.Path) -> tuple[Measure, Plan]:
    """The measure and the plan of a request."""
    from chord_lab.scenarios import get_scenario

    get_scenario(request.scenario)  # an unknown name is refused before anything else
    request.check()
    source = source_of(request)
    if request.search != "grid" and (source != "live" or request.dask is not None):
        raise UserError(f"--search {request.search} measures live on one GPU; with {source} or --dask use grid")
    if source == "replay":
        return _replay(request)
    if source == "predict":
        return _predict(request)
    return _live(request, out)


def plan_for(request: Request, device: Device) -> Plan:
    """The plan of a request on a device, without a GPU."""
    from chord_lab.sweeps.plan import make_plan

    order = _predicted_order(request, device) if request.budgeted else None
    return make_plan(points_of(request), device, space=request.space, kernels=request.kernels or None, order=order)


def _predicted_order(request: Request, device: Device) -> Any:
    """Best guess first, where records of this device can be fitted: a budget that runs out then costs least."""
    from chord_lab.measurement.predict import predictor_from_data

    try:
        predictor = predictor_from_data(request.data, device)
    except UserError as error:
        notes.print(f"candidates in the order of the space, not of a prediction: {error}", markup=False, soft_wrap=True)
        return None
    notes.print(f"candidates ordered by prediction ({predictor.basis})", markup=False, highlight=False)
    return predictor.model.order


def points_of(request: Request) -> list[Point]:
    """The points of a request."""
    from chord_lab.sweeps.points import scenario_points

    return scenario_points(
        request.scenario,
        tokens=request.token_counts(),
        draws=request.draws or None,
        seed=request.seed or 0,
        projections=request.projections or ("gate_up", "down"),
        profile=request.profile,
    )


def _live(request: Request, out: pathlib.Path) -> tuple[Measure, Plan]:
    if request.search != "grid":
        return _search(request, out)
    measure, device = over_workers(request, out) if request.dask is not None else on_this_gpu(request, out)
    return measure, plan_for(request, device)


def _search(request: Request, out: pathlib.Path) -> tuple[Measure, Plan]:
    from chord_lab.measurement.live import LiveMeasure, require_gpu
    from chord_lab.sweeps.search import PER_POINT, SearchMeasure, search_plan

    gpus = visible_gpus()
    require_gpu(gpus)
    settings = live_settings(request, out, gpus[0])
    device = live_device(settings, gpus[0])
    plan = search_plan(points_of(request), device)
    share = PER_POINT if request.most is None else max(1, request.most // max(1, len(plan)))
    search = SearchMeasure(
        LiveMeasure(settings).session,
        device,
        out,
        space="full",
        sampler="tpe" if request.search == "optuna" else "grid",
        per_point=share,
        seed=request.seed or 0,
    )
    return search, plan


def over_workers(request: Request, out: pathlib.Path) -> tuple[Measure, Device]:
    """Over dask workers; what is planned is judged for this host's GPU, or for --device where they are elsewhere."""
    from w4a16_moe.devices import device_slug

    from chord_lab.measurement.cluster import ClusterMeasure
    from chord_lab.measurement.cores import compilers
    from chord_lab.measurement.nvml import Nvml
    from chord_lab.sweeps.space import device_named

    where = request.dask or "local"
    gpus = visible_gpus()
    here = device_slug(Nvml.of_visible(gpus[0]).name()) if gpus and where in ("local", "cuda") else ""
    device = device_named(here or request.device)
    workers = max(1, len(gpus)) if where in ("local", "cuda") else 1
    if request.jobs is None:  # workers of one host share its cores
        request = replace(request, jobs=compilers(share=workers))
    return ClusterMeasure(where, live_settings(request, out, None), device=device.slug), device


def on_this_gpu(request: Request, out: pathlib.Path) -> tuple[Measure, Device]:
    """On the first GPU that is visible here."""
    from chord_lab.measurement.live import LiveMeasure, require_gpu

    gpus = visible_gpus()
    require_gpu(gpus)
    settings = live_settings(request, out, gpus[0])
    return LiveMeasure(settings), live_device(settings, gpus[0])


def live_settings(request: Request, out: pathlib.Path, gpu: str | None) -> Any:
    """Settings of a live run of this request."""
    from chord_lab.measurement.live import LiveSettings
    from chord_lab.measurement.rounds import RoundsPolicy
    from chord_lab.measurement.worker import WorkerSettings

    out.mkdir(parents=True, exist_ok=True)
    log = out / "children.log"
    policy = RoundsPolicy(min_rounds=request.min_rounds, rep_ms=request.rep_ms, **request.rounds)
    worker = WorkerSettings(gpu=gpu, log=log)
    return LiveSettings(worker=worker, policy=policy, peers=request.peers, jobs=request.jobs, log=log)


def live_device(settings: Any, gpu: str) -> Device:
    """Limits of the GPU at hand: known by name, else asked of the measuring process."""
    from w4a16_moe.devices import DEVICES, Device, device_slug

    from chord_lab.measurement.nvml import Nvml
    from chord_lab.measurement.worker import Worker

    name = Nvml.of_visible(gpu).name()
    if name and device_slug(name) in DEVICES:
        return DEVICES[device_slug(name)]
    worker = Worker(settings.worker)
    try:
        hello = worker.hello()
    finally:
        worker.close()
    return DEVICES.get(device_slug(hello["device_name"])) or Device(
        slug=device_slug(hello["device_name"]),
        capability=hello["capability"],
        num_sms=hello["num_sms"],
        smem_per_cta=hello["smem_per_cta"],
        smem_per_sm=hello["smem_per_sm"],
        memory_bytes=hello["total_memory_bytes"],
    )


def _replay(request: Request) -> tuple[Measure, Plan]:
    from chord_lab.measurement.replay import ReplayMeasure
    from chord_lab.sweeps.recorded import recorded_plan

    table = recorded_table(request)
    idle = request.without_effect()
    if idle:
        notes.print(f"replaying what was recorded: {', '.join(idle)} without effect", markup=False, highlight=False)
    return ReplayMeasure(table), recorded_plan(table)


def recorded_table(request: Request) -> Any:
    """The records of a request's scenario."""
    from chord_lab.records.places import data_directory
    from chord_lab.sweeps.recorded import of_scenario

    table = read_run(data_directory(request.data))
    counts = request.token_counts()
    if counts == "published":
        from chord_lab.scenarios import get_scenario

        counts = [p.num_tokens for p in get_scenario(request.scenario).points if p.published]
    rows, remarks = of_scenario(
        table,
        request.scenario,
        tokens=counts,
        draws=request.draws or None,
        projections=request.projections or None,
        profile=request.profile,
        kernels=request.kernels or None,
        seed=request.seed,
    )
    say(remarks)
    return rows


def _predict(request: Request) -> tuple[Measure, Plan]:
    from chord_lab.measurement.predict import predictor_from_data
    from chord_lab.sweeps.space import device_named

    device = device_named(request.device)
    return predictor_from_data(request.data, device), plan_for(request, device)


def describe_source(run: Run, source: str) -> str:
    """``recorded on NVIDIA H200, 2026-11-29`` or ``live on NVIDIA H200``."""
    environment = run.environment
    where = environment.device_name if environment else "no device"
    if source == "live":
        return f"live on {where}, driver {environment.driver if environment else '?'}"
    return f"{source} on {where}"


def print_plan(plan: Plan, source: str, device: str) -> None:
    """What `--plan-only` shows."""
    summary = plan.summary()
    from chord_lab.measurement.cores import usable_cores

    cores = usable_cores()
    console.print(
        f"{summary['candidates']} candidates at {summary['points']} points, judged for {device}\n"
        f"{summary['kernels_to_compile']} kernels to compile; {summary['num_refused']} candidates refused by rule",
        highlight=False,
    )
    for rule, refused in summary["refused"].items():
        text = f"  {refused['count']:>6} {rule}; for example {refused['example']}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if source == "live":
        seconds = plan.expected_seconds(cores)
        console.print(f"expected time live: about {seconds:.0f} s with {cores} cores", highlight=False)

"""``chord-lab record``: measure what ships in data/ (what `make record` runs)."""

from __future__ import annotations

import pathlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord_lab.cli import app, console, notes, print_json
from chord_lab.cli.measuring import Request, check_budget, interruptible, on_this_gpu, over_workers
from chord_lab.cli.progress import watching
from chord_lab.errors import UserError

if TYPE_CHECKING:
    from w4a16_moe.devices import Device

    from chord_lab.records.attempt import Point
    from chord_lab.scenarios import Scenario

SCENARIOS = (
    "kimi-k2/ep8/decode",
    "kimi-k2/ep8/prefill",
    "kimi-k2/tp8/decode",
    "kimi-k2/tp8/prefill",
    "kimi-k2/ep8/grouped_prefill",
    "kimi-k2/ep8/grouped_decode",
)
MAX_ROUNDS = 5  # of the closest contenders; everyone else has --min-rounds
DRAWS = ("uniform", "balanced", "zipf:1.0")  # of the indexed scenarios; a grouped one has a draw of its own
OWN = "own"  # the scenario's own profile


@app.command("record")
def record(
    out: Annotated[pathlib.Path, typer.Option(help="Directory of the recording.")] = pathlib.Path("runs/record"),
    budget_seconds: Annotated[float | None, typer.Option(help="Stop after so many seconds.")] = None,
    scenario: Annotated[list[str] | None, typer.Option(help="Scenarios; Kimi K2 EP8 and TP8 when not given.")] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="Profiles, or own: the scenario's; default: portable and own.")
    ] = None,
    space: Annotated[str, typer.Option(help="record, focus or full.")] = "record",
    points: Annotated[str, typer.Option(help="all or published; other draws are published points only.")] = "all",
    draw: Annotated[list[str] | None, typer.Option(help="Default: all three; grouped: balanced.")] = None,
    peers: Annotated[str, typer.Option(help="none, own or tiles.")] = "tiles",
    min_rounds: Annotated[int, typer.Option(help="Interleaved repeats of every candidate.")] = 3,
    rep_ms: Annotated[float, typer.Option(help="Milliseconds of one repeat.")] = 10.0,
    jobs: Annotated[int | None, typer.Option(help="Compiling processes.")] = None,
    dask: Annotated[
        str | None, typer.Option(help="Over dask workers: local (one a GPU), cuda, or ADDRESS of a scheduler.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the routing draws.")] = 0,
    missing_from: Annotated[
        pathlib.Path | None, typer.Option(help="Only points that these records lack or hold in part.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the recording in --out.")] = False,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Say what would be done.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Record the published points, both sides of the block_m turn, three draws, ceilings and peers in one run."""
    from chord_lab.sweeps.plan import make_plan
    from chord_lab.sweeps.space import device_named

    request = Request(
        scenario=",".join(scenario or SCENARIOS),
        source="live",
        draws=list(draw or ()),
        seed=seed,
        tokens=points,
        space=space,
        peers=peers,
        min_rounds=min_rounds,
        rep_ms=rep_ms,
        jobs=jobs,
        dask=dask,
        rounds={"max_rounds": max(min_rounds, MAX_ROUNDS), "keep": (48, 24, 6, 4)},
    )
    request.check()
    check_budget(budget_seconds)
    for name in [name for name in profile or () if name != OWN]:
        replace(request, profile=name).check()
    if points not in ("all", "published"):
        raise UserError(f"--points {points!r}: legal are all, published")
    wanted = recording_points(request, list(scenario or SCENARIOS), profile)
    if plan_only:
        device = device_named("nvidia_h200")
        plan = make_plan(wanted, device, space=space).at_unfinished_points(recorded_keys(missing_from, device))
        print_json(plan.summary()) if as_json else _print_plan(plan)
        return
    result = _record(request, wanted, out, missing_from, resume, budget_seconds)
    if as_json:
        print_json(result)
        return
    for name, value in result.items():
        console.print(f"{name:<12} {value}", markup=False, highlight=False, soft_wrap=True)


def _record(
    request: Request,
    wanted: list[Point],
    out: pathlib.Path,
    missing_from: pathlib.Path | None,
    resume: bool,
    budget_seconds: float | None,
) -> dict[str, Any]:
    """Measure the points and write the file that ships; Ctrl-C and a used-up budget leave what was measured."""
    from chord_lab.sweeps.plan import make_plan
    from chord_lab.sweeps.run import Budget, run

    measure, device = over_workers(request, out) if request.dask is not None else on_this_gpu(request, out)
    plan = make_plan(_runnable(wanted, device), device, space=request.space)
    plan = plan.at_unfinished_points(recorded_keys(missing_from, device))
    began, budget = time.monotonic(), Budget(budget_seconds)
    with watching() as watch, interruptible(out):
        done = run(plan, measure, out, resume=resume, budget=budget, about=request.about(), watch=watch)
    path = ship(out)
    return {**summary_of(out), "seconds": time.monotonic() - began, "partial": done.cut_short, "file": str(path)}


def recording_points(request: Request, scenarios: list[str], profiles: list[str] | None) -> list[Point]:
    """Published points under every draw first, then the others under the first draw: a cut recording is of use."""
    from chord_lab.scenarios import get_scenario
    from chord_lab.sweeps.points import scenario_points

    first, later, others = [], [], []
    seed = request.seed or 0
    for name in scenarios:
        scenario = get_scenario(name)
        for profile in _profiles(scenario, profiles):
            draws = request.draws or (DRAWS if scenario.interface == "indexed" else (scenario.draw,))
            published = scenario_points(name, tokens="published", draws=draws[:1], seed=seed, profile=profile)
            first += published
            if request.tokens == "all":
                whole = scenario_points(name, draws=draws[:1], seed=seed, profile=profile)
                later += [point for point in whole if point not in set(published)]
            if profiles or profile == scenario.profile:  # the other draws are about the scenario's own profile
                others += (
                    scenario_points(name, tokens="published", draws=draws[1:], seed=seed, profile=profile)
                    if draws[1:]
                    else []
                )
    return first + later + others


def recorded_keys(path: pathlib.Path | None, device: Device) -> set[str]:
    """Attempts that `path` has a record of, measured on `device` with the kernels of this very package."""
    from chord_lab.measurement.versions import kernels_hash
    from chord_lab.records.parquet import read_records

    if path is None:
        return set()
    found = read_records(path)
    for text in found.notices:
        notes.print(text, markup=False, highlight=False, soft_wrap=True)
    of_device = [r for r in found.records if r.environment.device == device.slug]
    own = [r for r in of_device if r.environment.kernels == kernels_hash()]
    if others := len(of_device) - len(own):
        text = f"{others} of {len(of_device)} records in {path} are of other kernels than this package's: not counted"
        notes.print(text, markup=False, highlight=False, soft_wrap=True)
    return {r.key() for r in own}


def _profiles(scenario: Scenario, wanted: list[str] | None) -> list[str]:
    """As wanted; by default the portable kernel beside the scenario's own profile, where it has the interface."""
    wanted = wanted or [*(["portable"] if scenario.interface == "indexed" else []), OWN]
    return list(dict.fromkeys(scenario.profile if name == OWN else name for name in wanted))


def _runnable(points: list[Point], device: Device) -> list[Point]:
    """Points whose profile has kernels and a heuristic in this build; the others are named once."""
    from chord_lab.sweeps.space import default_schedule

    good: list[Point] = []
    refused: dict[str, str] = {}
    for point in points:
        try:
            default_schedule(point, device)
        except (UserError, ValueError) as error:
            refused.setdefault(point.profile, str(error))
            continue
        good.append(point)
    for profile, reason in refused.items():
        notes.print(f"profile {profile} is left out: {reason}", markup=False, highlight=False, soft_wrap=True)
    return good


def ship(directory: pathlib.Path) -> pathlib.Path:
    """All journals of a recording as one Parquet file beside them, ready for data/."""
    from chord_lab.records.parquet import read_tables, write_parquet

    table, skipped = read_tables([*sorted(directory.glob("journal-*.jsonl"))])
    for text in skipped:
        notes.print(text, markup=False, highlight=False, soft_wrap=True)
    if not len(table):
        raise UserError(f"{directory} holds no records yet")
    device = table["device"][0].as_py()
    day = str(table["date"][0].as_py())[:10]
    target = directory / "ship" / device
    return write_parquet(table, target / f"records-{day}.parquet")


def summary_of(directory: pathlib.Path) -> dict[str, Any]:
    """Counts of a recording."""
    from chord_lab.records.parquet import read_tables

    table, _ = read_tables([*sorted(directory.glob("journal-*.jsonl"))], ["kind", "status", "implementation"])
    frame = table.to_pandas()
    return {
        "records": len(frame),
        "by status": {str(k): int(v) for k, v in frame.status.astype(str).value_counts().items()},
        "by implementation": {str(k): int(v) for k, v in frame.implementation.astype(str).value_counts().items()},
    }


def _print_plan(plan: Any) -> None:
    from chord_lab.cli.measuring import print_plan

    print_plan(plan, "live", "nvidia_h200")

"""``chord-lab sweep``: measure, replay or predict the candidates of a scenario into a directory."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord_lab.cli import app, console, notes, print_json
from chord_lab.cli.measuring import (
    DEFAULT_DEVICE,
    Request,
    check_budget,
    interruptible,
    plan_for,
    prepare,
    print_plan,
    source_of,
)
from chord_lab.cli.progress import watching
from chord_lab.errors import UserError

if TYPE_CHECKING:
    from chord_lab.sweeps.plan import Plan
    from chord_lab.sweeps.run import Run

Scenario = Annotated[str, typer.Argument(help="For example kimi-k2/ep8/decode; `chord-lab scenarios` lists them.")]
Source = Annotated[str, typer.Option(help="auto (live with a GPU, else replay), live, replay, predict.")]
Out = Annotated[pathlib.Path, typer.Option(help="Directory of the run: journal, records, manifest.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out: only what is missing.")]
Draw = Annotated[list[str] | None, typer.Option(help="Routing: uniform, balanced, zipf:S, file:PATH; repeatable.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the routing draw: 0, or what was recorded.")]
Points = Annotated[str, typer.Option(help="all, published, or token counts such as 20,40.")]
Projection = Annotated[list[str] | None, typer.Option(help="gate_up or down; both when not given.")]
Profile = Annotated[str | None, typer.Option(help="Weight profile; the scenario's own when not given.")]
Kernel = Annotated[list[str] | None, typer.Option(help="Kernels of the profile to try; all when not given.")]
Space = Annotated[str, typer.Option(help="focus (hand-picked grids), record (fewer knobs), full (every knob).")]
Search = Annotated[str, typer.Option(help="grid (every candidate), optuna (TPE) or optuna-grid, for large spaces.")]
Peers = Annotated[str, typer.Option(help="Humming beside ours: none, own (its heuristics), tiles (and forced tiles).")]
Seconds = Annotated[float | None, typer.Option(help="Stop after so many seconds; the results say partial.")]
Candidates = Annotated[int | None, typer.Option(help="Stop after so many candidates; the results say partial.")]
Data = Annotated[pathlib.Path | None, typer.Option(help="Recorded measurements to replay (CHORD_LAB_DATA, data/).")]
Device = Annotated[str, typer.Option(help="Device that a plan without a GPU is judged for.")]
Dask = Annotated[str | None, typer.Option(help="Spread over dask workers: ADDRESS, local, or cuda (one a GPU).")]
Jobs = Annotated[int | None, typer.Option(help="Compiling processes; one per core but one when not given.")]
MinRounds = Annotated[int, typer.Option(help="Interleaved repeats of every candidate, clear losers included.")]
RepMs = Annotated[float, typer.Option(help="Milliseconds of one repeat.")]


@app.command("sweep")
def sweep(
    scenario: Scenario,
    source: Source = "auto",
    out: Out = pathlib.Path("runs/sweep"),
    resume: Resume = False,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Say what would be done, and do nothing.")] = False,
    draw: Draw = None,
    seed: Seed = None,
    points: Points = "all",
    projection: Projection = None,
    profile: Profile = None,
    kernel: Kernel = None,
    space: Space = "focus",
    search: Search = "grid",
    peers: Peers = "own",
    budget_seconds: Seconds = None,
    budget_candidates: Candidates = None,
    data: Data = None,
    device: Device = DEFAULT_DEVICE,
    dask: Dask = None,
    jobs: Jobs = None,
    min_rounds: MinRounds = 1,
    rep_ms: RepMs = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Try every candidate of a scenario: measured live, replayed from records, or predicted."""
    request = Request(
        scenario=scenario,
        source=source,
        draws=draw or [],
        seed=seed,
        tokens=points,
        projections=projection or [],
        profile=profile,
        kernels=kernel or [],
        space=space,
        search=search,
        peers=peers,
        data=data,
        device=device,
        dask=dask,
        jobs=jobs,
        min_rounds=min_rounds,
        rep_ms=rep_ms,
    )
    if plan_only:
        show_plan(request, as_json)
        return
    run = do_sweep(request, out, resume, budget_seconds, budget_candidates)
    report = finished(run)
    if as_json:
        print_json(report)
        return
    console.print(sentence(report), markup=False, highlight=False, soft_wrap=True)


def show_plan(request: Request, as_json: bool) -> None:
    """How many candidates, how many refused and why, and the expected time."""
    from chord_lab.sweeps.space import device_named

    request.check()
    source = source_of(request)
    plan = (
        prepare(request, pathlib.Path("."))[1]
        if source == "replay"
        else plan_for(request, device_named(request.device))
    )
    if as_json:
        print_json({**plan.summary(), "source": source, "device": request.device})
        return
    print_plan(plan, source, request.device)


def do_sweep(
    request: Request, out: pathlib.Path, resume: bool, budget_seconds: float | None, budget_candidates: int | None
) -> Run:
    """Plan and measure; Ctrl-C leaves everything that was measured."""
    from chord_lab.sweeps.run import Budget, run

    check_budget(budget_seconds, budget_candidates)
    request.most = budget_candidates
    request.budgeted = budget_candidates is not None or budget_seconds is not None
    measure, plan = prepare(request, out)
    if request.search != "grid":
        budget_candidates = None  # shared out among the points already
    if not len(plan):
        raise UserError(f"no candidate of {request.scenario} may run: {_reasons(plan)}")
    budget = Budget(budget_seconds, budget_candidates)
    with watching() as watch, interruptible(out):
        done = run(plan, measure, out, resume=resume, budget=budget, about=request.about(), watch=watch)
    if resume and done.known:
        kept = sum(1 for record in done.known if record.kind == "candidate")
        notes.print(f"resumed: {kept} candidates were there, {done.progress.finished} were missing", highlight=False)
    return done


def _reasons(plan: Plan) -> str:
    return "; ".join(f"{rule}: {r.example}" for rule, r in list(plan.refused.items())[:3]) or "the plan is empty"


def finished(run: Run) -> dict[str, Any]:
    """What a sweep did, for people and machines."""
    environment = run.environment
    return {
        "out": str(run.directory),
        "run_id": run.run_id,
        "device": environment.device_name if environment else None,
        "candidates": run.progress.finished,
        "planned": run.progress.total,
        "failed": dict(run.progress.failed),
        "partial": run.cut_short,
    }


def sentence(report: dict[str, Any]) -> str:
    """One line about a finished sweep."""
    failed = sum(report["failed"].values())
    kinds = ", ".join(f"{count} {status}" for status, count in report["failed"].items())
    partial = " (partial: the budget is used up; --resume goes on)" if report["partial"] else ""
    failures = f", {failed} failed ({kinds})" if failed else ""
    return f"{report['candidates']} candidates on {report['device']}{failures}{partial} -> {report['out']}"

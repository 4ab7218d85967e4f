"""``chord-lab tune``: sweep, winners, tuning table and report in one."""

from __future__ import annotations

import pathlib
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord_lab.cli import app, console, notes, print_json
from chord_lab.cli.measuring import Request, source_of
from chord_lab.cli.reading import read_run, say
from chord_lab.cli.sweep import (
    Candidates,
    Dask,
    Data,
    Draw,
    Jobs,
    Peers,
    Profile,
    Resume,
    Search,
    Seconds,
    Seed,
    Source,
    Space,
    do_sweep,
    finished,
)
from chord_lab.cli.verdict_tables import kinds_of, print_layers, print_winners
from chord_lab.cli.winners import as_dict
from chord_lab.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

    from chord_lab.sweeps.traffic import Traffic
    from chord_lab.sweeps.winners import Winner

DEFAULT_SCENARIO = "kimi-k2/ep8/decode"
Scenario = Annotated[str | None, typer.Argument(help="kimi-k2/ep8/decode when not given.")]
Out = Annotated[pathlib.Path | None, typer.Option(help="Directory of the run; under runs/ when not given.")]
Points = Annotated[
    str, typer.Option(help="all, published, or token counts; auto: all when replaying, published when measuring.")
]
TrafficFile = Annotated[
    pathlib.Path | None,
    typer.Option(
        help="YAML with a mix of token counts and draws to tune the table for: scenario: kimi-k2/ep8/decode, "
        "points: {20: 5, 50: 1}, draws: {uniform: 3, 'zipf:1.0': 1}."
    ),
]
IntoPackage = Annotated[
    bool, typer.Option("--into-package", help="Write the table into the kernel package, where it takes effect.")
]


@app.command("tune")
def tune(
    scenario: Scenario = None,
    source: Source = "auto",
    out: Out = None,
    resume: Resume = False,
    draw: Draw = None,
    seed: Seed = None,
    points: Points = "auto",
    profile: Profile = None,
    traffic: TrafficFile = None,
    space: Space = "focus",
    search: Search = "grid",
    peers: Peers = "own",
    budget_seconds: Seconds = None,
    budget_candidates: Candidates = None,
    data: Data = None,
    dask: Dask = None,
    jobs: Jobs = None,
    into_package: IntoPackage = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Find the schedule for every number of rows: sweep, decide, write the tuning table and a report."""
    began = time.monotonic()
    mix = _traffic(traffic, scenario, bool(draw) or points != "auto")
    scenario = mix.scenario if mix else scenario or DEFAULT_SCENARIO
    request = Request(
        scenario=scenario,
        source=source,
        draws=draw or [],
        seed=seed,
        tokens=points,
        profile=profile,
        space=space,
        search=search,
        peers=peers,
        data=data,
        dask=dask,
        jobs=jobs,
    )
    live = source_of(request) == "live"
    if into_package and source == "predict":
        raise UserError("predicted times do not go into the package: measure, or leave out --into-package")
    if mix:
        request.draws, request.tokens = list(mix.draws), ",".join(map(str, sorted(mix.points)))
    elif points == "auto":
        request.tokens = "published" if live else "all"
    directory = out or default_directory(scenario, live)
    run = do_sweep(request, directory, resume, budget_seconds, budget_candidates)
    table, found = _verdicts(directory, mix)
    if not as_json:
        print_winners(found)  # before files are written: a full disk must not hide what was measured
    exported = _export(table, (found, mix), directory, into_package)
    result = {
        **finished(run),
        "winners": [as_dict(w) for w in found],
        "tables": [file["path"] for file in exported["files"]],
        "report": _report(table, directory, run.cut_short),
        "seconds": round(time.monotonic() - began, 1),
    }
    print_json(result) if as_json else _print(result, found, exported, live)


def default_directory(scenario: str, live: bool) -> pathlib.Path:
    """``runs/kimi-k2-ep8-decode``; a live run gets its own, since measurements are never written over."""
    name = scenario.replace("/", "-")
    return pathlib.Path("runs") / (f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}" if live else name)


def _traffic(path: pathlib.Path | None, scenario: str | None, chosen: bool) -> Traffic | None:
    """The mix of --traffic; what it says itself cannot be said beside it."""
    from chord_lab.sweeps.traffic import read_traffic

    if path is None:
        return None
    if chosen:
        raise UserError("--traffic names points and draws itself: leave out --points and --draw")
    mix = read_traffic(path)
    if scenario is not None and scenario != mix.scenario:
        raise UserError(f"{path} is for {mix.scenario}, not {scenario}")
    return mix


def _verdicts(directory: pathlib.Path, mix: Traffic | None) -> tuple[pa.Table, list[Winner]]:
    from chord_lab.sweeps.traffic import traffic_winners
    from chord_lab.sweeps.winners import winners

    table = read_run(directory)
    return table, traffic_winners(table, mix, say=_note) if mix else winners(table)


def _note(text: str) -> None:
    notes.print(text, markup=False, highlight=False, soft_wrap=True)


def _export(
    table: pa.Table, verdicts: tuple[list[Winner], Traffic | None], directory: pathlib.Path, into_package: bool
) -> dict[str, Any]:
    from chord_lab.cli.export import export_kernels
    from chord_lab.export.tables.collect import collect

    found, mix = verdicts
    collected = collect(table, mixed=found, traffic=mix.to_dict()) if mix else collect(table)
    say(collected.remarks)
    return {
        **export_kernels(collected, directory / "tables", into_package=into_package, merge=False),
        "missing": collected.missing,
    }


def _report(table: pa.Table, directory: pathlib.Path, cut_short: bool) -> str | None:
    """Path of the report; where figures cannot be drawn, a line instead."""
    try:
        from chord_lab.export.report import write_report
    except ModuleNotFoundError as error:
        if str(error.name).startswith("chord_lab"):
            raise
        notes.print(f"no report: {error.name} is not installed (pip install 'chord-lab[lab]')", markup=False)
        return None
    remarks = ("the run was cut short: this report is partial",) if cut_short else ()
    return str(write_report(table, directory / "report.html", remarks=remarks).path)


def _print(result: dict[str, Any], found: list[Winner], exported: dict[str, Any], live: bool) -> None:
    from chord_lab.sweeps.layers import layers

    verdicts = [w.verdict for w in found]
    wins, ties, nothing = (verdicts.count(name) for name in ("win", "tie", "none"))
    failed, kinds = sum(w.failed for w in found), kinds_of(found)
    console.print()
    devices, dates = sorted({w.device for w in found}), sorted({w.date[:10] for w in found})
    how = f"{'measured live' if live else found[0].source} on {', '.join(devices)}, {', '.join(dates)}"
    console.print(
        f"{wins} wins, {ties} ties, {nothing} without a result at {len(found)} points; "
        f"{result['candidates']} candidates {how}, {failed} failed"
        f"{f' ({kinds})' if kinds else ''}{'; partial' if result['partial'] else ''}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    print_layers(layers(found))
    for missing in exported["missing"]:
        notes.print(f"missing: {missing.projection} at {missing.routed_m} rows: {missing.reason}", highlight=False)
    for path in result["tables"]:
        console.print(f"table   {path}", markup=False, highlight=False, soft_wrap=True)
    if result["report"]:
        console.print(f"report  {result['report']}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"run     {result['out']}  ({result['seconds']} s)", markup=False, highlight=False, soft_wrap=True)

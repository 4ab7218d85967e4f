"""``chord-lab predict``: what the cost model says, and how far it is off on points that it has not seen."""

from __future__ import annotations

import pathlib
from dataclasses import asdict
from typing import Annotated, Any

import typer

from chord_lab.cli import app, console, print_json
from chord_lab.cli.measuring import DEFAULT_DEVICE, Request, plan_for
from chord_lab.cli.verdict_tables import Letters, compact_table, us
from chord_lab.errors import UserError

ASKED_REGRET = 0.05


@app.command("predict")
def predict(
    scenario: Annotated[str | None, typer.Argument(help="Scenario whose candidates are predicted.")] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Error and regret on held-out points.")] = False,
    device: Annotated[str, typer.Option(help="Device whose records the model is fitted to.")] = DEFAULT_DEVICE,
    data: Annotated[pathlib.Path | None, typer.Option(help="Recorded measurements (CHORD_LAB_DATA, data/).")] = None,
    points: Annotated[str, typer.Option(help="all, published, or token counts such as 20,40.")] = "published",
    profile: Annotated[str | None, typer.Option(help="Weight profile; the scenario's own when not given.")] = None,
    draw: Annotated[list[str] | None, typer.Option(help="Routing draw; repeatable.")] = None,
    folds: Annotated[int, typer.Option(help="Parts that the points are held out in.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Predict the candidates of a scenario, or with --evaluate measure the prediction itself."""
    from chord_lab.measurement.predict import evaluate as measure_error
    from chord_lab.measurement.predict import known_device, recorded_samples

    limits = known_device(device)
    samples, basis = recorded_samples(data, limits)
    if evaluate:
        if scenario is not None:
            raise UserError(f"--evaluate judges the prediction on all records: leave out {scenario}")
        if folds < 2:
            raise UserError(f"--folds must be at least 2, not {folds}")
        result = measure_error(samples, limits, folds)
        report = {**asdict(result), "basis": basis, "device": device, "asked_regret": ASKED_REGRET}
        print_json(report) if as_json else _print_evaluation(report)
        return
    if scenario is None:
        raise UserError("name a scenario to predict, or --evaluate to measure the prediction")
    request = Request(scenario=scenario, tokens=points, profile=profile, draws=draw or [], device=device)
    request.check()
    rows = _predicted(request, limits, samples)
    if not rows:
        raise UserError(f"no candidate of {scenario} at {points} tokens: nothing to predict")
    if as_json:
        print_json({"basis": basis, "device": device, "points": rows})
        return
    console.print(
        f"predicted for {device} from {basis}, us; --evaluate says how far such predictions are off",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    _print_predictions(rows)


def _print_predictions(rows: list[dict[str, Any]]) -> None:
    letters, table = Letters(), compact_table()
    for name in ("projection", "rows", "draw", "default", "predicted best"):
        table.add_column(name, justify="left" if name in ("projection", "draw") else "right", no_wrap=True)
    for row in rows:
        place = (row["projection"], str(row["routed_m"]), row["draw"])
        table.add_row(*place, us(row["default_time_us"]), f"{us(row['time_us'])} {letters.of(row['label']):<2}")
    console.print(table)
    for line in letters.legend():
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def _predicted(request: Request, limits: Any, samples: Any) -> list[dict[str, Any]]:
    from chord_lab.measurement.predict import fit

    model = fit(samples, limits)
    rows = []
    for point, candidates in plan_for(request, limits).by_point():
        schedules = [c.schedule for c in candidates if c.schedule is not None]
        if not schedules:
            continue
        times = model.predict_us(point, schedules)
        best = int(times.argmin())
        default = next(i for i, c in enumerate(candidates) if c.default)
        rows.append(
            {
                "projection": point.projection,
                "num_tokens": point.num_tokens,
                "routed_m": point.routed_m,
                "draw": point.routing.draw,
                "schedule": schedules[best].to_dict(),
                "label": schedules[best].label(),
                "time_us": float(times[best]),
                "default_time_us": float(times[default]),
                "candidates": len(schedules),
                "source": "predicted",
            }
        )
    return rows


def _print_evaluation(report: dict[str, Any]) -> None:
    console.print(f"cost model for {report['device']}, fitted to {report['basis']}", markup=False, highlight=False)
    console.print(f"held out: {report['records']} records at {report['points']} points", highlight=False)
    console.print(
        f"absolute error of a time:       median {report['median_error']:.1%}, 90 % below {report['p90_error']:.1%}",
        highlight=False,
    )
    console.print(
        f"regret of the predicted winner: median {report['median_regret']:.1%} (at most {ASKED_REGRET:.0%} asked), "
        f"90 % of points below {report['p90_regret']:.1%}; worst {report['worst_regret']:.0%} at {report['worst']}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )

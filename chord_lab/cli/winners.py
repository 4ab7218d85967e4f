"""``chord-lab winners``: who beats the default by more than the noise."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord_lab.cli import app, print_json
from chord_lab.cli.reading import cut_short, read_run, say
from chord_lab.cli.verdict_tables import print_winners
from chord_lab.errors import UserError

if TYPE_CHECKING:
    from chord_lab.sweeps.winners import Winner


@app.command("winners")
def winners(
    directory: Annotated[pathlib.Path, typer.Argument(help="Directory of a run, or a records file.")],
    margin: Annotated[float, typer.Option(help="Least gain over the default that counts as a win.")] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Default against winner at every point: margin, interval, verdict, failures, Humming beside it."""
    found = read_winners(directory, margin)
    if as_json:
        print_json([as_dict(w) for w in found])
        return
    print_winners(found)


def read_winners(directory: pathlib.Path, margin: float = 0.01) -> list[Winner]:
    """Winners of everything recorded under a directory; what could not be read or was left out is named."""
    from chord_lab.sweeps.recorded import newest_runs
    from chord_lab.sweeps.winners import winners as compute

    if not 0 <= margin < 1:
        raise UserError(f"--margin must be from 0 to below 1, not {margin:g}")
    hint = f"; `chord-lab sweep SCENARIO --out {directory}` makes some" if directory.is_dir() else ""
    table, left_out = newest_runs(read_run(directory, hint))
    say([*(["the run was cut short: these verdicts are partial"] if cut_short(directory) else []), *left_out])
    return compute(table, margin)


def as_dict(winner: Winner) -> dict[str, Any]:
    """The machine form of one verdict."""
    return {
        "scenario": winner.scenario,
        "projection": winner.projection,
        "profile": winner.profile,
        "num_tokens": winner.num_tokens,
        "routed_m": winner.routed_m,
        "draw": winner.draw,
        "schedule": winner.schedule.to_dict() if winner.schedule else None,
        "time_us": winner.time_us,
        "default_schedule": winner.default_schedule.to_dict() if winner.default_schedule else None,
        "default_time_us": winner.default_time_us,
        "verdict": winner.verdict,
        "margin": winner.margin,
        "ratio_interval": None if winner.ratio_low is None else [winner.ratio_low, winner.ratio_high],
        "num_rounds": winner.num_rounds,
        "candidates": winner.candidates,
        "failed": winner.failed,
        "failures": winner.failures,
        "humming_us": winner.humming_us,
        "humming_tile": winner.humming_tile,
        "humming_best_us": winner.humming_best_us,
        "humming_best_tile": winner.humming_best_tile,
        "baseline_us": winner.baseline_us,
        "flags": list(winner.flags),
        "source": winner.source,
        "device": winner.device,
        "date": winner.date,
    }

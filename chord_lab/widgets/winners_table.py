"""Winners as a table to read in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from chord_lab.sweeps.winners import Winner


def winners_frame(winners: Sequence[Winner]) -> pd.DataFrame:
    """One row a point: default against winner, the gain with its 95 % interval, the verdict, the peer beside it.

    Times are microseconds. `gain` is the share of the default's time that the fastest candidate saves.
    """
    return pd.DataFrame([_row(winner) for winner in winners])


def _row(w: Winner) -> dict[str, object]:
    same = w.best is not None and w.best == w.default_schedule
    return {
        "projection": w.projection,
        "tokens": w.num_tokens,
        "rows": w.routed_m,
        "rows/expert": round(w.routed_m / w.num_experts, 1),
        "draw": w.draw,
        "default": w.default_schedule.label() if w.default_schedule else "-",
        "default us": _rounded(w.default_time_us),
        "fastest": "the default" if same else w.best.label() if w.best else "-",
        "us": _rounded(w.default_time_us if same else w.time_us),
        "gain": "-" if w.margin is None or same else f"{w.margin:+.1%}",
        "95 % interval": "-" if same else _interval(w),
        "verdict": w.verdict,
        "Humming us": _rounded(w.humming_us),
        "failed": f"{w.failed} of {w.candidates}",
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _interval(w: Winner) -> str:
    if w.ratio_high is None:
        return "too few repeats"
    if w.ratio_low is None:  # of a mix of draws the least gain alone is known
        return f"at least {1 - w.ratio_high:+.1%}"
    return f"{1 - w.ratio_high:+.1%} to {1 - w.ratio_low:+.1%}"

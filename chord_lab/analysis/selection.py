"""Which rows of a records frame belong together, where they come from, and what must never be mixed."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.records.rows import ENVIRONMENT_COLUMNS, SCHEDULE_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

OURS = "w4a16_moe"
# What makes two rows belong to one point: candidates of a point compete, those of two points never do.
POINT_COLUMNS = ("scenario", "projection", "profile", "num_tokens", "routed_m", "draw", "seed")
METHOD_COLUMNS = ("timer", "l2", "timed")
_PLACE = ("routed_m", "draw", "seed")
# Python and the peers' versions do not matter; the kernels' version matters within a point.
_MACHINE_COLUMNS = tuple(c for c in ENVIRONMENT_COLUMNS if c not in ("python", "peers", "kernels"))


def select(frame: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Rows whose columns have the wanted values; a value of None does not select.

    Raises:
        UserError: nothing is left; the message lists what there is.
    """
    for column, value in wanted.items():
        if value is None:
            continue
        if column not in frame:
            raise UserError(f"records have no column {column!r}")
        matching = frame[frame[column] == value]
        if not len(matching):
            have = ", ".join(sorted({str(v) for v in frame[column].dropna().unique()} - {""})[:12]) or "none"
            raise UserError(f"no record with {column}={value}; there are: {have}")
        frame = matching
    return frame


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows with a time: status ok and long enough for the timer."""
    return frame[(frame["status"] == "ok") & frame["time_us"].notna()]


def candidates(frame: pd.DataFrame) -> pd.DataFrame:
    """Timed rows of our own kernels, with `tokens_per_expert` (mean rows of a local expert)."""
    rows = timed(frame)
    rows = rows[(rows["kind"] == "candidate") & (rows["implementation"] == OURS) & rows["block_m"].notna()]
    return rows.assign(tokens_per_expert=rows["routed_m"] / rows["num_experts"])


def others(frame: pd.DataFrame) -> pd.DataFrame:
    """Timed rows of peers and baselines."""
    rows = timed(frame)
    rows = rows[rows["kind"].isin(["peer", "baseline"])]
    return rows.assign(tokens_per_expert=rows["routed_m"] / rows["num_experts"])


def environments(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The frame split so that each part was measured on one machine and software, largest part first."""
    if not len(frame):
        return []
    columns = [c for c in _MACHINE_COLUMNS if c in frame]
    groups = [part for _, part in frame.groupby(columns, observed=True, dropna=False, sort=False)]
    return sorted(groups, key=len, reverse=True)


def require_one_environment(frame: pd.DataFrame, *, together: tuple[str, ...] = ()) -> pd.DataFrame:
    """The rows that may be ranked: of one machine and software, and at each point of one method and kernel version.

    Candidates and peers compete within a point. Between points the method may change (launches of a few microseconds
    are timed by graph replay, longer ones by events), and so may the version of our kernels: points are recorded in one
    run each. Where profiles of one point were measured with unlike versions, the scenario's own profile stays; how many
    rows stepped back is in ``attrs["left_out"]``, for `source_line`.

    together: of scenario, projection, profile those over which the caller adds or ranks times.

    Raises:
        UserError: rows of unlike environments or methods; the message names what differs.
    """
    columns = [c for c in _MACHINE_COLUMNS if c in frame and frame[c].nunique(dropna=False) > 1]
    point = tuple(c for c in ("scenario", "projection", "profile") if c not in together)
    columns += [c for c in ("kernels",) if _differs(frame, c, (*point, *_PLACE))]
    frame = frame if columns else _of_own_profile(frame)
    columns += [c for c in METHOD_COLUMNS if _differs(frame, c, ("scenario", "projection", *_PLACE))]
    if columns:
        differing = "; ".join(f"{c}: {', '.join(map(str, frame[c].unique()[:4]))}" for c in columns[:3])
        raise UserError(f"records of unlike environments are never ranked together ({differing}); choose one")
    return frame


def _differs(frame: pd.DataFrame, column: str, keys: tuple[str, ...]) -> bool:
    """Whether a column has several values where all keys agree."""
    if column not in frame or frame[column].nunique(dropna=False) < 2:
        return False
    known = [c for c in keys if c in frame]
    return bool((frame.groupby(known, observed=True, dropna=False)[column].nunique(dropna=False) > 1).any())


def _of_own_profile(frame: pd.DataFrame) -> pd.DataFrame:
    """Where profiles of a point are of unlike kernel versions: the rows of the version of another than portable."""
    keys = ("scenario", "projection", *_PLACE)
    if "profile" not in frame or not _differs(frame, "kernels", keys):
        return frame
    own = (frame["profile"] != "portable").map({True: "1", False: "0"}).astype(str)
    kept = _one_version(frame, keys, first=own)
    kept.attrs["left_out"] = len(frame) - len(kept)
    return kept


def newest_versions(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each point and profile the rows of the kernel version that was measured last: after an edit of a kernel."""
    keys = ("scenario", "projection", "profile", *_PLACE)
    return _one_version(frame, keys) if _differs(frame, "kernels", keys) else frame


def _one_version(frame: pd.DataFrame, keys: tuple[str, ...], first: Any = "") -> pd.DataFrame:
    """Rows of one version where all keys agree: the greatest by `first`, then date, then hash."""
    columns = [frame[c] for c in keys if c in frame]
    rank = first + frame["date"].astype(str) + frame["kernels"].astype(str)
    of_version = rank.groupby([*columns, frame["kernels"]], observed=True, dropna=False).transform("max")
    return frame[of_version == of_version.groupby(columns, observed=True, dropna=False).transform("max")]


def require_one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows themselves, if they are of one problem and draw in one environment.

    Raises:
        UserError: several; the message names what differs.
    """
    rows = require_one_environment(rows, together=("scenario",))
    for column in ("num_experts", "N", "K", "draw"):
        if rows[column].nunique() > 1:
            values = ", ".join(str(v) for v in sorted(rows[column].unique())[:6])
            raise UserError(f"several values of {column} ({values}); choose one scenario and draw")
    return rows


def source_line(frame: pd.DataFrame) -> str:
    """Where numbers come from: ``live on NVIDIA H200, 2026-11-29``, ``recorded on ...`` or ``predicted for ...``."""
    if not len(frame):
        return "no records"
    names = sorted(str(n) for n in frame["device_name"].dropna().unique()) or ["an unknown device"]
    dates = sorted({str(d)[:10] for d in frame["date"].dropna()})
    when = "" if not dates else dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    words = {"live": "live on", "recorded": "recorded on", "predicted": "predicted for"}
    parts = []
    for source in ("live", "recorded", "predicted"):
        if (frame["source"] == source).any():
            parts.append(f"{words[source]} {' and '.join(names)}")
    tail = "" if parts and parts[0].startswith("predicted") else f", {when}" if when else ""
    timers = sorted({str(t) for t in frame["timer"].dropna()}) if "timer" in frame else []
    several = f"; timed by {' or '.join(timers)}" if len(timers) > 1 else ""
    versions = frame["kernels"].nunique() if "kernels" in frame else 1
    several += f"; {versions} versions of the kernels, one at a point" if versions > 1 else ""
    left_out = frame.attrs.get("left_out", 0)
    several += f"; {left_out} records of other profiles, with other kernels, left out" if left_out else ""
    return "; ".join(parts or [f"recorded on {names[0]}"]) + tail + several


def is_missing(value: Any) -> bool:
    """None, or the NaN that stands where a column mixes schedules and peers."""
    return value is None or (isinstance(value, (float, np.floating)) and bool(np.isnan(value)))


def schedule_of_row(row: Any) -> Schedule | None:
    """The schedule of one row of a frame (a Series or a mapping); None where it has none."""
    values: dict[str, Any] = {}
    for field in fields(Schedule):
        value = row.get(field.name)
        if is_missing(value):
            continue
        if hasattr(value, "item"):
            value = value.item()
        if str(field.type) == "int":
            value = int(value)
        elif str(field.type) == "bool":
            value = bool(value)
        values[field.name] = value
    return Schedule(**values) if "block_m" in values else None


def with_labels(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a column `label`: each distinct schedule is named once, however many rows it has."""
    number = frame.groupby(list(SCHEDULE_COLUMNS), observed=True, dropna=False, sort=False).ngroup()
    first = ~number.duplicated()
    named = zip(number[first], rows_of(frame[first]), strict=True)
    labels = {n: schedule.label() if (schedule := schedule_of_row(row)) else "" for n, row in named}
    return frame.assign(label=number.map(labels))


def fastest(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The fastest row of each group."""
    if not len(frame):
        return frame
    return frame.loc[frame.groupby(by, observed=True, dropna=False)["time_us"].idxmin()]


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows as mappings from column to value."""
    columns = {str(name): frame[name].tolist() for name in frame.columns}  # many times faster than to_dict("records")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def round_medians(times_us: Any) -> list[float]:
    """Median launch of each interleaved repeat of one row, microseconds."""
    if times_us is None or isinstance(times_us, float):
        return []
    return [_median(sorted(map(float, times))) for times in times_us if len(times)]


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spread_us(row: Any) -> tuple[float, float]:
    """Lower and upper quartile of a row's repeats; its time twice where there is one repeat alone."""
    medians = round_medians(row.get("times_us"))
    if len(medians) < 2:
        return float(row["time_us"]), float(row["time_us"])
    low, high = np.percentile(medians, (25, 75))
    return float(low), float(high)


def point_columns(frame: pd.DataFrame) -> list[str]:
    """Those of `POINT_COLUMNS` that the frame has."""
    return [c for c in POINT_COLUMNS if c in frame]


def other_knobs(*without: str) -> list[str]:
    """Schedule columns except the named ones: rows equal in these differ in the named knobs alone."""
    return [c for c in SCHEDULE_COLUMNS if c not in without]

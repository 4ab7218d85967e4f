"""What the Nsight figures show, as plain data: drawn elsewhere, tested here."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from chord_lab.errors import UserError
from chord_lab.traces.counters import MEANINGS, STALLS, counter
from chord_lab.traces.identity import KEY_PREFIX
from chord_lab.traces.table import NVTX_SEPARATOR

if TYPE_CHECKING:
    import pandas as pd
    from w4a16_moe.schedule import Schedule

    from chord_lab.traces.table import Trace

MOST_BARS = 2000  # of a timeline on screen; more are merged by pixel, and said
PIXELS = 1000
PIPES = tuple(f"pipe_{name}_pct" for name in ("tensor", "alu", "fma", "fp16", "lsu", "uniform", "xu"))
STORY_COLUMNS = {"grid": "grid, CTAs", "block": "block, threads", "registers": "registers a thread"}
STORY_COLUMNS |= {"smem_bytes": "shared memory, bytes", "stream": "stream"}
SHARES = ("dram_pct", "l2_pct", "issue_pct", "occupancy_pct", "l2_hit_pct")


class Lane(NamedTuple):
    """One row of a timeline; lists run in parallel, in order of start."""

    name: str  # "GPU 0 stream 7", "thread 1 / 1, depth 0"
    kind: str  # kernel | range
    row: list[int]  # of the kernel or range table; of its longest member for a merged bar
    label: list[str]
    start_us: list[float]
    time_us: list[float]
    merged: list[int]  # kernels or ranges that the bar stands for


class Timeline(NamedTuple):
    """A window of a trace."""

    lanes: list[Lane]  # ranges above kernels, outer ranges above inner ones
    start_us: float
    end_us: float
    whole_us: float  # the trace's length
    num_shown: int  # kernels and ranges in the window
    num_merged: int  # of them merged into a neighbour's bar
    busy_share: float  # of the window in which some kernel ran; NaN without start times
    notes: tuple[str, ...]


class RooflinePoint(NamedTuple):
    """A profiled schedule against what the device can do."""

    key: str
    label: str
    projection: str
    routed_m: int
    intensity: float  # FLOPs of real rows per byte of DRAM traffic as counted
    tflops: float  # FLOPs of real rows per profiled time
    dram_gbps: float  # counted bytes over profiled time
    tensor_pct: float
    traffic_over_need: float  # counted bytes over the bytes that must move


class Roofline(NamedTuple):
    """Points and the ceilings measured on the same device."""

    points: list[RooflinePoint]
    copy_gbps: float | None
    dense_tflops: float | None
    notes: tuple[str, ...]


class Bars(NamedTuple):
    """One figure of several schedules side by side."""

    name: list[str]
    label: list[str]
    values: list[list[float]]  # [schedule][bar]
    meaning: list[str]  # of each bar, in words


class SideBySide(NamedTuple):
    """Two or more schedules: why do their times differ?"""

    schedules: list[str]  # labels
    names: list[str]  # what tells them apart: "token_slicing static"
    keys: list[str]
    time_us: list[float]  # by events
    profiled_us: list[float]
    cycles: list[float]
    instructions: list[float]
    stalls: Bars  # cycles that a warp waits for each instruction it issues, by reason; the largest first
    pipes: Bars  # percent of the pipe's peak
    shares: Bars  # percent
    finding: str
    notes: tuple[str, ...]


def timeline_info(
    trace: Trace, window: tuple[float, float] | None = None, *, most: int = MOST_BARS, pixels: int = PIXELS
) -> Timeline:
    """Kernels by device and stream, ranges by thread and depth, between two times in microseconds.

    Beyond ``most`` bars, those of a lane that start within the same of ``pixels`` columns are merged, and that is said.
    """
    kernels, ranges = _with_starts(trace), trace.nvtx
    notes = []
    replayed = len(kernels) > 0 and bool(trace.kernels["start_us"].isna().all())
    if replayed:
        notes.append("laid one after another: this file has no start times")
    whole = max(_end(kernels), _end(ranges))
    if not len(kernels) and not len(ranges):
        raise UserError(f"{trace.path.name} has neither kernels nor ranges to draw")
    start, end = window or (0.0, whole)
    if not (math.isfinite(start) and math.isfinite(end)) or end <= start:
        raise UserError(f"a timeline's window must run from a smaller to a larger time, not {start:g} to {end:g}")
    lanes = []
    groups = [*_range_lanes(ranges), *_kernel_lanes(kernels)]
    in_view = [(name, kind, frame[_overlaps(frame, start, end)]) for name, kind, frame in groups]
    count = sum(len(frame) for _, _, frame in in_view)
    for name, kind, frame in in_view:
        if len(frame):
            lanes.append(_lane(name, kind, frame, (end - start) / pixels if count > most else 0.0))
    merged = count - sum(len(lane.row) for lane in lanes)
    if merged:
        notes.append(
            f"{merged:,} of {count:,} bars are merged with a neighbour closer than a pixel; zoom in to part them"
        )
    busy = math.nan if replayed else busy_share(kernels, start, end)
    return Timeline(lanes, start, end, whole, count, merged, busy, (*notes, *trace.notes))


def _with_starts(trace: Trace) -> pd.DataFrame:
    kernels = trace.kernels
    frame = kernels[["name", "start_us", "time_us", "device_index", "stream"]].copy()
    if trace.identity:  # of a record: many schedules share one kernel's name
        frame["name"] = [kernel_label(trace, row) for row in range(len(frame))]
    if len(frame) and frame["start_us"].isna().all():
        frame["start_us"] = frame["time_us"].fillna(0.0).cumsum().shift(fill_value=0.0)
    return frame[frame["start_us"].notna() & frame["time_us"].notna()]


def kernel_label(trace: Trace, row: int) -> str:
    """A kernel by projection and schedule where its record is known, else by its name."""
    from chord_lab.records import schedule_of

    identity = trace.identity[row] if trace.identity else None
    schedule = schedule_of(identity) if identity else None
    name = str(trace.kernels["name"].iloc[row])
    return f"{identity['projection']} {schedule.label()}" if identity and schedule else name


def _end(frame: pd.DataFrame) -> float:
    end = (frame["start_us"] + frame["time_us"]).max() if len(frame) else 0.0
    return 0.0 if math.isnan(end) else float(end)


def _overlaps(frame: pd.DataFrame, start: float, end: float) -> pd.Series:
    return (frame["start_us"] < end) & (frame["start_us"] + frame["time_us"].fillna(0.0) > start)


def _kernel_lanes(kernels: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    lanes = []
    for (device, stream), frame in kernels.groupby(["device_index", "stream"], dropna=False, sort=True):
        known = [f"{word} {value}" for word, value in (("GPU", device), ("stream", stream)) if _known(value)]
        lanes.append((", ".join(known) or "kernels", "kernel", frame))
    return lanes


def _range_lanes(ranges: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    named = ~ranges["name"].astype(str).str.startswith(KEY_PREFIX)  # a record's key: for joining, not for reading
    closed = ranges[ranges["time_us"].notna() & named]
    lanes = []
    for (thread, depth), frame in closed.groupby(["thread", "depth"], observed=True, sort=True):
        lanes.append((f"thread {thread}, depth {depth}", "range", frame))
    return lanes


def _known(value: Any) -> bool:
    import pandas as pd

    return not pd.isna(value)


def _lane(name: str, kind: str, frame: pd.DataFrame, pixel_us: float) -> Lane:
    """The bars of a lane; those that start within a pixel of each other become one, from the first to the last."""
    import numpy as np

    frame = frame.sort_values("start_us", kind="stable")
    start, time = frame["start_us"].to_numpy("float64"), frame["time_us"].to_numpy("float64")
    rows, names = frame.index.to_numpy(), frame["name"].astype(str).tolist()
    if pixel_us <= 0:
        return Lane(name, kind, rows.tolist(), names, start.tolist(), time.tolist(), [1] * len(names))
    first = np.flatnonzero(np.diff(np.floor(start / pixel_us), prepend=-1.0) != 0)
    bounds = np.append(first, len(start))
    ends = np.maximum.reduceat(start + time, first)
    longest = [int(a + np.argmax(time[a:b])) for a, b in itertools.pairwise(bounds.tolist())]
    counts = np.diff(bounds).tolist()
    labels = [names[i] if n == 1 else f"{n} bars, longest: {names[i]}" for i, n in zip(longest, counts, strict=True)]
    return Lane(
        name, kind, rows[longest].tolist(), labels, start[first].tolist(), (ends - start[first]).tolist(), counts
    )


def busy_share(kernels: pd.DataFrame, start: float, end: float) -> float:
    """Share of the window in which at least one kernel ran."""
    import numpy as np

    if not len(kernels):
        return 0.0
    begins = np.clip(kernels["start_us"].to_numpy("float64"), start, end)
    ends = np.clip((kernels["start_us"] + kernels["time_us"]).to_numpy("float64"), start, end)
    order = np.argsort(begins, kind="stable")
    begins, reach = begins[order], np.maximum.accumulate(ends[order])
    covered = np.maximum(reach - np.maximum(begins, np.concatenate([[start], reach[:-1]])), 0.0)
    return float(covered.sum() / (end - start))


def roofline_info(points: pd.DataFrame, ceilings: dict[str, float]) -> Roofline:
    """Each profiled schedule by counted DRAM traffic. Raises UserError when no point has the counters."""
    found, without = [], 0
    for row in points.to_dict("records"):
        seconds = float(row["profiled_us"]) / 1e6
        moved = float(row["dram_read_bytes"]) + float(row["dram_write_bytes"])
        if math.isnan(moved):  # older captures hold the rate alone
            moved = float(row["dram_gbps"]) * 1e9 * seconds
        if not (moved > 0 and seconds > 0 and row["flops"] > 0):
            without += 1
            continue
        found.append(
            RooflinePoint(
                key=str(row["key"]),
                label=str(row["label"]),
                projection=str(row["projection"]),
                routed_m=int(row["routed_m"]),
                intensity=float(row["flops"]) / moved,
                tflops=float(row["flops"]) / seconds / 1e12,
                dram_gbps=moved / seconds / 1e9,
                tensor_pct=float(row["pipe_tensor_pct"]),
                traffic_over_need=moved / float(row["num_bytes"]),
            )
        )
    if not found:
        raise UserError("no roofline: no capture has DRAM bytes and a time (collect --metrics lab)")
    notes = (f"{without} captures without DRAM bytes are left out",) if without else ()
    return Roofline(found, ceilings.get("copy"), ceilings.get("dense_bf16"), notes)


def side_by_side(points: pd.DataFrame, keys: list[str]) -> SideBySide:
    """Stall reasons, pipe use and shares of these points, in the order given."""
    table: list[dict[str, Any]] = [{str(n): v for n, v in row.items()} for row in points.to_dict("records")]
    by_key = {str(row["key"]): row for row in table}
    missing = [key for key in keys if key not in by_key]
    if missing or not keys:
        raise UserError(f"no capture of {', '.join(missing) or 'nothing'}; there are {len(by_key)}")
    rows = [by_key[key] for key in keys]
    names = telling_names([row["schedule"] for row in rows], [str(row["label"]) for row in rows])
    stalls = _bars(rows, {f"stall_{name}": name.replace("_", " ") for name in STALLS}, at_least=0.005)
    stalls = _largest_first(stalls)
    notes = [f"not collected: {what}" for what, bars in (("stall reasons", stalls),) if not bars.name]
    unlike = {(row["projection"], row["routed_m"], row["scenario"]) for row in rows}
    if len(unlike) > 1:
        notes.append("these schedules ran at different points: their times are not comparable")
    return SideBySide(
        schedules=[str(row["label"]) for row in rows],
        names=names,
        keys=list(keys),
        time_us=[float(row["record_time_us"]) for row in rows],
        profiled_us=[float(row["profiled_us"]) for row in rows],
        cycles=[float(row["cycles"]) for row in rows],
        instructions=[float(row["instructions"]) for row in rows],
        stalls=stalls,
        pipes=_bars(rows, {name: counter(name).label for name in PIPES}, at_least=0.5),
        shares=_bars(rows, {name: counter(name).label for name in SHARES}),
        finding=_finding(rows, names, stalls) if len(unlike) == 1 else "Unlike points: compare reasons, not times",
        notes=tuple(notes),
    )


def _bars(rows: list[dict[str, Any]], names: dict[str, str], at_least: float = 0.0) -> Bars:
    """Figures that every row has and some row has enough of."""
    kept = [n for n in names if all(not math.isnan(float(row[n])) for row in rows)]
    kept = [n for n in kept if max(float(row[n]) for row in rows) >= at_least]
    short = [n.removeprefix("stall_") for n in kept]
    values = [[float(row[n]) for n in kept] for row in rows]
    return Bars(short, [names[n] for n in kept], values, [STALLS.get(n) or MEANINGS.get(n, "") for n in short])


def _largest_first(bars: Bars) -> Bars:
    order = sorted(range(len(bars.name)), key=lambda i: -max(values[i] for values in bars.values))
    pick = lambda column: [column[i] for i in order]  # noqa: E731
    return Bars(pick(bars.name), pick(bars.label), [pick(values) for values in bars.values], pick(bars.meaning))


def telling_names(schedules: list[Schedule | None], labels: list[str]) -> list[str]:
    """The fields in which schedules differ, as names; the whole labels when that tells too much or nothing."""
    if len(schedules) < 2 or any(schedule is None for schedule in schedules):
        return labels
    rows = [schedule.to_dict() for schedule in schedules if schedule is not None]
    fields = [name for name in rows[0] if len({str(row[name]) for row in rows}) > 1]
    if not 1 <= len(fields) <= 3:
        return labels
    return [", ".join(f"{name} {_plain(row[name])}" for name in fields) for row in rows]


def _plain(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _finding(rows: list[dict[str, Any]], names: list[str], stalls: Bars) -> str:
    """One sentence: who is faster, by how much, and what its warps spend less time on."""
    first, last = rows[0] | {"label": names[0]}, rows[-1] | {"label": names[-1]}
    if len(rows) < 2 or not stalls.name:
        return f"{first['label']}: {float(first['profiled_us']):.1f} us"
    slower, faster = (first, last) if first["profiled_us"] >= last["profiled_us"] else (last, first)
    ratio = float(slower["profiled_us"]) / float(faster["profiled_us"])
    if ratio < 1.005:
        return f"{faster['label']} and {slower['label']} take the same time"
    return f"{faster['label']} is {ratio:.2f} times as fast as {slower['label']}; {_reason(faster, slower, stalls)}"


def _reason(faster: dict[str, Any], slower: dict[str, Any], stalls: Bars) -> str:
    """Where the slower one's warps lose most: cycles an instruction times instructions."""
    more, less = (1.0 if math.isnan(row["instructions"]) else float(row["instructions"]) for row in (slower, faster))
    before, after = ({n: float(row[f"stall_{n}"]) for n in stalls.name} for row in (slower, faster))
    # "not selected" is no loss of its own: another warp of the scheduler went on
    lost = {n: before[n] * more - after[n] * less for n in stalls.name if n != "not_selected"}
    most = max(lost, key=lambda n: lost[n])
    if lost[most] < 0.01 * more * sum(before.values()):
        return "their warps wait alike"
    if most == "selected" or before[most] <= after[most]:
        return f"it issues fewer instructions ({less / 1e6:.1f} against {more / 1e6:.1f} million)"
    return (
        f"its warps wait less for {STALLS[most]} "
        f"({most.replace('_', ' ')}: {after[most]:.2f} against {before[most]:.2f} cycles an instruction)"
    )


def trace_source(trace: Trace) -> str:
    """For under a figure: device, date where it is known, tool, file."""
    dates = sorted({str(row["date"])[:10] for row in trace.identity if row and row.get("date")})
    where = f"recorded on {trace.device or 'a device that the file does not name'}"
    tool = f"{trace.facts.get('tool') or trace.kind} {trace.facts.get('version') or ''}".strip()
    return ", ".join([where, *dates[:1], tool, trace.path.name])


def kernel_story(trace: Trace, row: int) -> dict[str, Any]:
    """What is known of one kernel, for a table: its launch, its ranges, its record's schedule and load."""
    if not 0 <= row < len(trace.kernels):
        raise UserError(f"{trace.path.name} has no kernel {row}; it has {len(trace.kernels):,}")
    kernel = trace.kernels.iloc[row]
    story: dict[str, Any] = {"kernel": str(kernel["name"]), "time, us": round(float(kernel["time_us"]), 3)}
    for column, label in STORY_COLUMNS.items():
        if _known(kernel[column]):
            story[label] = kernel[column]
    if _known(kernel["nvtx"]):
        path = str(kernel["nvtx"]).split(NVTX_SEPARATOR)
        story["inside"] = NVTX_SEPARATOR.join(name for name in path if not name.startswith(KEY_PREFIX))
    identity = trace.identity[row] if trace.identity else None
    if identity:
        from chord_lab.records import schedule_of

        schedule = schedule_of(identity)
        story["schedule"] = schedule.label() if schedule else ""
        story["point"] = f"{identity['scenario']} {identity['projection']}, {identity['routed_m']:,} routed rows"
        story["tok_e"] = list(identity.get("tok_e") or ())
        story["record"] = identity["key"]
    return story

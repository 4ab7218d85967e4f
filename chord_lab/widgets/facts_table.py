"""The table of two schedules side by side, and compile facts from an offline compilation."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from w4a16_moe.devices import Device
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.analysis.point import RivalInfo, ScheduleFacts

OK, BAD = "<span style='color:#009E73'>&#10003;</span>", "<span style='color:#D55E00'>&#10007;</span>"
UNKNOWN = "&ndash;"

# (row title, how a schedule's facts are said)
ROWS: tuple[tuple[str, Callable[[ScheduleFacts], str]], ...] = (
    ("time", lambda f: _number(f.time_us, "{:.1f} us")),
    ("quartiles of the repeats", lambda f: UNKNOWN if f.low_us is None else f"{f.low_us:.1f} to {f.high_us:.1f} us"),
    ("source", lambda f: html.escape(f.source)),
    ("floor", lambda f: f"{_number(f.floor_us, '{:.1f} us')}, {f.bound} bound" + _share(f.share_of_floor)),
    ("bandwidth", lambda f: _number(f.bandwidth_gbps, "{:,.0f} GB/s")),
    ("matmul rate of real rows", lambda f: _number(f.tflops, "{:.0f} TFLOPS")),
    ("blocks; padding", lambda f: f"{f.num_m_blocks:,}; {f.padding_share:.0%} of padded rows are empty"),
    ("tiles; waves", lambda f: f"{f.num_tiles:,}; {f.waves:.2f}, {f.idle_share:.0%} of slot-time idle"),
    ("8-token slices that hold a row", lambda f: f"{f.slices_filled:.0%}"),
)


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)


def _share(value: float | None) -> str:
    return "" if value is None else f": {value:.0%} of the time"


def render(facts: Sequence[ScheduleFacts], versus: RivalInfo | None, compiled: Sequence[Any], device: Device) -> str:
    """HTML of both schedules; `compiled` holds offline compile facts, a reason, or None for each."""
    lines = [_line("", [f"<b>{html.escape(f.schedule.label())}</b>" for f in facts], tag="th")]
    lines += [_line(title, [say(f) for f in facts]) for title, say in ROWS]
    lines.append(
        _line(
            "registers, shared memory, spills", [_compiled(f, c, device) for f, c in zip(facts, compiled, strict=True)]
        )
    )
    head = "<tr><th></th><th scope='col'>at hand</th><th scope='col'>compared with</th></tr>"
    return f"<table>{head}{''.join(lines)}</table><p>{verdict(facts, versus)}</p>"


def _line(title: str, cells: Sequence[str], tag: str = "td") -> str:
    inner = "".join(f"<{tag} style='text-align:left;padding:0 1.5em 0 0'>{cell}</{tag}>" for cell in cells)
    return (
        f"<tr><th scope='row' style='text-align:left;padding:0 1.5em 0 0;font-weight:normal'>{title}</th>{inner}</tr>"
    )


def verdict(facts: Sequence[ScheduleFacts], versus: RivalInfo | None) -> str:
    """Which of the two is faster, as far as the repeats can tell."""
    if facts[0].schedule == facts[1].schedule:
        return "Both are the same schedule: turn a knob, or keep this one to compare with and take another."
    if versus is None:
        return "No verdict: a verdict needs both schedules recorded at this point."
    times = f"{versus.ratio:.3f} times as fast"
    if versus.low is None:
        return f"{times}; too few paired repeats for an interval."
    interval = f"95 % interval {versus.low:.3f} to {versus.high:.3f}"
    words = {
        "win": f"<b>Win</b>: the schedule at hand is {times} ({interval}).",
        "loss": f"<b>Loss</b>: the schedule at hand is {times} ({interval}).",
        "tie": f"<b>Tie</b>: {times}, which the noise cannot tell from 1 ({interval}).",
    }
    return words[versus.verdict]


def compile_offline(schedule: Schedule, problem: MoeProblem, device: Device) -> Any:
    """Compile facts for the device, or one line why there are none."""
    try:
        from w4a16_moe import offline
    except ImportError as error:
        return f"cannot compile here: {error.name or 'triton'} is not installed"
    try:
        return offline.compile_facts(schedule, problem, device.capability)
    except (offline.CompileError, ValueError) as error:
        return str(error)


def _compiled(facts: ScheduleFacts, compiled: Any, device: Device) -> str:
    if isinstance(compiled, str):
        return f"{BAD} {html.escape(compiled)}"
    if compiled is not None:
        from w4a16_moe.offline import occupancy

        return (
            f"{compiled.registers}, {compiled.smem_bytes / 1024:.0f} KiB, {compiled.spills_bytes} bytes; "
            f"{occupancy(compiled, device)} CTAs fit an SM (compiled here, Triton {compiled.triton_version})"
        )
    if facts.registers is None:
        return "not known yet: Compile now"
    smem = UNKNOWN if facts.smem_bytes is None else f"{facts.smem_bytes / 1024:.0f} KiB"
    return f"{facts.registers}, {smem}, {facts.spill_bytes or 0} bytes (recorded)"


def occupancy_frame(schedules: Sequence[Schedule], problem: MoeProblem, device: Device) -> pd.DataFrame:
    """Compile each schedule for the device and say how many of its CTAs fit an SM, and what stops one more."""
    return pd.DataFrame([_occupancy_row(schedule, problem, device) for schedule in schedules])


def _occupancy_row(schedule: Schedule, problem: MoeProblem, device: Device) -> dict[str, Any]:
    facts = compile_offline(schedule, problem, device)
    row: dict[str, Any] = {"schedule": schedule.label()}
    if isinstance(facts, str):
        return row | {"stopped by": facts}
    from w4a16_moe.offline import occupancy, occupancy_limits

    limits = occupancy_limits(facts, device)
    return row | {
        "registers": facts.registers,
        "shared memory, KiB": round(facts.smem_bytes / 1024, 1),
        "spills, bytes": facts.spills_bytes,
        "warps": facts.num_warps,
        "CTAs per SM": occupancy(facts, device),
        "stopped by": min(limits, key=limits.__getitem__),
        "compiled in, s": round(facts.seconds, 2),
    }

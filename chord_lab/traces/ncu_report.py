"""Nsight Compute reports (`.ncu-rep`), read by NVIDIA's `ncu-report` package: an optional extra."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, BinaryIO

from chord_lab.errors import UserError
from chord_lab.traces.table import NVTX_SEPARATOR, Trace, dims, kernel_frame, metric_frame, nvtx_frame, plausible

MAGIC = b"NVR\0"
WORKLOAD_NAMES = {0: "kernel", 1: "graph", 2: "range", 3: "command list"}


def available() -> str | None:
    """None when `.ncu-rep` files can be read here, else the reason in one line."""
    try:
        import ncu_report  # noqa: F401
    except ImportError:
        return "ncu-report is not installed: pip install 'chord-lab[nsight]' (NVIDIA's licence, Linux only)"
    except Exception as error:  # its native library may not load
        return f"ncu-report does not load here: {error}"
    return None


def read_ncu_report(path: Path) -> Trace:
    """All kernels of all ranges of a report, with every metric. Raises UserError without `ncu-report`."""
    reason = available()
    if reason:
        raise UserError(
            f"{path}: an Nsight Compute report, but {reason}; or export it: ncu --import FILE --csv --page raw"
        )
    import ncu_report

    promised = results_promised(path)
    try:
        report = ncu_report.load_report(str(path))
    except Exception as error:
        raise UserError(
            f"{path}: ncu-report cannot read it ({_first_line(error)}): damaged, or newer than the package"
        ) from None
    if report is None:
        raise UserError(f"{path}: ncu-report cannot read it: damaged, or newer than the package")
    try:
        return _trace(path, report, promised)
    except UserError:
        raise
    except (TypeError, ValueError, RuntimeError, SystemError) as error:  # the package on names that are no text
        raise UserError(f"{path}: damaged report: {_first_line(error)}") from None


def _trace(path: Path, report: Any, promised: int) -> Trace:
    actions = [a for r in range(report.num_ranges()) for a in _actions(report.range_by_idx(r))]
    notes: list[str] = []
    rows: list[tuple[int, str, float, str, str | None]] = []
    kernels = []
    absent = 0
    for index, action in enumerate(actions):
        values, lost = _metrics(action)
        absent += lost
        rows += [(index, n, v, u, t) for n, (v, u, t) in values.items()]
        kernels.append(_kernel(action, values))
    # the package returns what it could parse of a damaged file, without a word
    if len(actions) < promised or any(not any(r[0] == i for r in rows) for i in range(len(actions))):
        whole = len({r[0] for r in rows})
        raise UserError(f"{path}: damaged report: {whole} of {max(promised, len(actions))} results can be read")
    if not actions:
        notes.append("no kernels: nothing was profiled")
    if absent:
        notes.append(f"{absent} metrics have no value and are left out")
    others = [a for a in actions if a.workload_type() != 0]
    if others:
        notes.append(
            f"{len(others)} entries are {WORKLOAD_NAMES.get(others[0].workload_type(), 'other')} results, not kernels"
        )
    if actions and not any(not math.isnan(k["time_us"]) for k in kernels):
        notes.append("no durations: gpu__time_duration.sum was not collected")
    notes.append("no start times: Nsight Compute replays each kernel alone, so there is no timeline")
    return Trace(
        kind="ncu-report",
        path=path,
        device=", ".join(dict.fromkeys(k.pop("device") for k in kernels)) or None,
        kernels=kernel_frame({n: [k[n] for k in kernels] for n in kernels[0]} if kernels else {}),
        nvtx=nvtx_frame(),
        metrics=metric_frame(rows),
        notes=tuple(notes),
        facts={"tool": "Nsight Compute", "sections": sorted(_sections(actions))},
    )


def results_promised(path: Path) -> int:
    """Results that the report's blocks say they hold. Raises UserError when the file ends inside a block.

    A report is a file header and then blocks, each a 4-byte length, a header of that length in protobuf form (field 2:
    results inside, field 5: bytes of payload) and the payload.
    """
    size = path.stat().st_size
    promised = 0
    with open(path, "rb") as stream:
        stream.seek(len(MAGIC))
        at = len(MAGIC) + 4 + _length(stream, path)
        while at < size:
            stream.seek(at)
            length = _length(stream, path)
            header = _varint_fields(stream.read(length)) if at + 4 + length <= size else None
            if header is None:
                raise UserError(f"{path}: cut-off or damaged report: its blocks do not end where the file does")
            promised += header.get(2, 0)
            at += 4 + length + header.get(5, 0)
    if at != size:
        raise UserError(f"{path}: cut-off report: {at - size} bytes are missing at its end")
    return promised


def _length(stream: BinaryIO, path: Path) -> int:
    raw = stream.read(4)
    if len(raw) < 4:
        raise UserError(f"{path}: cut-off report: it ends inside a block's length")
    return int.from_bytes(raw, "little")


def _varint_fields(message: bytes) -> dict[int, int] | None:
    """The whole-number fields of a protobuf message; None when it is not one."""
    fields: dict[int, int] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]  # IndexError past the end
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    try:
        while at < len(message):
            key = varint()
            wire = key & 7
            if wire == 0:
                fields[key >> 3] = varint()
            elif wire == 2:
                length = varint()
                at += length
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            else:
                return None
    except IndexError:
        return None
    return fields if at == len(message) else None


def _actions(result_range: Any) -> list[Any]:
    return [result_range.action_by_idx(i) for i in range(result_range.num_actions())]


def _metrics(action: Any) -> tuple[dict[str, tuple[float, str, str | None]], int]:
    """``{name: (value, unit, text)}`` and how many have no value. ncu-report gives base units already."""
    values: dict[str, tuple[float, str, str | None]] = {}
    absent = 0
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        if metric is None or not metric.has_value():
            absent += 1
            continue
        value = metric.value()
        if isinstance(value, str):
            values[str(name)] = (float("nan"), str(metric.unit() or ""), value)
        else:
            values[str(name)] = (float(value), str(metric.unit() or ""), None)
    return values, absent


def _kernel(action: Any, values: dict[str, tuple[float, str, str | None]]) -> dict[str, Any]:
    def number(*names: str) -> float:
        return next((values[n][0] for n in names if n in values and values[n][2] is None), float("nan"))

    def shape(prefix: str) -> str | None:
        sizes = [number(f"launch__{prefix}_dim_{axis}") for axis in "xyz"]
        return dims(*(int(s) for s in sizes)) if not any(map(math.isnan, sizes)) else None  # type: ignore[call-arg]

    return {
        "name": str(action.name()),
        "time_us": plausible(number("gpu__time_duration.sum", "gpu__time_duration.avg") / 1e3),
        "grid": shape("grid"),
        "block": shape("block"),
        "registers": number("launch__registers_per_thread"),
        # launch__shared_mem_per_block counts the driver's own share too: not what the kernel asked for
        "smem_bytes": number("launch__shared_mem_per_block_static") + number("launch__shared_mem_per_block_dynamic"),
        "device_index": number("launch__device_id"),
        "stream": number("launch__stream_id"),
        "nvtx": _nvtx_path(action),
        "device": values.get("device__attribute_display_name", (0.0, "", ""))[2] or "unnamed GPU",
    }


def _nvtx_path(action: Any) -> str | None:
    """Push/pop ranges of every domain around the launch, outermost first."""
    state = action.nvtx_state()
    if state is None:
        return None
    path: list[str] = []
    for domain_id in state.domains():
        domain = state.domain_by_id(domain_id)
        path += [str(name) for name in (*domain.start_end_ranges(), *domain.push_pop_ranges())]
    return NVTX_SEPARATOR.join(path) or None


def _sections(actions: list[Any]) -> set[str]:
    found: set[str] = set()
    for action in actions[:1]:
        for section in action.sections():
            found.add(str(section.identifier()))
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

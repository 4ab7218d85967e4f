"""Tables for vLLM's and SGLang's Triton MoE kernels: one entry per number of tokens, both projections share its tile.

Such a table acts on that Triton kernel alone. So only records of our portable kernel are used, and of those only
schedules that its knobs can express; a wgmma or mma.sync winner would be a lie there.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4a16_moe.portable_rules import default_schedule
from w4a16_moe.problem import MoeProblem
from w4a16_moe.profiles import get_profile
from w4a16_moe.schedule import Schedule

from chord_lab.analysis.selection import candidates, require_one_environment, rows_of, schedule_of_row
from chord_lab.errors import UserError
from chord_lab.export.tables.names import sglang_path, vllm_name

if TYPE_CHECKING:
    import pandas as pd

TARGETS = {"vllm": "vLLM's Triton WNA16 MoE kernel", "sglang": "SGLang's Triton MoE kernel"}


@dataclass(frozen=True, kw_only=True)
class TritonTable:
    """One shape's table."""

    E: int  # local experts
    N: int  # logical intermediate width per rank
    device_name: str
    triton_version: str
    entries: dict[int, Schedule]  # tokens -> schedule of both projections
    layer_us: dict[int, float]  # tokens -> gate_up + down
    default_us: dict[int, float]  # tokens -> gate_up + down of the schedule that runs untuned, where it was timed
    left_out: tuple[str, ...]  # what could not be expressed, one line each

    def not_faster(self, margin: float = 0.01) -> list[int]:
        """Tokens whose entry does not beat the untuned schedule by more than `margin`."""
        return [t for t, us in self.layer_us.items() if us > self.default_us.get(t, float("inf")) * (1 - margin)]


def expressible(schedule: Schedule) -> bool:
    """Whether the target's knobs can say it: plain tiles of the portable kernel with tokens on the MMA's M side."""
    return (
        schedule.kernel == "portable"
        and schedule.block_m >= 16
        and not (schedule.swap_ab or schedule.persistent or schedule.stream_k)
        and schedule.token_slicing == "static"
    )


def knobs(schedule: Schedule) -> dict[str, int]:
    """The schedule in the target's words."""
    return {
        "BLOCK_SIZE_M": schedule.block_m,
        "BLOCK_SIZE_N": schedule.block_n,
        "BLOCK_SIZE_K": schedule.block_k,
        "GROUP_SIZE_M": schedule.group_m,
        "SPLIT_K": schedule.split_k,
        "num_warps": schedule.num_warps,
        "num_stages": schedule.num_stages,
    }


def build_triton_tables(frame: pd.DataFrame) -> list[TritonTable]:
    """One table per shape: at each number of tokens the schedule with the least gate_up + down, under one draw.

    Raises:
        UserError: no portable record of both projections that the target's knobs can express.
    """
    import pandas as pd

    rows = candidates(frame)
    portable = require_one_environment(rows[rows["kernel"] == "portable"], together=("scenario", "projection"))
    if not len(portable):
        kernels = ", ".join(sorted({str(k) for k in rows["kernel"].unique()})) or "none"
        raise UserError(
            f"no record of the portable kernel (recorded: {kernels}): a vLLM or SGLang table acts on their Triton "
            "kernel alone; sweep the profile portable first"
        )
    shapes: dict[tuple[int, int], list[pd.DataFrame]] = {}  # one file a shape, whatever scenarios have it
    for scenario, part in portable.groupby("scenario", observed=True):
        if {"gate_up", "down"} <= set(part["projection"]):
            shapes.setdefault(_shape(part), []).append(part)
        elif len(portable["scenario"].unique()) == 1:
            raise UserError(f"{scenario}: both projections are needed, because one entry serves both")
    tables = [_table(pd.concat(parts)) for parts in shapes.values()]
    if not any(table.entries for table in tables):
        example = schedule_of_row(rows_of(portable.head(1))[0])
        raise UserError(
            "no portable schedule was measured that BLOCK_SIZE, GROUP_SIZE_M, warps and stages can express: those "
            f"measured swap operands or slice tokens (for example {example.label() if example else 'none'}); on a GPU, "
            "sweep with --profile portable --space full"
        )
    return [table for table in tables if table.entries]


def _shape(part: pd.DataFrame) -> tuple[int, int]:
    """E and N of the file's name: down's reduction is the intermediate width."""
    down = part[part["projection"] == "down"].iloc[0]
    return int(down["num_experts"]), int(down["K"])


def _table(part: pd.DataFrame) -> TritonTable:
    times: dict[int, dict[Schedule, dict[str, float]]] = {}
    default: dict[int, dict[str, float]] = {}
    unsaid: set[int] = set()
    for row in rows_of(part):
        schedule = schedule_of_row(row)
        assert schedule is not None
        tokens = int(row["routing_num_tokens"])
        projection = str(row["projection"])
        if row["default"] is True:
            known = default.setdefault(tokens, {})
            known[projection] = min(float(row["time_us"]), known.get(projection, float("inf")))
        if not expressible(schedule):
            unsaid.add(tokens)
            continue
        places = times.setdefault(tokens, {}).setdefault(schedule, {})
        places[projection] = min(float(row["time_us"]), places.get(projection, float("inf")))
    entries, layer = {}, {}
    for tokens, by_schedule in sorted(times.items()):
        sums = {s: t["gate_up"] + t["down"] for s, t in by_schedule.items() if len(t) == 2}
        if sums:
            entries[tokens] = min(sums, key=lambda s: (sums[s], s.label()))
            layer[tokens] = sums[entries[tokens]]
    left_out = [f"{t} tokens: no schedule of both projections can be expressed" for t in sorted(unsaid - set(entries))]
    E, N = _shape(part)
    return TritonTable(
        E=E,
        N=N,
        device_name=str(part["device_name"].iloc[0]),
        triton_version=str(part["triton"].iloc[0]),
        entries=entries,
        layer_us=layer,
        default_us={t: sum(times.values()) for t, times in default.items() if len(times) == 2},
        left_out=tuple(left_out),
    )


def pinned(table: TritonTable, problem: MoeProblem, top_k: int) -> TritonTable:
    """The table with an entry for 1 token that holds the portable kernel's untuned tile; it was not measured."""
    if 1 in table.entries:
        return table
    schedule = default_schedule(problem, top_k, get_profile("portable"), None)
    if not expressible(schedule):
        schedule = replace(
            schedule,
            block_m=max(16, schedule.block_m),
            swap_ab=False,
            persistent=False,
            ctas_per_sm=1,
            token_slicing="static",
        )
    entries = {1: schedule, **table.entries}
    return replace(
        table, entries=entries, left_out=(*table.left_out, "1 token: pinned to the untuned tile, not measured")
    )


def write_vllm(table: TritonTable, folder: Path) -> Path:
    """``E=..,N=..,device_name=..,dtype=int4_w4a16.json`` with triton_version at the top, atomically."""
    path = folder / vllm_name(E=table.E, N=table.N, device_name=table.device_name)
    body: dict[str, Any] = {"triton_version": table.triton_version} if table.triton_version else {}
    return write_json(path, body | {str(t): knobs(s) for t, s in table.entries.items()})


def write_sglang(table: TritonTable, folder: Path) -> Path:
    """``triton_x_y_z/E=..,N=<packed>,..json``; the version stands in the folder's name and not in the file."""
    if not table.triton_version:
        raise UserError("records do not say their Triton version, which is the folder of an SGLang table")
    name = sglang_path(E=table.E, N=table.N, device_name=table.device_name, triton_version=table.triton_version)
    return write_json(folder / name, {str(t): knobs(s) for t, s in table.entries.items()})


def write_json(path: Path, value: Any) -> Path:
    """Write JSON to a temporary name, then rename.

    Raises:
        UserError: the place cannot be written.
    """
    text = json.dumps(value, indent=4, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return path


def small_batch_warning(tokens: Sequence[int]) -> str | None:
    """What nearest-key lookup does below the smallest entry."""
    smallest = min(tokens)
    if smallest <= 1:
        return None
    return (
        f"no entry below {smallest} tokens: nearest-key lookup gives its tile to M = 1 as well; "
        "--pin-default adds an entry for 1 token with the untuned tile"
    )

"""Which schedule runs, and which rule chose it: no silent nearest match."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from .devices import DEVICES, Device, device_slug
from .problem import MoeProblem
from .profiles import Profile, get_profile
from .schedule import Schedule
from .tables import ProblemTable, TuningFile, TuningRow, load

Rule = Literal["exact", "bucket", "heuristic", "default", "empty"]

TABLES_ENV = "W4A16_MOE_TUNING"  # a tuning file, or a folder of <device>/<profile>.json, looked at before the package's
BUNDLED = Path(__file__).parent / "tuning"

# layout -> module with default_schedule(problem, routed_m, profile, device) -> Schedule
HEURISTICS = {"rows": ".portable_rules", "fragment64": ".hopper.heuristics"}

_loaded: dict[Path, tuple[tuple[int, int, int], TuningFile]] = {}  # path -> (its stamp on disk, what it held)


class Resolved(NamedTuple):
    """A schedule and how it was found."""

    schedule: Schedule | None  # None for 0 rows: an empty result, no launch
    rule: Rule
    table: str | None = None  # path of the file that served it
    row: TuningRow | None = None
    warning: str | None = None  # one line: what the choice does not rest on


def resolve_schedule(
    problem: MoeProblem,
    routed_m: int,
    profile: Profile | str,
    device: str | None = None,
    *,
    tables: str | Path | None = None,
) -> Resolved:
    """The schedule for ``routed_m`` rows that reach this GPU.

    rule `exact`: a row measured at this very routed_m. `bucket`: the row that covers it. `heuristic`: the device has
    tables, none for this problem; block_m comes from tokens per expert (`block_m`). `default`: no table for this device
    and profile; the warning lists where it was looked for. `empty`: 0 rows.

    ``device`` is a slug such as nvidia_h200, or the name that the driver reports (the current GPU's when None).
    ``tables``, or the environment variable W4A16_MOE_TUNING, names a file or folder to look in first. A file that
    cannot be trusted is refused with ValueError.
    """
    if isinstance(profile, str):
        profile = get_profile(profile)
    if isinstance(routed_m, bool) or not isinstance(routed_m, int) or routed_m < 0:
        raise ValueError(f"routed_m must be a whole number of at least 0, not {routed_m!r}")
    if routed_m == 0:
        return Resolved(None, "empty")
    device = device_slug(device) if device is not None else current_device()
    path, tried = find_table(profile, device, tables)
    if path is None:
        where = f"; looked for {', '.join(map(str, tried))}" if tried else ""
        warning = (
            f"no tuning table for device {device or '(none)'} and profile {profile.name}: using the default{where}"
        )
        return Resolved(untuned(problem, routed_m, profile, device), "default", warning=warning)
    table = load_cached(path, profile.name, device).table_for(problem)
    if table is None:
        shape = f"E={problem.num_experts} N={problem.N} K={problem.K}"
        warning = f"{path} has no table for {shape}: using the block_m model"
        return Resolved(untuned(problem, routed_m, profile, device), "heuristic", str(path), warning=warning)
    row = table.row_for(routed_m)
    rule: Rule = "exact" if routed_m in row.measured_m else "bucket"
    return Resolved(row.schedule, rule, str(path), row, _doubt(table, row, routed_m, problem))


def find_table(
    profile: Profile, device: str | None, tables: str | Path | None = None
) -> tuple[Path | None, list[Path]]:
    """The tuning file of a device and profile, and every path that was looked at."""
    tried: list[Path] = []
    for path in _candidates(profile, device, tables):
        tried.append(path)
        if path.is_file():
            return path, tried
    return None, tried


def load_cached(path: Path, profile: str, device: str | None) -> TuningFile:
    """The checked file; read again only when it changed on disk."""
    status = path.stat()
    stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
    known = _loaded.get(path)
    if known is None or known[0] != stamp or known[1].profile.name != profile or known[1].device != device:
        known = (stamp, load(path, profile=profile, device=device))
        _loaded[path] = known
    return known[1]


def current_device() -> str | None:
    """Slug of the current GPU, None without one. Never loads torch: who has not loaded it has no tensors yet."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return device_slug(torch.cuda.get_device_name())


def _candidates(profile: Profile, device: str | None, tables: str | Path | None) -> Iterator[Path]:
    for named in (tables, os.environ.get(TABLES_ENV) or None):
        if named is None:
            continue
        root = Path(named)
        if root.is_file():
            yield root
        elif not root.is_dir():
            raise ValueError(f"tuning tables: {root} is neither a file nor a folder")
        elif device is not None:
            yield root / device / f"{profile.name}.json"
    if device is not None:
        yield BUNDLED / device / f"{profile.name}.json"


@lru_cache(maxsize=4096)
def untuned(problem: MoeProblem, routed_m: int, profile: Profile, device: str | None = None) -> Schedule:
    """The schedule that no measurement chose: block_m by tokens per expert, the rest by the kernel family's habit."""
    name = HEURISTICS[profile.layout]
    try:
        module = importlib.import_module(name, __package__)
    except ModuleNotFoundError as error:
        if not f"{__package__}{name}".startswith(error.name or "?"):
            raise
        raise ValueError(f"no table and no heuristic for layout {profile.layout} in this build of w4a16_moe") from None
    known: Device | None = DEVICES.get(device) if device is not None else None
    schedule: Schedule = module.default_schedule(problem, routed_m, profile, known)
    return schedule


def _doubt(table: ProblemTable, row: TuningRow, routed_m: int, problem: MoeProblem) -> str | None:
    """What the choice does not rest on: unmeasured rows, points beyond the measured range, another top_k."""
    doubts = []
    measured = table.measured_m()
    if not row.measured_m:
        doubts.append(f"no measured point supports the row ({row.min_m}, {row.max_m or 'open'}]")
    elif routed_m < measured[0]:
        doubts.append(f"routed_m {routed_m} is below the smallest measured point {measured[0]}")
    elif routed_m > measured[-1]:
        doubts.append(f"routed_m {routed_m} is above the largest measured point {measured[-1]}")
    if table.problem.top_k != problem.top_k:
        doubts.append(f"measured with top_k {table.problem.top_k}, asked for {problem.top_k}")
    return "; ".join(doubts) or None

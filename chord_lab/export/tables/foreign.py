"""Tables and results of other tools, read as data: what they are, what they hold, and what was odd about them."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from chord_lab.errors import UserError
from chord_lab.export.tables.names import TableName, parse_name, tried_names, whole

MOST_BYTES = 1 << 28
MOST_TWICE = 3  # remarks on keys that stand twice
TILE_KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
OPTIONAL_KEYS = ("GROUP_SIZE_M", "SPLIT_K", "num_warps", "num_stages", "num_ctas")
# Knobs of other vendors' backends: kept as they are, they mean nothing to an NVIDIA kernel.
VENDOR_KEYS = {
    "waves_per_eu": "AMD",
    "matrix_instr_nonkdim": "AMD",
    "kpack": "AMD",
    "grf_mode": "Intel",
    "USE_TMA": "TMA loads",
}


class ForeignRow(NamedTuple):
    """One entry: the point it stands for and what is said of it."""

    key: int | str  # tokens, rows, or the tool's own key
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A file of another tool."""

    path: str
    kind: str  # vllm | sglang | humming_rows | humming_bench | kernel_tuner_cache | t1 | t4 | measured | unknown
    target: str  # the backend that the content acts on
    rows: tuple[ForeignRow, ...] = ()
    name: TableName | None = None
    header: dict[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def is_tile_table(self) -> bool:
        """Whether rows are looked up by the nearest number of tokens."""
        return self.kind in ("vllm", "sglang")


def read_foreign(path: str | Path) -> Foreign:
    """Read any file that another tool may have written.

    Raises:
        UserError: not readable at all (missing, not JSON, not a table); odd content is reported in `remarks` instead.
    """
    path = Path(path)
    if path.suffix in (".csv", ".parquet"):
        return _measured(path)
    document, twice = _load(path)
    for reader in _READERS:
        found = reader(path, document)
        if found is not None:
            return replace(found, remarks=(*found.remarks, *twice))
    shape = (
        f"keys {', '.join(k[:40] for k in list(document)[:6])}"
        if isinstance(document, dict)
        else type(document).__name__
    )
    name = parse_name(path.name)
    return Foreign(
        path=str(path), kind="unknown", target="", name=name, header=_header(document),
        remarks=(
            f"no known table format ({shape}); nothing was taken from it",
            *(name.remarks() if name.E is not None or name.device_name else ()),
        ),
    )  # fmt: skip


def _load(path: Path) -> tuple[Any, list[str]]:
    """The document, and a remark for each of its first keys that stands twice."""
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs) and len(twice) < MOST_TWICE:
            keys = [key for key, _ in pairs]
            twice.append(_twice(next(key for key in made if keys.count(key) > 1)[:40]))
        return made

    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} is larger than {MOST_BYTES >> 20} MiB: no tuning table is")
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                data = file.read(MOST_BYTES + 1)
        return json.loads(data.rstrip(b"\0").decode("utf-8"), object_pairs_hook=once), twice
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory") from None
    except (OSError, EOFError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {' '.join(str(error).split())[:160]}") from None


def _header(document: Any) -> dict[str, Any]:
    """Scalars at the top of a document."""
    if not isinstance(document, dict):
        return {}
    return {str(k): v for k, v in document.items() if isinstance(v, (str, int, float, bool)) or v is None}


def _tile_table(path: Path, document: Any) -> Foreign | None:
    """vLLM's and SGLang's `{"<tokens>": {BLOCK_SIZE_M, ...}}`, with whatever else stands beside the numbers."""
    if not isinstance(document, dict):
        return None
    found: dict[int, ForeignRow] = {}
    header, remarks = {}, []
    for key, value in document.items():
        tokens = whole(key)
        if tokens is None:
            header[key] = value
        elif isinstance(value, dict) and any(t in value for t in TILE_KEYS):
            if tokens in found:
                remarks.append(_twice(tokens))
            found[tokens] = ForeignRow(tokens, value)
            remarks += _row_remarks(key, value)
        else:
            remarks.append(f"entry {key} is no tile configuration: skipped")
    if not found:
        return None
    rows = list(found.values())
    name = parse_name(path.name)
    sglang = path.parent.name.startswith("triton_")
    if "triton_version" in header and sglang:
        remarks.append("triton_version inside the file: SGLang takes every key for a token count and stops at it")
    remarks += [f"top-level entry {k[:40]!r} is not a token count" for k in header if k != "triton_version"]
    smallest = min(found)
    if smallest > 1:
        remarks.append(f"no row for small batches: M = 1 is served by the row of {smallest}, the nearest key")
    if sglang:
        header.setdefault("triton_version", path.parent.name.removeprefix("triton_").replace("_", "."))
    return Foreign(
        path=str(path),
        kind="sglang" if sglang else "vllm",
        target="SGLang's Triton MoE kernel" if sglang else "vLLM's Triton MoE kernel",
        rows=tuple(rows),
        name=name,
        header=header,
        remarks=tuple(dict.fromkeys([*name.remarks(), *remarks])),
    )


def _twice(entry: object) -> str:
    return f"two entries for {entry}: the later one counts, as for its tool"


def _row_remarks(key: str, values: dict[str, Any]) -> list[str]:
    remarks = []
    missing = [name for name in TILE_KEYS if name not in values]
    if missing:
        remarks.append(f"entry {key} lacks {', '.join(missing)}")
    for name, value in values.items():
        if name in VENDOR_KEYS:
            remarks.append(f"{name} is a knob of another backend ({VENDOR_KEYS[name]})")
        elif name not in TILE_KEYS and name not in OPTIONAL_KEYS:
            remarks.append(f"unknown knob {name}")
        elif isinstance(value, bool) or not isinstance(value, int):
            remarks.append(f"entry {key}: {name} is {value!r}, not a whole number")
    block_m = values.get("BLOCK_SIZE_M")
    if isinstance(block_m, int) and block_m < 16:
        remarks.append(f"BLOCK_SIZE_M {block_m}: below 16, legal only where tokens are the MMA's N side")
    return remarks


def _humming_rows(path: Path, document: Any) -> Foreign | None:
    """`[[min_m, max_m, config], ...]`, min_m < rows <= max_m."""
    if not isinstance(document, list) or not document:
        return None
    if not all(isinstance(r, list) and len(r) == 3 and isinstance(r[2], dict) for r in document):
        return None
    rows, remarks, last = [], [], 0
    for low, high, config in document:
        rows.append(ForeignRow(f"({low}, {high}]", config | {"min_m": low, "max_m": high}))
        if not isinstance(low, int) or not isinstance(high, int):
            remarks.append(f"row ({low}, {high}] has bounds that are no whole numbers")
            continue
        if low != last:
            remarks.append(
                f"{'gap' if low > last else 'overlap'} before row ({low}, {high}]: the row before ends at {last}"
            )
        last = high
    return Foreign(path=str(path), kind="humming_rows", target="humming", rows=tuple(rows), remarks=tuple(remarks))


def _humming_bench(path: Path, document: Any) -> Foreign | None:
    """Measured results: problem, device, packages, result per number of rows."""
    if not isinstance(document, dict) or not isinstance(document.get("result"), dict) or "problem" not in document:
        return None
    rows, remarks = [], []
    for key, value in document["result"].items():
        time = value.get("time") if isinstance(value, dict) else None
        if isinstance(time, (int, float)) and not isinstance(time, bool) and 0 < time < math.inf:
            tokens = whole(key)
            rows.append(ForeignRow(key if tokens is None else tokens, {"time_us": time * 1e3, **value}))
        else:
            remarks.append(f"result {key} has no time: skipped")
    problem = document["problem"] if isinstance(document["problem"], dict) else {}
    if problem.get("b_dtype") not in (None, "int4", "uint4"):
        remarks.append(f"weights are {problem.get('b_dtype')}: not the W4A16 problem of this project")
    header = {"problem": problem, "device": document.get("device"), "packages": document.get("packages")}
    return Foreign(
        path=str(path), kind="humming_bench", target="measured results", rows=tuple(rows), header=header,
        remarks=tuple(remarks),
    )  # fmt: skip


def _kernel_tuner_cache(path: Path, document: Any) -> Foreign | None:
    """Kernel Tuner's cache: one entry a configuration; failed ones hold a word instead of a time."""
    if not isinstance(document, dict) or not isinstance(document.get("cache"), dict):
        return None
    objective = str(document.get("objective") or "time")
    rows, failed = [], 0
    for key, value in document["cache"].items():
        time = value.get(objective) if isinstance(value, dict) else None
        if isinstance(time, (int, float)) and not isinstance(time, bool) and time == time:  # noqa: PLR0124 (NaN)
            rows.append(ForeignRow(str(key), value))
        else:
            failed += 1
    rows.sort(key=lambda row: row.values[objective])
    header = {k: document.get(k) for k in ("device_name", "kernel_name", "problem_size", "tune_params_keys")}
    remarks = [f"{failed} of {failed + len(rows)} configurations failed"] if failed else []
    if not rows:
        remarks.append("no configuration has a time: no winner")
    return Foreign(
        path=str(path), kind="kernel_tuner_cache", target=str(document.get("kernel_name") or ""), rows=tuple(rows),
        header=header, remarks=tuple(remarks),
    )  # fmt: skip


def _t1(path: Path, document: Any) -> Foreign | None:
    """An auto-tuning input description (T1): a search space, no results."""
    if not isinstance(document, dict) or "ConfigurationSpace" not in document:
        return None
    space = document["ConfigurationSpace"]
    parameters = space.get("TuningParameters", []) if isinstance(space, dict) else []
    rows = tuple(ForeignRow(str(p.get("Name")), p) for p in parameters if isinstance(p, dict))
    return Foreign(
        path=str(path), kind="t1", target="a search space", rows=rows, header=_header(document.get("General")),
        remarks=("values are expressions in the file; they are shown, never evaluated",),
    )  # fmt: skip


def _t4(path: Path, document: Any) -> Foreign | None:
    """Auto-tuning results (T4)."""
    if not isinstance(document, dict) or not isinstance(document.get("results"), list):
        return None
    rows = [
        ForeignRow(str(i), entry)
        for i, entry in enumerate(document["results"])
        if isinstance(entry, dict) and "configuration" in entry
    ]
    bad = len(document["results"]) - len(rows)
    return Foreign(
        path=str(path), kind="t4", target="measured results", rows=tuple(rows), header=_header(document),
        remarks=(f"{bad} results without a configuration: skipped",) if bad else (),
    )  # fmt: skip


_READERS: tuple[Callable[[Path, Any], Foreign | None], ...] = (
    _humming_bench, _kernel_tuner_cache, _t1, _t4, _humming_rows, _tile_table,
)  # fmt: skip


def _measured(path: Path) -> Foreign:
    """A table of measured layer times: one line a point, latency in milliseconds."""
    import pandas as pd

    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except Exception as error:  # pandas and pyarrow raise many kinds for a broken file
        raise UserError(f"{path} is not a readable table: {' '.join(str(error).split())[:160]}") from None
    if not {"num_tokens", "latency"} <= set(frame.columns):
        return Foreign(
            path=str(path), kind="unknown", target="",
            remarks=(f"no known table format (columns {', '.join(map(str, frame.columns[:8]))}); nothing was taken",),
        )  # fmt: skip
    tokens, latency = (pd.to_numeric(frame[name], errors="coerce") for name in ("num_tokens", "latency"))
    good = (tokens >= 0) & (tokens < 1 << 53) & (tokens % 1 == 0) & (latency > 0) & (latency < math.inf)
    rows = tuple(
        ForeignRow(int(count), {"time_us": float(time) * 1e3} | {str(k): v for k, v in row.items()})
        for count, time, row in zip(tokens[good], latency[good], frame[good].to_dict("records"), strict=True)
    )
    bad = int((~good).sum())
    constant = {str(c): frame[c].iloc[0] for c in frame if len(frame) and frame[c].nunique(dropna=False) == 1}
    remarks = (f"{bad} lines without a whole number of tokens and a latency above 0: skipped",) if bad else ()
    return Foreign(
        path=str(path), kind="measured", target="measured results", rows=rows, header=constant, remarks=remarks
    )


class Found(NamedTuple):
    """A search for a shape's table; it is no error when there is none."""

    path: Path | None
    tried: list[Path]


def find_table(folder: Path, *, E: int, N: int, device_name: str, dtype: str = "int4_w4a16") -> Found:
    """Look for a shape's table in a folder of vLLM or SGLang tables (their triton_x_y_z folders included)."""
    folders = [folder, *sorted(p for p in folder.glob("triton_*") if p.is_dir())]
    tried = []
    for place in folders:
        packed = place.name.startswith("triton_") and dtype.startswith("int4")
        for name in tried_names(E=E, N=N // 2 if packed else N, device_name=device_name, dtype=dtype):
            tried.append(place / name)
            if tried[-1].is_file():
                return Found(tried[-1], tried)
    return Found(None, tried)


class Nearest(NamedTuple):
    """Which row of a tile table serves a number of tokens, by its tool's own rule."""

    row: ForeignRow
    rule: str
    warning: str | None


def lookup_nearest(table: Foreign, num_tokens: int) -> Nearest:
    """vLLM's and SGLang's rule: the key nearest to the number of tokens; of two as near, the one listed first.

    Raises:
        UserError: not a tile table, or fewer than one token.
    """
    if not table.is_tile_table:
        raise UserError(f"{table.path} ({table.kind}) is no table by number of tokens")
    if num_tokens < 1:
        raise UserError(f"M must be at least 1, not {num_tokens}")
    row = min(table.rows, key=lambda r: abs(int(r.key) - num_tokens))
    keys = [int(r.key) for r in table.rows]
    if num_tokens in keys:
        return Nearest(row, "exact", None)
    if not min(keys) < num_tokens < max(keys):
        side = "below the smallest" if num_tokens < min(keys) else "above the largest"
        warning = (
            f"M = {num_tokens} is {side} key {row.key}: its tile serves it all the same; pin a row of defaults there"
        )
    else:
        warning = f"no row for M = {num_tokens}: the nearest key, {row.key}, serves it"
    return Nearest(row, "nearest", warning)

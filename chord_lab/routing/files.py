"""Recorded routing read from files: topk_ids or per-expert counts, and where experts live. Data only, never code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chord_lab.errors import UserError

Counts = npt.NDArray[np.int64]

_SUFFIXES = (".json", ".jsonl", ".csv", ".npy", ".parquet")
_ID_KEYS = ("topk_ids", "topk_indices", "expert_ids", "routed_experts")
_COUNT_KEYS = (
    "tok_e",
    "counts",
    "expert_counts",
    "weight",
    "load",
    "expert_load",
    "logical_count",
    "tokens_per_expert",
)


@dataclass(frozen=True)
class Recorded:
    """One layer's recorded routing: either the ids of each token, or the counts of each expert."""

    counts: Counts  # [num_experts]
    topk_ids: npt.NDArray[np.int32] | None  # [num_tokens, top_k]


@dataclass(frozen=True)
class ExpertLoad:
    """Rows per expert of one or more layers; layers may have different numbers of experts and are never mixed."""

    layers: tuple[Counts, ...]  # each [num_experts of that layer]
    path: str


@dataclass(frozen=True)
class ExpertPlacement:
    """Which experts each GPU of one layer holds, redundant copies included."""

    layer: int
    devices: tuple[tuple[int, ...], ...]  # logical expert of each physical slot, per GPU

    @property
    def num_logical(self) -> int:
        """Distinct experts."""
        return len({e for device in self.devices for e in device})

    @property
    def num_physical(self) -> int:
        """Slots in all, copies counted."""
        return sum(map(len, self.devices))

    @property
    def replicas(self) -> dict[int, int]:
        """Copies of each expert that stands more than once."""
        slots = np.bincount([e for device in self.devices for e in device])
        return {int(e): int(slots[e]) for e in np.flatnonzero(slots > 1)}

    def expert_map(self, device: int) -> npt.NDArray[np.int32]:
        """``[num_logical]`` local slot on that GPU, -1 elsewhere; an id past the last expert cannot occur."""
        mapping = np.full(self.num_logical, -1, dtype=np.int32)
        for slot, expert in enumerate(self.devices[device]):
            mapping[expert] = slot
        return mapping


def read_recorded(path: Path, *, layer: int | None, num_experts: int, top_k: int) -> Recorded:
    """The routing of one layer for `num_experts` local experts.

    Raises:
        UserError: a missing or unreadable file, several layers with none chosen, or a routing of another shape.
    """
    name, value = _numbers(path)
    if name == "ids" or (name == "" and value.ndim == 2 and value.shape[1] == top_k != num_experts):
        return _recorded_ids(path, value, num_experts, top_k)
    if value.ndim == 2 and len(value) == 1:
        value = value[0]
    if value.ndim == 2:
        if layer is None:
            raise UserError(f"{path} holds {len(value)} layers; choose one: file:{path}#LAYER, 0 to {len(value) - 1}")
        if layer >= len(value):
            raise UserError(f"{path} has no layer {layer}; legal: 0 to {len(value) - 1}")
        value = value[layer]
    counts = _as_counts(path, value)
    if counts.size != num_experts:
        raise UserError(f"{path} holds counts of {counts.size} experts, but {num_experts} were asked for")
    return Recorded(counts, None)


def read_expert_load(path: str | Path) -> ExpertLoad:
    """Every layer's per-expert counts of a file."""
    path = Path(path)
    layers = _layers(path, _document(path)) if path.suffix == ".json" else None
    if layers is None:
        name, value = _numbers(path)
        if name == "ids":
            raise UserError(f"{path} holds topk_ids, not per-expert counts; use it as a draw: file:{path}")
        layers = list(np.atleast_2d(value))
    return ExpertLoad(tuple(_as_counts(path, layer) for layer in layers), str(path))


def read_expert_placement(path: str | Path) -> tuple[ExpertPlacement, ...]:
    """The placement files of expert load balancers: ``layer_list`` of ``device_list`` of ``device_expert``."""
    path = Path(path)
    document = _document(path)
    try:
        layers = tuple(
            ExpertPlacement(
                int(layer["layer_id"]), tuple(tuple(map(int, d["device_expert"])) for d in layer["device_list"])
            )
            for layer in document["layer_list"]
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{path} is no expert placement: expected layer_list / device_list / device_expert") from None
    if not layers:
        raise UserError(f"{path} places no layer: its layer_list is empty")
    for placement in layers:
        ids = sorted({e for device in placement.devices for e in device})
        if ids != list(range(len(ids))):
            missing = next(e for e in range(len(ids) + 1) if e not in ids)
            raise UserError(
                f"{path}: layer {placement.layer} places experts {ids[0]} to {ids[-1]} but expert {missing} nowhere"
            )
    return layers


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys stand once; JSON's reader would drop the first of two."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} stands twice")
    return made


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_once)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from None


def _layers(path: Path, document: Any) -> list[Any] | None:
    """Layers of a JSON document whose layers may differ in length."""
    rows = _pick(document)[1]
    if isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows):
        return rows
    return None


def _pick(document: Any) -> tuple[str, Any]:
    """(ids | counts | "", the array) of a JSON document."""
    if isinstance(document, dict):
        for kind, keys in (("ids", _ID_KEYS), ("counts", _COUNT_KEYS)):
            for key in keys:
                if key in document:
                    return kind, document[key]
        if document and all(
            key.isascii() and key.isdigit() and len(key) <= 9 for key in document
        ):  # {"0": 12, "1": 7}: expert -> count
            size = max(map(int, document)) + 1
            if size <= 1 << 16:
                return "counts", [document.get(str(e), 0) for e in range(size)]
    return "", document


def _numbers(path: Path) -> tuple[str, npt.NDArray[Any]]:
    """(ids | counts | "", array of 1 or 2 axes)."""
    if not path.is_file():
        raise UserError(f"{path} is a directory" if path.is_dir() else f"no such file: {path}")
    if path.suffix not in _SUFFIXES:
        more = "; a pickle can run code and is not read" if path.suffix in (".pt", ".pth", ".pkl", ".pickle") else ""
        raise UserError(f"{path}: {path.suffix or 'no suffix'} is not read; legal: {', '.join(_SUFFIXES)}{more}")
    try:
        name, value = _read(path)
        array = np.asarray(value)
    except UserError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is not readable: {(str(error).splitlines() or ['unknown fault'])[0]}") from None
    if array.dtype.kind not in "iuf" or array.ndim not in (1, 2):
        raise UserError(f"{path} holds no table of numbers: expected topk_ids [tokens, top_k] or counts [experts]")
    return name, array


def _read(path: Path) -> tuple[str, Any]:
    if path.suffix == ".json":
        return _pick(_document(path))
    if path.suffix == ".jsonl":
        return _pick([json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()])
    if path.suffix == ".npy":
        return "", np.load(path, allow_pickle=False)
    import pandas as pd

    frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    for kind, keys in (("ids", _ID_KEYS), ("counts", _COUNT_KEYS)):
        for key in keys:
            if key in frame:
                column = frame[key].tolist()
                return kind, [list(v) for v in column] if column and hasattr(column[0], "__len__") else column
    if path.suffix == ".csv" and all(_is_number(c) for c in frame.columns):  # no header line
        frame = pd.read_csv(path, header=None)
    return "", frame.to_numpy()


def _is_number(text: Any) -> bool:
    try:
        float(str(text))
    except ValueError:
        return False
    return True


def _as_counts(path: Path, value: Any) -> Counts:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{path} holds no per-expert counts") from None
    if array.ndim != 1 or not array.size:
        raise UserError(f"{path} holds no per-expert counts: expected one number per expert")
    bad = array[~((array >= 0) & (array < 2**53) & (array == np.floor(array)))]
    if bad.size:
        raise UserError(f"{path}: a count of {bad[0]:g} is not a whole number of at least 0")
    return array.astype(np.int64)


def _recorded_ids(path: Path, value: npt.NDArray[Any], num_experts: int, top_k: int) -> Recorded:
    if value.ndim != 2 or value.shape[1] != top_k:
        raise UserError(f"{path} holds topk_ids of shape {list(value.shape)}, but top_k={top_k} was asked for")
    if value.size and not (value == np.floor(value)).all():
        raise UserError(f"{path}: topk_ids must be whole numbers")
    if value.size and (value.min() < 0 or value.max() >= num_experts):
        bad = value.min() if value.min() < 0 else value.max()
        raise UserError(f"{path} routes to expert {bad:g}; legal: 0 to {num_experts - 1}")
    ids = value.astype(np.int32)
    twice = np.flatnonzero((np.diff(np.sort(ids, axis=1), axis=1) == 0).any(axis=1))
    if twice.size:
        raise UserError(f"{path}: token {twice[0]} is routed to one expert twice")
    return Recorded(np.bincount(ids.ravel(), minlength=num_experts).astype(np.int64), ids)

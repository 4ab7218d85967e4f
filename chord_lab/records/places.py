"""Where recorded measurements lie."""

from __future__ import annotations

import os
import pathlib

from chord_lab.errors import UserError

DATA_ENV = "CHORD_LAB_DATA"


def data_directory(named: pathlib.Path | None = None) -> pathlib.Path:
    """Where recorded measurements lie: as named, CHORD_LAB_DATA, the checkout's data/, or ./data.

    Raises:
        UserError: nowhere; the message lists where they were looked for.
    """
    places = [named, os.environ.get(DATA_ENV) or None]
    if not any(places):
        places = [pathlib.Path(__file__).parents[2] / "data", pathlib.Path.cwd() / "data"]
    tried = [pathlib.Path(place) for place in places if place]
    for place in tried:
        if place.is_file() or (place.is_dir() and any(place.rglob("*.parquet"))):
            return place
    raise UserError(
        f"no recorded measurements found (looked in {', '.join(map(str, tried))}); set {DATA_ENV} to a folder of them, "
        "or measure on a GPU with --source live"
    )


def described_recordings() -> list[str]:
    """``nvidia_h200: 1352 records of 6 scenarios, 2026-11-29``, one line a folder.

    Raises:
        UserError: see `data_directory`; or nothing there is a records file.
    """
    found = []
    for folder, (count, scenarios, dates) in _recorded_by_folder().items():
        span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        found.append(f"{folder}: {count} records of {len(scenarios)} scenarios, {span}")
    return found


def shipped_scenarios() -> set[str]:
    """Scenarios that have recorded measurements; none where nothing was recorded or it cannot be read."""
    try:
        return {name for _, scenarios, _ in _recorded_by_folder().values() for name in scenarios}
    except UserError:
        return set()


def _recorded_by_folder() -> dict[str, tuple[int, set[str], list[str]]]:
    """Folder name -> records, scenarios, sorted days."""
    from chord_lab.records.parquet import read_tables, record_files

    found: dict[str, tuple[int, set[str], list[str]]] = {}
    notices: list[str] = []
    for path in record_files(data_directory()):
        table, told = read_tables(path, ["scenario", "date"])
        notices += told
        if not len(table):
            continue
        count, scenarios, days = found.get(path.parent.name, (0, set(), []))
        names = {str(name) for name in table["scenario"].unique().to_pylist() if name}
        seen = {str(date)[:10] for date in table["date"].unique().to_pylist() if date}
        found[path.parent.name] = (count + len(table), scenarios | names, sorted({*days, *seen}))
    if not found:
        raise UserError("; ".join(notices) or f"{data_directory()} holds no records")
    return found

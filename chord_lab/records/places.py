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


def recorded_devices() -> list[str]:
    """Devices that have recorded measurements, one folder each.

    Raises:
        UserError: see `data_directory`.
    """
    folder = data_directory()
    files = [folder] if folder.is_file() else folder.rglob("*.parquet")
    return sorted({path.parent.name for path in files})

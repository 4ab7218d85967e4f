"""Where notebooks write."""

from __future__ import annotations

import os
import pathlib

OUT_ENV = "CHORD_LAB_OUT"
CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def out_folder(*names: str) -> pathlib.Path:
    """A folder under CHORD_LAB_OUT, or under out/ of the checkout; created."""
    folder = pathlib.Path(os.environ.get(OUT_ENV) or CHECKOUT / "out").joinpath(*names)
    folder.mkdir(parents=True, exist_ok=True)
    return folder

"""The part of a panel that runs in the browser; see frame.js for why it must."""

from __future__ import annotations

import pathlib
from typing import Any


def make_frame() -> Any:
    """An invisible widget that fits figures to the panel it is put in; None where anywidget is not installed."""
    try:
        import anywidget
    except ImportError:
        return None

    class Frame(anywidget.AnyWidget):
        """No state: it acts on the element it is shown in."""

        _esm = pathlib.Path(__file__).with_suffix(".js").read_text()

    return Frame(layout={"height": "0"})

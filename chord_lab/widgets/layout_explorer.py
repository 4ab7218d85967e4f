"""LayoutExplorer: where a weight's four bits lie in memory, found by asking the packer itself."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from chord_lab.export import placement_figures as figures
from chord_lab.widgets import controls
from chord_lab.widgets.live_figure import LiveFigure
from chord_lab.widgets.panel import Framed

BLOCK_N, BLOCK_K = 64, 64  # the piece of a weight that is shown
LOAD_BYTES = 16  # what one thread loads at once


@functools.cache
def codes_in_memory(layout: str) -> npt.NDArray[np.int64]:
    """``[bytes, 2]`` index n * BLOCK_K + k of the code in the low and the high half of each packed byte.

    Each code's index is packed in planes of four bits, as if it were weights, and read back from the bytes.
    """
    import torch
    from w4a16_moe.layout import get_layout

    packer = get_layout(layout)
    index = torch.arange(BLOCK_N * BLOCK_K).reshape(BLOCK_N, BLOCK_K)
    scales = torch.ones(BLOCK_N, BLOCK_K // 32, dtype=torch.bfloat16)
    found = np.zeros(0, dtype=np.int64)
    for plane in range(3):  # 64 x 64 indices are three times four bits
        codes, _ = packer.pack_expert(((index >> (4 * plane)) & 15).to(torch.uint8), scales)
        packed = codes.contiguous().view(torch.uint8).reshape(-1).numpy()
        halves = np.stack([packed & 15, packed >> 4], axis=1).astype(np.int64)
        found = halves << (4 * plane) if not found.size else found | (halves << (4 * plane))
    if sorted(found.ravel().tolist()) != list(range(BLOCK_N * BLOCK_K)):
        raise ValueError(f"layout {layout} is no plain order of codes: this picture cannot show it")
    return found


class LayoutExplorer(Framed):
    """One 16-byte load of a thread, and the weights that it brings."""

    title = "Layout: which weights does one load bring?"

    def __init__(self, layout: str = "fragment64"):
        super().__init__()
        self.layout_name = controls.choice("Layout", ("rows", "fragment64"), layout, "how weights lie in memory")
        self.load = controls.whole("16-byte load", 0, BLOCK_N * BLOCK_K // 2 // LOAD_BYTES - 1, 0, "counted from 0")
        self.figure = LiveFigure(self._figure())
        self.bits = controls.text(self._bits())
        for control in (self.layout_name, self.load):
            control.observe(self._redraw, "value")
        self.arrange(controls.row(self.layout_name, self.load), self.bits, self.figure.widget)

    def _redraw(self, _change: object) -> None:
        self.bits.value = self._bits()
        self.figure.show(self._figure())

    def _codes(self) -> npt.NDArray[np.int64]:
        """``[16, 2]`` codes of the chosen load."""
        start = self.load.value * LOAD_BYTES
        return codes_in_memory(self.layout_name.value)[start : start + LOAD_BYTES]

    def _figure(self):  # type: ignore[no-untyped-def]
        order = codes_in_memory(self.layout_name.value)
        byte_of_code = np.empty(BLOCK_N * BLOCK_K, dtype=np.int64)
        byte_of_code[order[:, 0]] = byte_of_code[order[:, 1]] = np.arange(len(order))
        loads = (byte_of_code // LOAD_BYTES).reshape(BLOCK_N, BLOCK_K)
        return figures.draw_layout(loads, chosen=self.load.value, layout=self.layout_name.value)

    def _bits(self) -> str:
        """HTML: the sixteen bytes, bit 7 first, each half with the weight (n, k) it holds."""
        cell = "style='border:1px solid #8888;padding:.1em .5em;text-align:center'"
        names = [[f"{code // BLOCK_K}, {code % BLOCK_K}" for code in pair] for pair in self._codes()]
        rows = (
            ("byte", [str(i) for i in range(len(names))]),
            ("bits 7-4: n, k", [high for _low, high in names]),
            ("bits 3-0: n, k", [low for low, _high in names]),
        )
        lines = "".join(
            f"<tr><th scope='row'>{title}</th>{''.join(f'<td {cell}>{text}</td>' for text in texts)}</tr>"
            for title, texts in rows
        )
        return f"<table>{lines}</table>"

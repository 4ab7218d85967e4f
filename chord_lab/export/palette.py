"""One colour per meaning in every figure, report and notebook; all from Okabe and Ito's colour-blind-safe palette."""

from __future__ import annotations

from collections.abc import Sequence

from chord_lab.export import look

# Vermilion is kept for what a person chose, in every panel.
IMPLEMENTATION = {
    "w4a16_moe": look.BLUE,
    "humming": look.ORANGE,
    "humming_best_tile": look.PURPLE,
    "humming_tile": look.PURPLE,  # one of the tiles that the best is chosen from
    "torch_dequant_bf16": look.GREY,
    "triton_autotune": look.SKY,
}
VERDICT = {"win": look.GREEN, "tie": look.GREY, "none": look.VERMILION}
SLICING = {"static": look.BLUE, "semi_static": look.GREEN, "dynamic": look.ORANGE, "branched": look.PURPLE}
PROJECTION = {"gate_up": look.BLUE, "down": look.GREEN}

# Ordered quantities (block_m, tokens per expert) get ordered colours: steps of cividis, whose lightness rises evenly
# and which colour-blind readers see alike; the darkest and lightest ends are left out, to read on any page.
_ORDERED = ("#31446b", "#575d6d", "#7d7c78", "#a59c74", "#c9b85c", "#e5cf52")

NAMES = {
    "w4a16_moe": "ours",
    "humming": "Humming (own heuristics)",
    "humming_best_tile": "Humming (best tile)",
    "humming_tile": "Humming (forced tile)",
    "torch_dequant_bf16": "bf16 matmul (dequantised first)",
}


def of(meaning: dict[str, str], name: str, number: int = 0) -> str:
    """The colour of a name; one from the cycle for a name without a fixed colour."""
    return meaning.get(name, look.CYCLE[number % len(look.CYCLE)])


def ordered(count: int) -> list[str]:
    """`count` colours from dark to light along the ordered scale."""
    if count <= 1:
        return [_ORDERED[0]][:count]
    return [_blend(i * (len(_ORDERED) - 1) / (count - 1)) for i in range(count)]


def _blend(position: float) -> str:
    low = min(int(position), len(_ORDERED) - 2)
    share = position - low
    first, second = (_rgb(_ORDERED[low + i]) for i in (0, 1))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(first, second, strict=True))


def _rgb(colour: str) -> Sequence[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]

"""Where the time of a traced layer goes: by its steps, and in the gaps between its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from chord_lab.traces.identity import KEY_PREFIX
from chord_lab.traces.table import NVTX_SEPARATOR, Trace
from chord_lab.traces.views import busy_share

if TYPE_CHECKING:
    import pandas as pd

OUTSIDE = "(outside any range)"


class Step(NamedTuple):
    """Kernels that were launched inside one range of a layer; mean of its repeats."""

    name: str  # "gate_up mma_sync 16x256x128 ..."
    time_us: float
    launches: float
    share: float  # of the layer's time on the GPU, gaps included


class Layer(NamedTuple):
    """Kernels that were launched inside one outermost range."""

    name: str  # "kimi-k2/ep8/decode, 400 rows"
    repeats: int
    time_us: float  # of one repeat: from the first kernel's start to the last one's end, over the repeats
    gap_us: float  # of it without any kernel
    steps: list[Step]  # in order of their first kernel


def layers_of(trace: Trace) -> list[Layer]:
    """Every outermost range that launched kernels, the longest first; none for a file without start times."""
    frame = trace.kernels[["start_us", "time_us", "nvtx"]].dropna(subset=["start_us", "time_us"])
    if not len(frame):
        return []
    paths = frame["nvtx"].astype(object).where(frame["nvtx"].notna(), "")
    split = {path: _outer_and_step(path) for path in paths.unique()}
    frame = frame.assign(layer=paths.map(lambda p: split[p][0]), step=paths.map(lambda p: split[p][1]))
    outermost = trace.nvtx[trace.nvtx["depth"] == 0]["name"].astype(str).value_counts()
    found = [
        _layer(str(name), group, int(outermost.get(str(name), 1))) for name, group in frame.groupby("layer", sort=False)
    ]
    return sorted(found, key=lambda layer: -layer.time_us * layer.repeats)


def _outer_and_step(path: str) -> tuple[str, str]:
    names = [name for name in path.split(NVTX_SEPARATOR) if name and not name.startswith(KEY_PREFIX)]
    return (names[0] if names else OUTSIDE, names[1] if len(names) > 1 else "(no inner range)")


def _layer(name: str, kernels: pd.DataFrame, repeats: int) -> Layer:
    start, end = float(kernels["start_us"].min()), float((kernels["start_us"] + kernels["time_us"]).max())
    whole = max(end - start, 1e-3)  # a kernel of no length
    grouped: Any = kernels.groupby("step", sort=False)["time_us"].agg(["sum", "size"]).itertuples()
    steps = [Step(str(s.Index), s.sum / repeats, s.size / repeats, s.sum / whole) for s in grouped]
    gap = whole * (1 - busy_share(kernels, start, end))
    return Layer(name, repeats, whole / repeats, gap / repeats, steps)


def step_frame(layers: list[Layer]) -> pd.DataFrame:
    """A row a step, and one for the gaps of each layer."""
    import pandas as pd

    rows: list[tuple[str, str, float, float, float]] = []
    for layer in layers:
        rows += [(layer.name, *step) for step in layer.steps]
        rows.append((layer.name, "(no kernel runs)", layer.gap_us, 0.0, layer.gap_us / layer.time_us))
    frame = pd.DataFrame(rows, columns=["layer", "step", "time_us", "launches", "share"])
    return frame.set_index(["layer", "step"])


def time_answer(trace: Trace, most: int = 4) -> list[str]:
    """Where the time goes, a sentence a layer."""
    layers = layers_of(trace)
    if not layers:
        kernels = f"{trace.path.name} holds {len(trace.kernels)} kernels that were profiled one by one"
        return [f"{kernels}: it tells how long each takes, not what a layer spends between them."]
    return [_sentence(layer) for layer in layers[:most]]


def _sentence(layer: Layer) -> str:
    times: dict[str, float] = {}
    for step in layer.steps:
        first = step.name.split()[0] if not step.name.startswith("(") else step.name
        times[first] = times.get(first, 0.0) + step.share
    parts = [f"{name} {share:.0%}" for name, share in sorted(times.items(), key=lambda item: -item[1])[:5]]
    gap = layer.gap_us / layer.time_us
    whole = f"{layer.name}: {layer.time_us:,.0f} us from its first kernel to its last"
    return f"{whole}; {', '.join(parts)}; for {gap:.0%} of it no kernel runs."

"""A control for every knob of a schedule; the legal values come from the sweep's space."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import ipywidgets
import traitlets
from w4a16_moe.profiles import get_profile
from w4a16_moe.schedule import Schedule

from chord_lab.sweeps import space
from chord_lab.widgets import controls

# One line for each knob: what turning it does.
HELP = {
    "kernel": "device schedule: portable Triton, Hopper mma.sync, Hopper wgmma",
    "block_m": "routed rows of a tile; the unit of padding",
    "block_n": "output columns of a tile",
    "block_k": "reduction length of one pipeline stage",
    "num_warps": "warps that multiply",
    "num_stages": "pipeline stages in shared memory",
    "ctas_per_sm": "resident CTAs per SM that a persistent grid counts on",
    "group_m": "token blocks that share a sweep over N (L2 reuse)",
    "split_k": "CTAs that share one tile's K",
    "token_slicing": "what is done for 8-token slices that hold no row",
    "tile_order": "persistent grids: tiles by stride, or from a queue",
    "dequant": "how a code becomes bf16",
    "swap_ab": "weights on the MMA's M side, tokens on its N side",
    "stream_k": "equal shares of (tile, K) space; cut tiles are summed",
    "persistent": "a fixed grid walks the tiles",
}


class ScheduleKnobs(ipywidgets.VBox):
    """`schedule` follows the knobs and the knobs follow `schedule`."""

    schedule = traitlets.Instance(Schedule)

    def __init__(self, schedule: Schedule, profile: str):
        self.knobs: dict[str, Any] = {}
        self._busy = False
        for name in (field.name for field in fields(Schedule)):
            value = getattr(schedule, name)
            if isinstance(value, bool):
                self.knobs[name] = controls.switch(name, value, HELP[name])
            else:
                kind = controls.choice if isinstance(value, str) else controls.steps
                self.knobs[name] = kind(name, [value], value, HELP[name])
            self.knobs[name].observe(self._turned, "value")
        switches = [self.knobs[name] for name in ("swap_ab", "stream_k", "persistent")]
        numbers = [knob for name, knob in self.knobs.items() if knob not in switches]
        half = (len(numbers) + 1) // 2
        columns = [ipywidgets.VBox(numbers[:half]), ipywidgets.VBox([*numbers[half:], *switches])]
        super().__init__([ipywidgets.HBox(columns, layout={"flex_flow": "row wrap"})])
        self.profile = profile
        self.schedule = schedule
        self.show(schedule, profile)

    def show(self, schedule: Schedule, profile: str) -> None:
        """Set every knob; values outside the space stay on offer while they are chosen."""
        self.profile = profile
        self._busy = True
        try:
            offers = values_on_offer(schedule, profile)
            for name, knob in self.knobs.items():
                if isinstance(knob, ipywidgets.Checkbox):
                    knob.value = getattr(schedule, name)
                elif list(knob.options) != offers[name]:
                    controls.set_options(knob, offers[name], getattr(schedule, name))
                else:
                    knob.value = getattr(schedule, name)
        finally:
            self._busy = False
        self.schedule = schedule

    def _turned(self, change: Any) -> None:
        if self._busy:
            return
        schedule = Schedule(**{name: knob.value for name, knob in self.knobs.items()})
        if change.owner is self.knobs["kernel"]:  # another kernel offers other values
            schedule = nearest_in_space(schedule)
        self.show(schedule, self.profile)


def values_on_offer(schedule: Schedule, profile: str) -> dict[str, list[Any]]:
    """Knob -> the values of every space for this schedule's kernel, and the value that it has."""
    grids = [grid for name in space.SPACES for grid in space.grids(schedule.kernel, name)]
    offers: dict[str, list[Any]] = {"kernel": list(get_profile(profile).kernels)}
    for field in fields(Schedule):
        value = getattr(schedule, field.name)
        known = offers.get(field.name) or list(dict.fromkeys(v for grid in grids for v in grid.get(field.name, ())))
        known = known if value in known else [*known, value]
        offers[field.name] = known if isinstance(value, str) else sorted(known)
    return offers


def nearest_in_space(schedule: Schedule) -> Schedule:
    """The schedule with every knob moved to the nearest value that its kernel's space holds."""
    [grid] = space.grids(schedule.kernel, "full")
    values = schedule.to_dict()
    for name, known in grid.items():
        if values[name] not in known:
            numeric = isinstance(known[0], int) and not isinstance(known[0], bool)
            values[name] = min(known, key=lambda v: abs(v - values[name])) if numeric else known[0]
    for name in ("group_m", "split_k"):
        values[name] = values[name] if name in grid else 1
    for name in ("stream_k", "persistent"):
        values[name] = values[name] if name in grid else False
    return Schedule.from_dict(values)

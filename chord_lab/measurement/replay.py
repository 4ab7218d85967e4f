"""Replay: records answer a plan, in no more time than it takes to find them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from chord_lab.records.attempt import Sink
from chord_lab.records.decode import decode, same_attempt
from chord_lab.records.record import Environment

if TYPE_CHECKING:
    import pyarrow as pa


class ReplayMeasure:
    """The `Measure` protocol over recorded measurements."""

    source = "recorded"

    def __init__(self, table: pa.Table):
        self.table = table

    def measure(self, plan: Any, sink: Sink) -> None:
        """Give the sink the record of every candidate of the plan that was recorded; the others are counted."""

        decoded = decode(self.table)
        points = {_identity(point): index for index, point in enumerate(plan.points)}
        known: dict[Any, list[int]] = {}
        for index, candidate in enumerate(plan.candidates):
            known.setdefault(same_attempt(candidate), []).append(index)
        point_ids = np.array([points.get(_identity(point), -1) for point in decoded.points] or [-1])
        width = len(plan.candidates) + 1
        wanted = plan.pairs[:, 0].astype(np.int64) * width + plan.pairs[:, 1]
        is_candidate = np.array([c.kind == "candidate" for c in decoded.candidates] or [False])
        at = np.where(decoded.point_of_row >= 0, point_ids[decoded.point_of_row], -1)
        keep = at < 0
        keep &= decoded.point_of_row < 0  # ceilings come along
        keep |= (at >= 0) & ~is_candidate[decoded.candidate_of_row]  # and so do peers of the points
        for twin in range(max(map(len, known.values()), default=0)):
            ids = np.array([_nth(known.get(c, []), twin) for c in decoded.candidates] or [-1])
            candidate = ids[decoded.candidate_of_row]
            keep |= (at >= 0) & (candidate >= 0) & np.isin(at * width + candidate, wanted)
        chosen = self.table if keep.all() else self.table.filter(keep)
        index = chosen.schema.get_field_index("source")
        kind = chosen.schema.field("source").type
        chosen = chosen.set_column(index, chosen.schema.field("source"), _constant("recorded", len(chosen), kind))
        environment = newest_environment(chosen)
        if environment is not None:
            sink.started(environment)
        sink.append_table(chosen)
        missing = len(plan) - int((keep & (at >= 0) & is_candidate[decoded.candidate_of_row]).sum())
        if missing > 0 and any(c.kind == "candidate" for c in plan.candidates):
            sink.note(f"{missing} candidates of the plan were never recorded")


def _constant(word: str, count: int, kind: Any) -> Any:
    """A dictionary-encoded column of one word."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(np.zeros(count, dtype=np.int32), pa.array([word])).cast(kind)


def _identity(point: Any) -> tuple[Any, ...]:
    return (point.scenario, point.projection, point.profile, point.problem, point.num_tokens, point.routing)


def _nth(values: list[int], n: int) -> int:
    return values[n] if n < len(values) else -1


def newest_environment(table: pa.Table) -> Environment | None:
    """The environment of the newest record."""
    if not len(table):
        return None
    import pyarrow.compute as pc

    newest = max(str(date) for date in table["date"].unique().to_pylist())
    row = table.slice(pc.index(table["date"].cast("string"), newest).as_py(), 1).to_pylist()[0]
    return Environment(**{k: row[k] for k in Environment.__dataclass_fields__ if row.get(k) is not None})

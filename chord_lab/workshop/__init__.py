"""The workshop's points and self-checks: each check judges an answer and never tells it."""

from chord_lab.workshop.load_checks import check_block, check_load
from chord_lab.workshop.points import BEAT_DRAW, BEAT_SCENARIO, CHOOSE_BLOCK, FILL_CARD, READ_LOAD, LoadPoint
from chord_lab.workshop.record_checks import (
    FILL_SCHEDULE,
    check_fill,
    check_slicing,
    check_table,
    check_turn,
    measured_times,
    shipped_schedule,
)
from chord_lab.workshop.verdict import Verdict

__all__ = [
    "BEAT_DRAW",
    "BEAT_SCENARIO",
    "CHOOSE_BLOCK",
    "FILL_CARD",
    "FILL_SCHEDULE",
    "READ_LOAD",
    "LoadPoint",
    "Verdict",
    "check_block",
    "check_fill",
    "check_load",
    "check_slicing",
    "check_table",
    "check_turn",
    "measured_times",
    "shipped_schedule",
]

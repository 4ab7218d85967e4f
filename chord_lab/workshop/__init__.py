"""The workshop's points and self-checks: each check judges an answer and never tells it."""

from chord_lab.workshop.load_checks import check_block, check_load
from chord_lab.workshop.points import BEAT_SCENARIO, CHOOSE_BLOCK, FILL_CARD, READ_LOAD, TRAFFIC, LoadPoint
from chord_lab.workshop.record_checks import (
    FILL_SCHEDULE,
    beat_draw,
    check_fill,
    check_slicing,
    check_table,
    check_turn,
    measured_times,
    present_schedule,
)
from chord_lab.workshop.verdict import Verdict

__all__ = [
    "BEAT_SCENARIO",
    "CHOOSE_BLOCK",
    "FILL_CARD",
    "FILL_SCHEDULE",
    "READ_LOAD",
    "TRAFFIC",
    "LoadPoint",
    "Verdict",
    "beat_draw",
    "check_block",
    "check_fill",
    "check_load",
    "check_slicing",
    "check_table",
    "check_turn",
    "measured_times",
    "present_schedule",
]

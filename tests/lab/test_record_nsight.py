"""The worked examples of the Nsight notebooks, before a GPU records them: legal, and known to the shipped sweep."""

import pathlib

import pytest

from benchmarks import record_nsight
from chord_lab.cli.profiling import chosen_jobs
from chord_lab.records import read_records

RECORDS = pathlib.Path(__file__).parents[2] / "data" / "nvidia_h200"
GROUPS = (
    ("kimi-k2/ep8/decode", record_nsight.SLICING_TOKENS, record_nsight.SLICING),
    ("kimi-k2/ep8/decode", record_nsight.STREAM_TOKENS, record_nsight.STREAM_K),
    ("kimi-k2/ep8/prefill", record_nsight.PREFILL_TOKENS, record_nsight.BLOCK_M),
)


@pytest.mark.parametrize(("scenario", "tokens", "schedules"), GROUPS)
def test_every_schedule_is_legal_at_its_point(scenario, tokens, schedules):
    jobs = chosen_jobs(scenario, schedules, tokens=tokens)
    named = set(schedules) - {"default"}  # which may be one of them
    assert len({candidate.schedule for _, candidate in jobs}) == len(jobs) in (len(named), len(schedules))


def test_prefill_schedules_are_attempts_of_the_shipped_sweep():
    """From a point of the sweep to its counters: the same schedule, measured without a failure."""
    scenario, tokens, schedules = GROUPS[-1]
    wanted = {candidate.key_at(point) for point, candidate in chosen_jobs(scenario, schedules, tokens=tokens)}
    recorded = {record.key(): record.status for record in read_records(RECORDS).records if record.scenario == scenario}
    assert {key: recorded.get(key) for key in wanted} == dict.fromkeys(wanted, "ok")

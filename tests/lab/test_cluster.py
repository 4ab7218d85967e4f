"""A real local cluster of CPU workers with the fake measuring process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from fake_bench import fake_time_us
from run_fake_sweep import candidates, plan_of, settings, sweep
from test_sweep_engine import FAULTS, LIMITS, faulty, ours, verdicts

from chord_lab.errors import UserError
from chord_lab.measurement.cluster import ClusterMeasure, _Spread
from chord_lab.measurement.dask_workers import connect
from chord_lab.measurement.share import settings_from_dict, settings_to_dict
from chord_lab.records import Environment, read_records, read_tables
from chord_lab.records.attempt import record_of
from chord_lab.sweeps.run import Budget, Run, run
from chord_lab.sweeps.winners import winners

pytest.importorskip("distributed")


def spread(directory, plan, workers=2, share=12, resume=False, budget=None, watch=None, **over):
    measure = ClusterMeasure(
        "local", settings(**over), device="nvidia_h200", gpus=[str(i) for i in range(workers)], share=share
    )
    return run(plan, measure, directory, resume=resume, budget=budget or Budget(), watch=watch)


def test_two_workers_find_the_winners_of_one(tmp_path):
    plan = plan_of([*candidates(), *faulty()[2:4]], tokens=(20, 30))
    sweep(tmp_path / "one", plan)
    done = spread(tmp_path / "two", plan)
    assert verdicts(tmp_path / "two") == verdicts(tmp_path / "one")
    records = ours(tmp_path / "two")
    assert len({r.key() for r in records}) == len(records) == done.progress.finished == 2 * 56
    assert Counter(r.status for r in records) == {"ok": 108, "wrong_result": 2, "launch_error": 2}
    assert len({r.run_id for r in records}) == 1
    assert len(list((tmp_path / "two").glob("journal-*"))) == 1  # the client alone writes
    assert Counter(r.implementation for r in read_records(tmp_path / "two").records if r.kind == "baseline") == {
        "torch_dequant_bf16": 2
    }


def test_candidates_that_crash_take_no_worker_down(tmp_path):
    plan = plan_of([*candidates()[:20], *faulty()])
    done = spread(tmp_path, plan, **LIMITS)
    assert {r.schedule.num_stages: r.status for r in ours(tmp_path) if r.status != "ok"} == FAULTS
    assert not [note for note in done.progress.notes if "worker died" in note]


def test_a_dead_workers_share_is_taken_over(tmp_path):
    killed = threading.Event()

    def kill_one(progress):
        if progress.finished >= 4 and not killed.is_set():
            killed.set()
            os.kill(worker_pids()[0], signal.SIGKILL)

    plan = plan_of(candidates()[:24], tokens=(20, 30, 40, 50))
    done = spread(tmp_path, plan, share=30, sleep_s=0.02, watch=kill_one)
    assert killed.is_set()
    records = ours(tmp_path)
    assert len({r.key() for r in records}) == len(records) == 96
    assert [note for note in done.progress.notes if "another takes its share over" in note]


def worker_pids():
    """Worker processes of the cluster that this process runs."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        command = " ".join(process.cmdline())
        if "multiprocessing" in command and "spawn_main" in command:
            found.append(process.pid)
    return found


def test_times_of_unlike_workers_are_never_put_together(tmp_path):
    """Two records of one attempt would be merged repeat by repeat, whatever driver each worker has."""
    one = Environment(device="nvidia_h200", device_name="NVIDIA H200", driver="1")
    spreading = _Spread(ClusterMeasure("local", settings(), device="nvidia_h200"), None, Run(tmp_path))
    spreading._same_environment(one)
    spreading._same_environment(replace(one, python="3.14", peers="humming 1"))
    with pytest.raises(UserError, match=r"workers differ \(driver 1 and 2\).*--resume"):
        spreading._same_environment(replace(one, driver="2"))


def test_resume_spreads_what_is_missing(tmp_path):
    plan = plan_of(candidates()[:30])
    spread(tmp_path, plan, budget=Budget(candidates=10))
    done = spread(tmp_path, plan, resume=True)
    assert len({r.key() for r in ours(tmp_path)}) == 30
    assert done.progress.finished == 20
    (winner,) = winners(read_tables(tmp_path)[0])
    assert winner.schedule.block_m == 32 and not winner.flags
    fastest = min(fake_time_us(c.schedule.to_dict(), 160) for c in candidates()[:30])
    assert fake_time_us(winner.schedule.to_dict(), 160) == fastest


def test_a_run_cut_short_says_so_and_keeps_the_best(tmp_path):
    """The best of a point wait for its final: without time for one, what their shares measured is their record."""
    spreading = _Spread(ClusterMeasure("local", settings(), device="nvidia_h200"), None, Run(tmp_path))
    plan = plan_of(candidates()[:30])
    ((point, some),) = plan.by_point()
    where = Environment(device="nvidia_h200", device_name="NVIDIA H200")
    base = {"run_id": "r", "date": "2026-11-30T00:00:00+00:00", "rounds": (0,), "environment": where}
    times = {c: fake_time_us(c.schedule.to_dict(), 160) for c in some}
    held = [record_of(point, c, **base, times_us=((time_us,),)) for c, time_us in times.items()]
    (final,) = spreading._final(point, held)
    list(spreading._take(final, {"rows": [], "notes": []}))
    assert {r.key() for r in ours(tmp_path)} == {r.key() for r in held}


def test_seconds_that_run_out_on_workers_leave_a_partial_run(tmp_path):
    done = spread(tmp_path, plan_of(candidates()[:30], tokens=(20, 30)), budget=Budget(seconds=0.01))
    assert done.cut_short and len(ours(tmp_path)) < 60


def test_no_scheduler_at_the_address_is_one_line():
    with pytest.raises(UserError, match=r"--dask tcp://127\.0\.0\.1:9: no scheduler answers"):
        connect("tcp://127.0.0.1:9", None).__enter__()


def test_local_without_a_gpu_is_one_line():
    with pytest.raises(UserError, match="no GPU is visible"):
        connect("local", []).__enter__()


def test_nothing_listens_beyond_loopback():
    with connect("local", ["0"]) as client:
        time.sleep(0.2)
        addresses = [client.scheduler.address, *client.scheduler_info(n_workers=-1)["workers"]]
    assert all(address.startswith("tcp://127.0.0.1:") for address in addresses)


def test_settings_cross_as_plain_data():
    made = settings(noise=0.5)
    assert settings_from_dict(json.loads(json.dumps(settings_to_dict(made)))) == made

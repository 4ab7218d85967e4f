"""The engine under trouble, with real child processes and a fake timer."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fake_bench import fake_time_us
from run_fake_sweep import candidates, plan_of, schedule, settings, sweep

from chord_lab.errors import UserError
from chord_lab.measurement.live import LiveMeasure
from chord_lab.measurement.rounds import RoundsPolicy
from chord_lab.records import Journal, read_records, read_tables
from chord_lab.records.attempt import Candidate
from chord_lab.sweeps.run import Budget, read_manifest
from chord_lab.sweeps.winners import winners

HERE = Path(__file__).parent
FAULTS = {
    101: "crashed",
    102: "timeout",
    103: "wrong_result",
    104: "launch_error",
    105: "out_of_resources",
    106: "crashed",
}
LIMITS = {"candidate_limit_s": 1.5, "memory_limit": 300 << 20}


def faulty():
    return [Candidate(schedule=schedule(num_stages=stages)) for stages in FAULTS]


def ours(directory):
    return [r for r in read_records(directory).records if r.kind == "candidate"]


def verdicts(directory):
    table, _ = read_tables(directory)
    return [(w.projection, w.routed_m, w.schedule, w.verdict) for w in winners(table)]


def test_fault_drill(tmp_path):
    """Of 60 candidates six fail in six ways: 54 measured, 6 named by kind, winners as without them, in any order."""
    clean = tmp_path / "clean"
    sweep(clean, plan_of(candidates()))
    for seed in (1, 2):
        mixed = [*candidates(), *faulty()]
        random.Random(seed).shuffle(mixed)
        directory = tmp_path / f"faulty{seed}"
        sweep(directory, plan_of(mixed), **LIMITS)
        records = ours(directory)
        assert len(records) == 60
        assert Counter(r.status for r in records)["ok"] == 54
        assert {r.schedule.num_stages: r.status for r in records if r.status != "ok"} == FAULTS
        assert all(r.reason and "\n" not in r.reason for r in records if r.status != "ok")
        assert verdicts(directory) == verdicts(clean)


def test_a_crash_names_its_signal_and_a_hang_its_limit(tmp_path):
    sweep(tmp_path, plan_of([*candidates()[:3], *faulty()[:2]]), **LIMITS)
    reasons = {r.status: r.reason for r in ours(tmp_path)}
    assert "SIGSEGV" in reasons["crashed"] and "1.5 s" in reasons["timeout"]


def test_a_lost_device_context_costs_its_candidate_alone(tmp_path):
    poison = Candidate(schedule=schedule(num_stages=110))
    sweep(tmp_path, plan_of([*candidates()[:3], poison, *candidates()[3:5]]), **LIMITS)
    assert Counter(r.status for r in ours(tmp_path)) == {"ok": 5, "crashed": 1}
    assert [r.reason for r in ours(tmp_path) if r.status == "crashed"] == [
        "RuntimeError: an illegal memory access was encountered"
    ]


def test_a_death_in_the_last_check_costs_its_candidate_alone(tmp_path):
    dies = Candidate(schedule=schedule(block_m=32, num_stages=111))
    sweep(tmp_path, plan_of([*candidates()[:20], dies, *candidates()[20:30]]), **LIMITS)
    assert Counter(r.status for r in ours(tmp_path)) == {"ok": 30, "crashed": 1}


def test_a_default_that_dies_in_a_later_repeat_sends_nobody_home(tmp_path):
    """Whoever has not met the new reference yet is not judged by it: the fastest are timed on."""
    dies = Candidate(schedule=schedule(num_stages=112), default=True)
    others = [replace(c, default=False) for c in candidates()]
    sweep(tmp_path, plan_of([dies, *others]), **LIMITS)
    found = {r.schedule: r for r in ours(tmp_path)}
    assert Counter(r.status for r in found.values()) == {"ok": 54, "crashed": 1}
    fastest = sorted(others, key=lambda c: fake_time_us(c.schedule.to_dict(), 160))[:3]
    assert all(len(found[c.schedule].rounds) >= 3 for c in fastest)


def test_who_was_checked_before_a_hang_is_checked_again_in_the_new_process(tmp_path):
    """The device rested while the hang was waited for, so the next thing asked of the new process is a load."""
    hang = Candidate(schedule=schedule(num_stages=102))
    sweep(tmp_path, plan_of([*candidates()[:3], hang]), load_s=0.1, **LIMITS)
    assert Counter(r.status for r in ours(tmp_path)) == {"ok": 3, "timeout": 1}


def test_all_candidates_failing_gives_no_winner(tmp_path):
    sweep(tmp_path, plan_of(faulty()[2:4]))
    (winner,) = winners(read_tables(tmp_path)[0])
    assert winner.verdict == "none" and winner.schedule is None and winner.failed == 2


def test_compilation_failures_are_records(tmp_path):
    refused = [Candidate(schedule=schedule(num_stages=stages)) for stages in (107, 108, 109)]
    sweep(tmp_path, plan_of([*candidates()[:2], *refused]))
    status = {r.schedule.num_stages: (r.status, r.rule) for r in ours(tmp_path) if r.status != "ok"}
    assert status[107][0] == "out_of_resources" and status[108] == ("invalid", "shared memory")
    assert status[109][0] == "compile_error"


def run_until(command, seconds):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=seconds)
        assert process.returncode == 0, err
        return out
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None


def test_kill_in_a_loop_loses_nothing(tmp_path):
    """kill -9 at 20 random moments, resumed each time: the same records as an undisturbed run's."""
    command = [sys.executable, str(HERE / "run_fake_sweep.py")]
    began = time.monotonic()
    assert run_until([*command, str(tmp_path / "quiet")], 120) is not None
    length = time.monotonic() - began
    generator = random.Random(4)
    kept, kills = 0, 0
    while kills < 20:
        finished = run_until(
            [*command, str(tmp_path / "killed"), "--resume"], generator.uniform(0.3, 0.5 * length + 0.6)
        )
        now = read_records(tmp_path / "killed").records if (tmp_path / "killed").exists() else []
        assert len(now) >= kept
        kept = len(now)
        if finished is not None:  # done early: take its last journal away, and the disk is as after a crash
            journals = sorted((tmp_path / "killed").glob("journal-*"), key=lambda p: p.stat().st_mtime)
            journals[-1].write_bytes(journals[-1].read_bytes()[:-50])
            kept = 0
        kills += 1
    run_until([*command, str(tmp_path / "killed"), "--resume"], 120)
    quiet, killed = ours(tmp_path / "quiet"), ours(tmp_path / "killed")

    def summary(records):
        return sorted((r.key(), r.status, r.times_us[0], len(r.times_us) > 0) for r in records)

    assert len({r.key() for r in killed}) == len(killed) == len(quiet) == 36
    assert summary(killed) == summary(quiet)
    assert all(len(set(r.rounds)) == len(r.rounds) for r in killed)


def test_a_killed_sweep_leaves_no_child_behind(tmp_path):
    process = subprocess.Popen([sys.executable, str(HERE / "run_fake_sweep.py"), str(tmp_path)])
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("journal-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    children = child_pids(process.pid)
    assert children
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert read_manifest(tmp_path)["partial"] is True  # reports of it say so
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def child_pids(parent):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def test_resume_measures_what_is_missing_and_keeps_the_run(tmp_path):
    sweep(tmp_path, plan_of(candidates()[:20]), budget=Budget(candidates=5))
    assert read_manifest(tmp_path)["partial"] is True
    assert len(ours(tmp_path)) == 5
    done = sweep(tmp_path, plan_of(candidates()[:20]), resume=True)
    records = ours(tmp_path)
    assert len({r.key() for r in records}) == 20
    assert done.progress.finished == 15
    assert len({r.run_id for r in read_records(tmp_path).records}) == 1
    assert read_manifest(tmp_path)["partial"] is False
    again = sweep(tmp_path, plan_of(candidates()[:20]), resume=True)
    assert again.progress.finished == 0 and len(ours(tmp_path)) == len(records)
    (winner,) = winners(read_tables(tmp_path)[0])
    assert winner.candidates == 20 and winner.verdict == "win" and not winner.flags  # all of them paired


def test_the_default_runs_again_beside_what_was_missing(tmp_path):
    """Its second record has other rounds, so that candidates of both sessions pair with the default of their own."""
    sweep(tmp_path, plan_of(candidates()[:20]), budget=Budget(candidates=5))
    sweep(tmp_path, plan_of(candidates()[:20]), resume=True)
    default = [r for r in ours(tmp_path) if r.default]
    assert len(default) == 2 and not set(default[0].rounds) & set(default[1].rounds)


def test_a_directory_that_holds_a_run_is_not_written_over(tmp_path):
    sweep(tmp_path, plan_of(candidates()[:3]))
    with pytest.raises(UserError, match="--resume continues it"):
        sweep(tmp_path, plan_of(candidates()[:3]))


def test_another_device_starts_afresh(tmp_path):
    sweep(tmp_path, plan_of(candidates()[:6]))
    sweep(tmp_path, plan_of(candidates()[:6]), resume=True, bench_settings={"device": "NVIDIA H100 80GB HBM3"})
    assert Counter(r.environment.device for r in ours(tmp_path)) == {"nvidia_h200": 6, "nvidia_h100_80gb_hbm3": 6}
    assert len(winners(read_tables(tmp_path)[0])) == 1  # the newest run; the two are never ranked together


@pytest.mark.parametrize("unlike", ["", "driver", "timer"])
def test_repeats_of_a_killed_run_are_taken_up_in_their_own_environment_alone(tmp_path, unlike):
    """A driver, a kernel or the way to time may change between the kill and the resume: its times are other times."""
    plan = plan_of(candidates()[:6])
    sweep(tmp_path, plan, budget=Budget(candidates=2))
    ((environment, method),) = {(r.environment, r.method) for r in ours(tmp_path)}
    left = plan.without({r.key() for r in ours(tmp_path)})
    ((point, (candidate, *_)),) = left.by_point()
    if unlike == "driver":
        environment = replace(environment, driver="other")
    if unlike == "timer":
        method = replace(method, timer="another")
    stamp = method.stamp(environment)
    with Journal(tmp_path, "killed") as journal:
        sample = {"round": 50, "environment": stamp, "times_us": [7777.0], "sm_mhz": 0.0, "power_w": 0.0}
        journal.append_sample(candidate.key_at(point), sample)
    sweep(tmp_path, plan, resume=True)
    (record,) = [r for r in ours(tmp_path) if r.key() == candidate.key_at(point)]
    assert ((7777.0,) in record.times_us) == (not unlike)


def test_seconds_run_out(tmp_path):
    began = time.monotonic()
    done = sweep(tmp_path, plan_of(candidates(), tokens=(20, 30, 40, 50)), sleep_s=0.02, budget=Budget(seconds=2.0))
    assert done.cut_short and time.monotonic() - began < 8
    assert all(r.times_us for r in ours(tmp_path))


def test_zero_elapsed_ends_in_too_short_to_time(tmp_path):
    sweep(tmp_path, plan_of(candidates()[:5]), bench_settings={"zero": True})
    assert len(ours(tmp_path)) == 5
    (winner,) = winners(read_tables(tmp_path)[0])
    assert winner.verdict == "none"


def test_close_contenders_are_timed_more_often_than_losers(tmp_path):
    sweep(tmp_path, plan_of(candidates()), noise=0.02)
    rounds = {r.schedule: len(r.rounds) for r in ours(tmp_path)}
    (winner,) = winners(read_tables(tmp_path)[0])
    slow = [n for s, n in rounds.items() if s.block_m == 64]
    assert rounds[winner.best] >= 3 and sorted(slow)[len(slow) // 2] == 1


def test_every_candidate_gets_the_least_number_of_rounds(tmp_path):
    sweep(tmp_path, plan_of(candidates()[:12]), policy=RoundsPolicy(min_rounds=3))
    assert min(len(r.rounds) for r in ours(tmp_path)) >= 3


def test_two_runs_of_a_noisy_sweep_agree_within_the_stated_margin(tmp_path):
    """Noise of 2 % on every repeat: what one run chooses is as fast as what another chooses, to within its interval."""
    chosen = []
    for number in range(3):
        mixed = candidates()
        random.Random(number).shuffle(mixed)
        sweep(tmp_path / str(number), plan_of(mixed), noise=0.02, bench_settings={"seed": number})
        (winner,) = winners(read_tables(tmp_path / str(number))[0])
        assert winner.verdict == "win"
        true = fake_time_us(winner.schedule.to_dict(), 160)
        stated = (winner.ratio_high - winner.ratio_low) / 2 / (1 - winner.margin)
        chosen.append((true, stated))
    best = min(true for true, _ in chosen)
    assert all(true / best - 1 <= max(stated, 0.01) for true, stated in chosen)


def test_an_absent_peer_is_one_line_and_no_failure(tmp_path):
    done = sweep(tmp_path, plan_of(candidates()[:3], tokens=(20, 30)), peers="own")
    about = [note for note in done.progress.notes if "humming" in note]
    assert len(about) == 1 and "not installed" in about[0]


def test_ceilings_and_baseline_are_recorded_in_the_same_run(tmp_path):
    done = sweep(tmp_path, plan_of(candidates()[:3]))
    records = read_records(tmp_path).records
    assert Counter(r.implementation for r in records if r.kind == "ceiling") == {"copy": 2, "dense_bf16": 2}
    assert [r.implementation for r in records if r.kind == "baseline"] == ["torch_dequant_bf16"]
    assert {r.run_id for r in records} == {done.run_id}


def test_a_full_disk_stops_in_one_line_and_keeps_the_records(tmp_path, monkeypatch):
    calls = []
    real = os.fsync

    def fsync(fd):
        calls.append(fd)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match="free some space and run again with --resume"):
        sweep(tmp_path, plan_of(candidates()[:20]))
    monkeypatch.undo()
    kept = ours(tmp_path)
    assert kept and read_records(tmp_path).notices == []
    assert (read_manifest(tmp_path)["complete"], read_manifest(tmp_path)["partial"]) == (False, True)
    sweep(tmp_path, plan_of(candidates()[:20]), resume=True)
    assert len(ours(tmp_path)) == 20


def test_a_process_that_cannot_start_is_one_line(tmp_path):
    broken = settings()
    broken = replace(broken, worker=replace(broken.worker, bench="fake_bench:NoSuchBench"))
    with pytest.raises(UserError, match="cannot measure here: AttributeError"):
        from chord_lab.sweeps.run import run

        run(plan_of(candidates()[:3]), LiveMeasure(broken), tmp_path)


def test_ctrl_c_keeps_what_was_measured_and_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(HERE / "run_fake_sweep.py"), str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not (tmp_path.exists() and ours(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    before = len(ours(tmp_path))
    assert before and read_records(tmp_path).notices == []
    assert read_manifest(tmp_path)["partial"] is True
    run_until([sys.executable, str(HERE / "run_fake_sweep.py"), str(tmp_path), "--resume"], 60)
    assert len({r.key() for r in ours(tmp_path)}) == 36

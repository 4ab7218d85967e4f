from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.measurement.child import ChildFailure
from chord_lab.measurement.compile_ahead import CompileAhead

PROBLEM = MoeProblem(num_experts=4, N=256, K=512, top_k=2)
HERE = pathlib.Path(__file__).parent


def schedule(num_stages=3, **over):
    values = {"kernel": "portable", "block_m": 16, "block_n": 64, "block_k": 64, "num_warps": 4, "swap_ab": True}
    return Schedule(**{**values, "num_stages": num_stages, **over})


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("W4A16_MOE_COMPILE_CACHE", str(tmp_path / "facts"))
    return tmp_path


def compile_all(jobs, **settings):
    pool = CompileAhead(90, jobs=1, **settings)
    try:
        pool.submit(jobs)
        return [pool.result(job).result(120) for job in jobs]
    finally:
        pool.close()


def test_a_launch_reuses_what_was_compiled_ahead(caches):
    """The launch's own path through Triton, with a driver that has no device, finds the kernel in the cache."""
    (facts,) = compile_all([(schedule(), PROBLEM, "indexed")])
    assert facts["registers"] > 16 and facts["smem_bytes"] > 0 and not facts["from_cache"]
    command = [sys.executable, str(HERE / "launch_without_gpu.py"), json.dumps(schedule().to_dict())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.strip() == "1 []"


def test_nothing_is_compiled_twice(caches):
    jobs = [(schedule(), PROBLEM, "indexed")]
    (first,) = compile_all(jobs)
    (second,) = compile_all(jobs)
    assert not first["from_cache"] and second["from_cache"]
    assert {k: v for k, v in first.items() if k not in ("from_cache", "seconds")} == {
        k: v for k, v in second.items() if k not in ("from_cache", "seconds")
    }


def test_a_job_is_submitted_once():
    pool = CompileAhead(90, jobs=1, server="fake_bench:FakeCompiler")
    pool.submit([(schedule(), PROBLEM, "indexed")] * 3)
    pool.submit([(schedule(), PROBLEM, "indexed")], priority=1)
    assert pool.result((schedule(), PROBLEM, "indexed")).result(30)["registers"] == 100
    assert pool.num_pending() == 0
    pool.close()


def test_a_compiler_that_dies_costs_its_schedule_alone():
    pool = CompileAhead(90, jobs=1, server="fake_bench:FakeCompiler")
    jobs = [(schedule(stages), PROBLEM, "indexed") for stages in (2, 109, 3, 107)]
    pool.submit(jobs)
    assert pool.result(jobs[0]).result(30) and pool.result(jobs[2]).result(30)
    died, refused = pool.result(jobs[1]).exception(30), pool.result(jobs[3]).exception(30)
    assert isinstance(died, ChildFailure) and died.status == "compile_error" and "SIGSEGV" in died.reason
    assert isinstance(refused, ChildFailure) and refused.status == "out_of_resources"
    pool.close()


def test_a_compiler_that_cannot_be_started_is_an_answer(monkeypatch):
    """Else the sweep would wait for it for ever."""

    def refused(*arguments, **settings):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("chord_lab.measurement.compile_ahead.Child", refused)
    with pytest.raises(BlockingIOError):
        compile_all([(schedule(), PROBLEM, "indexed")])

"""Compilation in worker processes on all cores, while the GPU measures; the measuring process reuses the results.

Both go through Triton's own cache on disk, so nothing is compiled twice, in this run or a later one.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.measurement.child import Child, ChildFailure
from chord_lab.measurement.cores import compilers

SERVER = "chord_lab.measurement.compile_ahead:CompileServer"
Job = tuple[Schedule, MoeProblem, str]  # and the interface


class CompileServer:
    """Commands of a compiling process; needs no GPU."""

    def __init__(self) -> None:
        if hasattr(os, "nice"):
            os.nice(10)  # the measuring process must not wait for a core

    def compile(
        self, schedule: dict[str, Any], problem: dict[str, Any], capability: int, interface: str
    ) -> dict[str, Any]:
        """Facts of one schedule: registers, smem_bytes, spill_bytes, seconds, from_cache."""
        from w4a16_moe.families import kernel_module
        from w4a16_moe.offline import compile_facts, compile_kernel

        made, solved = Schedule.from_dict(schedule), MoeProblem(**problem)
        special = getattr(kernel_module(made.kernel), f"compile_spec_{interface.removeprefix('grouped_')}", None)
        if special is not None:  # another kernel serves this interface; of it, Triton's own facts are known
            kernel = compile_kernel(special(made, solved), capability)
            return {"smem_bytes": int(kernel.metadata.shared), "from_cache": False, "seconds": 0.0}
        top_k = (
            1 if interface.startswith("grouped") else solved.top_k
        )  # grouped rows have their activations beside them
        facts = compile_facts(made, solved, capability, top_k=top_k)
        if facts.from_cache:  # the facts outlive Triton's cache; the launch needs the kernel itself
            compile_kernel(kernel_module(made.kernel).compile_spec(made, solved, top_k), capability)
        return {
            "registers": facts.registers,
            "smem_bytes": facts.smem_bytes,
            "spill_bytes": facts.spills_bytes,
            "num_warps": facts.num_warps,
            "seconds": facts.seconds,
            "from_cache": facts.from_cache,
        }


class CompileAhead:
    """A pool of compiling processes. One that crashes or hangs costs its schedule alone."""

    def __init__(
        self,
        capability: int,
        *,
        jobs: int | None = None,
        server: str = SERVER,
        log: pathlib.Path | None = None,
        timeout_s: float = 120.0,
    ):
        self.capability = capability
        self.jobs = compilers(jobs)
        self._server = server
        self._log = log
        self._timeout_s = timeout_s
        self._queue: queue.PriorityQueue[tuple[int, int, Job | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._futures: dict[Job, Future[dict[str, Any]]] = {}
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._lock = threading.Lock()
        self._wake = threading.Event()  # set whenever some job ends

    def submit(self, jobs: Iterable[Job], priority: int = 0) -> None:
        """Compile these, lower priority values first; what is known or under way is not compiled again."""
        for job in jobs:
            with self._lock:
                if job in self._futures:
                    continue
                self._futures[job] = Future()
            self._queue.put((priority, next(self._order), job))
            self._start_thread()

    def result(self, job: Job) -> Future[dict[str, Any]]:
        """The facts of a submitted job, or its `ChildFailure`."""
        return self._futures[job]

    def wait_any(self, timeout_s: float) -> None:
        """Sleep until some job ends, at most so long."""
        self._wake.wait(timeout_s)
        self._wake.clear()

    def num_pending(self) -> int:
        """Jobs that have not ended."""
        return sum(not future.done() for future in self._futures.values())

    def close(self) -> None:
        """Stop after what is under way; jobs not begun are dropped."""
        self._stopping = True
        for _ in self._threads:
            self._queue.put((-1, next(self._order), None))
        for thread in self._threads:
            thread.join(self._timeout_s)

    def _start_thread(self) -> None:
        if len(self._threads) < min(self.jobs, len(self._futures)):
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        child: Child | None = None
        while not self._stopping:
            _, _, job = self._queue.get()
            if job is None:
                break
            child = self._one(child, job)
        if child is not None:
            child.close()

    def _one(self, child: Child | None, job: Job) -> Child | None:
        """Compile one; the child that did it, if it can do more. Whatever goes wrong is the job's answer."""
        schedule, problem, interface = job
        try:
            if child is None:
                child = Child(self._server, env={"CUDA_VISIBLE_DEVICES": ""}, log=self._log)
            facts = child.call(
                "compile",
                self._timeout_s,
                schedule=schedule.to_dict(),
                problem=problem.to_dict(),
                capability=self.capability,
                interface=interface,
            )
            self._futures[job].set_result(facts)
        except ChildFailure as failure:
            if failure.status in ("crashed", "launch_error", "timeout"):
                failure.status = "compile_error"
            self._futures[job].set_exception(failure)
            if failure.lost and child is not None:
                child.kill()
                child.close()
                return None
        except Exception as error:  # no process can be started, or it does not speak JSON
            self._futures[job].set_exception(error)
            if child is not None:
                child.kill()
                child.close()
            return None
        finally:
            self._wake.set()
        return child

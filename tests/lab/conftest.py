"""Made-up records: a small run on a card that does not exist, with times from a formula that the tests know."""

import math
import os
import pathlib
import sys

import pytest
from w4a16_moe.schedule import Schedule

from chord_lab.records import Environment, Method, Record, RoutingRef, to_frame
from chord_lab.routing import GENERATOR, draw_tok_e
from chord_lab.scenarios import get_scenario

COPY_GBPS, DENSE_TFLOPS, NUM_SMS = 4000.0, 700.0, 132


class MadeRun:
    """Builds records of one environment."""

    def __init__(self, **environment):
        values = {
            "device": "nvidia_h200",
            "device_name": "NVIDIA H200",
            "num_sms": NUM_SMS,
            "torch": "2.11",
            "triton": "3.6.0",
        }
        self.environment = Environment(**values | environment)
        self.source = "recorded"

    def schedule(self, block_m=64, **knobs):
        values = {"kernel": "wgmma", "block_m": block_m, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 4}
        return Schedule(**values | knobs)

    def routing(self, routed_m, draw="uniform", num_experts=48, top_k=8, seed=0):
        tokens = routed_m // top_k
        tok_e = draw_tok_e(draw, num_tokens=tokens, num_experts=num_experts, top_k=top_k, seed=seed)
        return RoutingRef(
            draw=draw, generator=GENERATOR, seed=seed, num_tokens=tokens, num_experts=num_experts, top_k=top_k,
            tok_e=tuple(tok_e.tolist()),
        )  # fmt: skip

    def record(self, time_us=None, *, routed_m=1024, projection="gate_up", schedule=None, draw="uniform", **changes):
        """One record; `time_us` a number (three equal rounds) or a list of round medians."""
        scenario = get_scenario("kimi-k2/ep8/prefill")
        times = (
            ()
            if time_us is None
            else tuple((t, t, t) for t in (time_us if isinstance(time_us, list) else [time_us] * 3))
        )
        problem = scenario.problem(projection) if projection else None
        values = {
            "run_id": "made", "date": "2026-11-29T12:00:00+00:00", "source": self.source, "scenario": scenario.name,
            "projection": projection, "profile": scenario.profile, "problem": problem,
            "schedule": schedule, "num_tokens": routed_m, "routed_m": routed_m, "routing": self.routing(routed_m, draw),
            "environment": self.environment, "method": Method(), "times_us": times, "rounds": tuple(range(len(times))),
        }  # fmt: skip
        return Record(**values | changes)

    def ceilings(self):
        """Copy and dense bf16 at the card's rates."""
        empty = {"problem": None, "routing": None, "projection": "", "routed_m": 0, "num_tokens": 0, "kind": "ceiling"}
        copy = self.record(1000.0, implementation="copy", work_bytes=int(COPY_GBPS * 1e6), **empty)
        dense = self.record(1000.0, implementation="dense_bf16", work_flops=int(DENSE_TFLOPS * 1e9), **empty)
        return [copy, dense]

    def modelled_us(self, routed_m, schedule, projection="gate_up", draw="uniform"):
        """The formula: whole waves of padded tiles, never under the memory floor."""
        problem = get_scenario("kimi-k2/ep8/prefill").problem(projection)
        routing = self.routing(routed_m, draw)
        padded = problem.flops(routing.num_tokens_padded(schedule.block_m)) / DENSE_TFLOPS / 1e6
        memory = problem.num_bytes(routed_m, routing.active_experts) / COPY_GBPS / 1e3
        return 5.0 + max(memory, padded) * (1 + 4 / schedule.block_m)

    def sweep(
        self, routed=(1024, 2048, 4096, 8192), blocks=(16, 32, 64, 128), projections=("gate_up", "down"), **knobs
    ):
        """Every block_m at every point, timed by the formula."""
        records = []
        for projection in projections:
            for routed_m in routed:
                for block_m in blocks:
                    schedule = self.schedule(block_m, **knobs)
                    time = self.modelled_us(routed_m, schedule, projection)
                    rounds = [time * (1 + 0.001 * i) for i in range(3)]
                    default = block_m == 64
                    records.append(
                        self.record(
                            rounds, routed_m=routed_m, projection=projection, schedule=schedule, default=default
                        )
                    )
        return records

    def peers(self, routed=(1024, 2048, 4096, 8192), factor=1.2, name="humming"):
        """A peer that takes `factor` times our block_m 64."""
        return [
            self.record(
                [self.modelled_us(m, self.schedule(64), p) * factor * (1 + 0.001 * i) for i in range(3)],
                routed_m=m, projection=p, kind="peer", implementation=name, config="tile 96x256x64",
                num_tokens_padded=math.ceil(m / 96) * 96,
            )
            for p in ("gate_up", "down")
            for m in routed
        ]  # fmt: skip


@pytest.fixture
def made():
    return MadeRun()


@pytest.fixture
def made_run():
    """The class itself, for another environment."""
    return MadeRun


@pytest.fixture
def made_frame(made):
    """A sweep of both projections with ceilings, a peer and one failure."""
    failed = made.record(schedule=made.schedule(256), status="compile_error", rule="ptxas", reason="too many registers")
    return to_frame([*made.sweep(), *made.peers(), *made.ceilings(), failed])


# Tests and their child processes find the fakes beside this file by name; nothing in the product knows them.
sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

"""Made captures for tests: stored traces with counters and identity, as `chord-lab profile` writes them."""

from __future__ import annotations

import json
from pathlib import Path

from w4a16_moe.schedule import Schedule

from chord_lab.records import Environment, Record
from chord_lab.records.attempt import Candidate, Point, record_of
from chord_lab.sweeps.points import scenario_points
from chord_lab.traces.counters import STALL_METRIC
from chord_lab.traces.join import with_identity
from chord_lab.traces.stored import STORED_SUFFIX, write_stored
from chord_lab.traces.table import NVTX_SEPARATOR, Trace, kernel_frame, metric_frame, nvtx_frame

ENVIRONMENT = Environment(device="nvidia_h200", device_name="NVIDIA H200", num_sms=132)
PERCENT = {
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "pipe_tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "pipe_alu_pct": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
STATIC = {"time_us": 216.0, "dram_pct": 75.0, "pipe_tensor_pct": 40.0, "pipe_alu_pct": 50.0, "stall_wait": 1.19}
SEMI_STATIC = {"time_us": 186.0, "dram_pct": 87.0, "pipe_tensor_pct": 29.0, "pipe_alu_pct": 38.0, "stall_wait": 0.77}
PREFILL = {"time_us": 480.0, "dram_pct": 40.0, "pipe_tensor_pct": 71.0, "pipe_alu_pct": 26.0, "stall_wait": 0.5}
STALLED = {"stall_long_scoreboard": 2.1, "stall_barrier": 0.8, "stall_selected": 1.0, "stall_misc": 0.0001}


def slicing(how, **knobs):
    values = {"kernel": "mma_sync", "block_m": 24, "block_n": 256, "block_k": 128, "num_warps": 8, "num_stages": 2}
    return Schedule(**values | {"ctas_per_sm": 2, "swap_ab": True, "token_slicing": how} | knobs)


def point(scenario="kimi-k2/ep8/decode", tokens=72, projection="gate_up") -> Point:
    (found,) = scenario_points(scenario, tokens=[tokens], projections=[projection])
    return found


def capture(attempts) -> Trace:
    """A trace of ``(point, schedule, figures)``: figures hold time_us, counters of PERCENT, and ``stall_*``."""
    names, times, paths, metrics, records = [], [], [], [], []
    for i, (where, schedule, figures) in enumerate(attempts):
        records.append(_record(where, schedule, figures["time_us"] * 1.02))
        names.append(f"{schedule.kernel}_kernel")
        times.append(figures["time_us"])
        paths.append(NVTX_SEPARATOR.join([where.scenario, schedule.label(), f"record {records[-1].key()}"]))
        values = {"dram__bytes_read.sum": where.num_bytes * 1.05, "dram__bytes_write.sum": 8e6}
        values |= {"gpc__cycles_elapsed.max": figures["time_us"] * 1700, "smsp__inst_executed.sum": 7.5e7}
        values |= {PERCENT[n]: v for n, v in figures.items() if n in PERCENT}
        values |= {
            STALL_METRIC.format(n.removeprefix("stall_")): v for n, v in figures.items() if n.startswith("stall_")
        }
        metrics += [(i, name, float(value), "", None) for name, value in values.items()]
    shapes = {"grid": ["396x1x1"] * len(names), "block": ["256x1x1"] * len(names)}
    trace = Trace(
        kind="ncu-csv-raw",
        path=Path("made"),
        device="NVIDIA H200",
        kernels=kernel_frame({"name": names, "time_us": times, "nvtx": paths, **shapes}),
        nvtx=nvtx_frame(),
        metrics=metric_frame(metrics),
        notes=("made for a test",),
        facts={"tool": "Nsight Compute", "version": "2025.3.1.0", "ceilings": {"copy": 4240.0, "dense_bf16": 700.0}},
    )
    return with_identity(trace, records)


def _record(where: Point, schedule: Schedule, time_us: float) -> Record:
    return record_of(
        where,
        Candidate(schedule=schedule),
        run_id="made",
        date="2026-11-29T12:00:00+00:00",
        environment=ENVIRONMENT,
        times_us=((time_us,) * 3,) * 3,
        rounds=(0, 1, 2),
    )


def write_captures(folder):
    """A folder like data/nsight/DEVICE: decode and prefill counters, a layer's timeline."""
    folder.mkdir(parents=True, exist_ok=True)
    decode, fewer, prefill = point(), point(tokens=50), point("kimi-k2/ep8/prefill", 4096)
    attempts = [(decode, slicing("static"), STATIC | STALLED), (decode, slicing("semi_static"), SEMI_STATIC | STALLED)]
    attempts += [(decode, slicing(how), SEMI_STATIC | STALLED | {"time_us": 190.0}) for how in ("dynamic", "branched")]
    for on in (False, True):
        knobs = {"block_m": 16, "num_warps": 4, "ctas_per_sm": 3, "stream_k": on, "persistent": on}
        attempts.append((fewer, slicing("branched", **knobs), SEMI_STATIC | STALLED | {"time_us": 202.0 - on}))
    write_stored(capture(attempts), folder / f"decode{STORED_SUFFIX}")
    wgmma = {"kernel": "wgmma", "block_k": 64, "num_stages": 5, "ctas_per_sm": 1, "persistent": True}
    sizes = ((32, 256, 700.0), (64, 256, 520.0), (128, 256, 480.0), (256, 128, 560.0))
    attempts = [
        (prefill, slicing("branched", block_m=m, block_n=n, **wgmma), PREFILL | STALLED | {"time_us": time})
        for m, n, time in sizes
    ]
    write_stored(capture(attempts), folder / f"prefill{STORED_SUFFIX}")
    write_layer(folder / "layer.pt.trace.json", decode, slicing("semi_static"))
    return folder


def write_layer(path, where: Point, schedule: Schedule, repeats: int = 3):
    """A PyTorch trace of a layer: routing, two GEMMs, an activation, each in its annotation."""
    key = Candidate(schedule=schedule).key_at(where)
    gemm, shape = "mma_sync_kernel", {"device": 0, "stream": 7, "grid": [132, 1, 1], "block": [256, 1, 1]}
    steps = [("routing", "align_kernel", 6.0), (f"gate_up {schedule.label()}", gemm, 190.0)]
    steps += [("SwiGLU", "elementwise", 4.0), ("down", gemm, 105.0)]
    events, clock, correlation = [], 0.0, 0

    def event(category, name, ts, dur, *, on_gpu=False, **args):
        place = {"pid": 0, "tid": 7} if on_gpu else {"pid": 9, "tid": 9}
        events.append({"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args, **place})

    for _ in range(repeats):
        began = clock
        for name, kernel, time in steps:
            correlation += 1
            event("cuda_runtime", "cuLaunchKernel", clock + 1, 1.0, correlation=correlation)
            event("kernel", kernel, clock + 3, time, on_gpu=True, correlation=correlation, **shape)
            event("user_annotation", name, clock + 0.2, time)
            if name.startswith("gate_up"):
                event("user_annotation", f"record {key}", clock + 0.4, time - 1)
            clock += time + 5
        event("user_annotation", where.scenario, began, clock - began)
    rows = capture([(where, schedule, SEMI_STATIC)]).identity
    devices = [{"id": 0, "name": "NVIDIA H200"}]
    path.write_text(json.dumps({"deviceProperties": devices, "chord_lab_records": rows, "traceEvents": events}))
    return path

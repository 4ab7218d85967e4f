"""Made captures for tests: stored traces with counters and identity, as `chord-lab profile` writes them."""

from __future__ import annotations

from pathlib import Path

from layer_capture import write_layers
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


def capture(attempts, default=False) -> Trace:
    """A trace of ``(point, schedule, figures)``: figures hold time_us, counters of PERCENT, and ``stall_*``."""
    names, times, paths, metrics, records = [], [], [], [], []
    for i, (where, schedule, figures) in enumerate(attempts):
        records.append(_record(where, schedule, figures["time_us"] * 1.02, default))
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


def _record(where: Point, schedule: Schedule, time_us: float, default: bool) -> Record:
    return record_of(
        where,
        Candidate(schedule=schedule, default=default),
        run_id="made",
        date="2026-11-29T12:00:00+00:00",
        environment=ENVIRONMENT,
        times_us=((time_us,) * 3,) * 3,
        rounds=(0, 1, 2),
    )


PARTS = ("decode", "prefill", "layer")  # as of benchmarks.record_nsight
DECODE_LAYER, PREFILL_LAYER = (186.0, 105.0), (480.0, 260.0)  # gate_up, down


def write_captures(folder, parts=PARTS):
    """A folder like data/nsight/DEVICE: decode and prefill counters, whole layers of both."""
    folder.mkdir(parents=True, exist_ok=True)
    decode, fewer, prefill = point(), point(tokens=50), point("kimi-k2/ep8/prefill", 4096)
    attempts = [(decode, slicing("static"), STATIC | STALLED), (decode, slicing("semi_static"), SEMI_STATIC | STALLED)]
    attempts += [(decode, slicing(how), SEMI_STATIC | STALLED | {"time_us": 190.0}) for how in ("dynamic", "branched")]
    for on in (False, True):
        knobs = {"block_m": 16, "num_warps": 4, "ctas_per_sm": 3, "stream_k": on, "persistent": on}
        attempts.append((fewer, slicing("branched", **knobs), SEMI_STATIC | STALLED | {"time_us": 202.0 - on}))
    if "decode" in parts:
        write_stored(capture(attempts), folder / f"decode{STORED_SUFFIX}")
    sizes = ((32, 256, 700.0), (64, 256, 520.0), (96, 256, 500.0), (128, 256, 480.0), (192, 128, 560.0))
    attempts = [(prefill, wgmma(m, n), PREFILL | STALLED | {"time_us": time}) for m, n, time in sizes]
    if "prefill" in parts:
        write_stored(capture(attempts), folder / f"prefill{STORED_SUFFIX}")
    if "layer" in parts:
        layers = [(*both("kimi-k2/ep8/decode", 50), slicing("semi_static"), *DECODE_LAYER)]
        layers += [(*both("kimi-k2/ep8/prefill", 4096), wgmma(128, 256), *PREFILL_LAYER)]
        attempts = [(where, schedule, SEMI_STATIC) for *points, schedule, _, _ in layers for where in points]
        write_layers(folder / "layer.pt.trace.json.gz", layers, list(capture(attempts, default=True).identity))
    return folder


def wgmma(block_m, block_n) -> Schedule:
    knobs = {"kernel": "wgmma", "block_k": 64, "num_stages": 5, "ctas_per_sm": 1, "persistent": True}
    return slicing("branched", block_m=block_m, block_n=block_n, **knobs)


def both(scenario, tokens):
    """gate_up and down of a layer."""
    return [point(scenario, tokens, projection) for projection in ("gate_up", "down")]

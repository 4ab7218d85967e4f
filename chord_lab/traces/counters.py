"""The counters that matter, under one name whatever the tool's version calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

    from chord_lab.traces.table import Trace


class Counter(NamedTuple):
    """One figure of a kernel: where to find it, in order of preference."""

    name: str  # column name: its unit is in it
    label: str  # for an axis
    metrics: tuple[str, ...]  # raw page and reports
    details: tuple[tuple[str, str], ...] = ()  # details page: (metric name, base unit), because names repeat
    scale: float = 1.0  # from base units


def _pipe(name: str, label: str, *pipes: str, by_instructions: bool = False) -> Counter:
    """Cycles in which a pipe was busy; instructions for pipes of which Hopper counts no cycles."""
    cycles = [f"sm__pipe_{pipe}_cycles_active.avg.pct_of_peak_sustained_active" for pipe in pipes]
    instructions = [f"sm__inst_executed_pipe_{pipe}.avg.pct_of_peak_sustained_active" for pipe in pipes]
    spelled = [*instructions, *cycles] if by_instructions else [*cycles, *instructions]
    return Counter(f"pipe_{name}_pct", label, tuple(spelled))


COUNTERS: tuple[Counter, ...] = (
    Counter(
        "dram_pct",
        "DRAM use, % of peak",
        (
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__cycles_active.avg.pct_of_peak_sustained_elapsed",
        ),
        (("DRAM Throughput", "%"),),
    ),
    Counter(
        "dram_gbps",
        "DRAM traffic, GB/s",
        ("dram__bytes.sum.per_second",),
        (("Memory Throughput (byte/s)", "byte/s"), ("Memory Throughput", "byte/s")),
        1e-9,
    ),
    Counter("dram_read_bytes", "DRAM bytes read", ("dram__bytes_read.sum", "dram__bytes_op_read.sum")),
    Counter("dram_write_bytes", "DRAM bytes written", ("dram__bytes_write.sum", "dram__bytes_op_write.sum")),
    Counter(
        "l2_pct",
        "L2 use, % of peak",
        ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
        (("L2 Cache Throughput", "%"),),
    ),
    Counter("l2_hit_pct", "L2 hits, %", ("lts__t_sector_hit_rate.pct",), (("L2 Hit Rate", "%"),)),
    Counter(
        "sm_pct",
        "SM use, % of peak",
        ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
        (("Compute (SM) Throughput", "%"), ("SM [%]", "%")),
    ),
    Counter(
        "cycles",
        "elapsed cycles",
        ("gpc__cycles_elapsed.max", "sm__cycles_elapsed.max", "sm__cycles_elapsed.avg"),
        (("Elapsed Cycles", "cycle"),),
    ),
    Counter(
        "sm_ghz",
        "SM clock, GHz",
        ("gpc__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second"),
        (("SM Frequency", "hz"),),
        1e-9,
    ),
    Counter(
        "instructions",
        "warp instructions executed",
        ("smsp__inst_executed.sum", "sm__inst_executed.sum", "inst_executed"),
        (("Executed Instructions", "inst"),),
    ),
    Counter(
        "issue_pct",
        "issue slots in use, %",
        ("smsp__issue_active.avg.pct_of_peak_sustained_active", "smsp__issue_active.avg.per_cycle_active.pct"),
        (("Issue Slots Busy", "%"),),
    ),
    Counter(
        "occupancy_pct",
        "warps resident, % of the SM's",
        ("sm__warps_active.avg.pct_of_peak_sustained_active",),
        (("Achieved Occupancy", "%"),),
    ),
    Counter(
        "occupancy_limit_pct",
        "warps that could be resident, %",
        ("sm__maximum_warps_per_active_cycle_pct",),
        (("Theoretical Occupancy", "%"),),
    ),
    Counter("waves", "waves of CTAs", ("launch__waves_per_multiprocessor",), (("Waves Per SM", ""),)),
    Counter(
        "spill_requests",
        "local memory spill requests",
        ("derived__local_spilling_requests",),
        (("Local Memory Spilling Requests", ""),),
    ),
    Counter("bank_conflicts", "shared memory bank conflicts", ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",)),
    _pipe("tensor", "tensor cores", "tensor", "tensor_op_hmma", "tensor_op_gmma"),
    _pipe("alu", "integer and logic", "alu"),
    _pipe("fma", "fp32 multiply-add", "fma", "fmaheavy"),
    _pipe("fp16", "fp16 and bf16 pairs", "fma_type_fp16", "fp16", by_instructions=True),
    _pipe("lsu", "loads and stores", "lsu", by_instructions=True),
    _pipe("uniform", "uniform datapath", "uniform", by_instructions=True),
    _pipe("tma", "tensor memory accelerator", "tma"),
    _pipe("xu", "conversions and special functions", "xu", by_instructions=True),
)

# Why the warps that were resident did not issue: warps waiting per issue, by reason
STALL_METRIC = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALL_DETAIL = "Stall {}"
STALLS: dict[str, str] = {
    "long_scoreboard": "data from global or local memory",
    "wait": "a fixed number of cycles after the last instruction",
    "barrier": "other warps of the CTA at a barrier",
    "math_pipe_throttle": "a busy arithmetic pipe",
    "short_scoreboard": "data from shared memory or a slow unit",
    "mio_throttle": "a full queue to shared memory and special units",
    "lg_throttle": "a full queue to global memory",
    "gmma": "a warp-group matrix multiply",
    "tex_throttle": "a full texture queue",
    "dispatch_stall": "the dispatcher",
    "not_selected": "nothing: another warp was chosen",
    "selected": "nothing: it issues",
    "branch_resolving": "a branch target",
    "no_instruction": "instructions to be fetched",
    "imc_miss": "a constant to be fetched",
    "membar": "a memory barrier",
    "drain": "its last stores",
    "sleeping": "its own sleep",
    "misc": "something else",
}
# What a counter says, for people who meet it the first time
MEANINGS: dict[str, str] = {
    "dram_pct": "bytes that DRAM moved, of the most it could in that time; above 80 the kernel is bound by memory",
    "l2_pct": "the busiest part of the L2 cache, of the most it could do",
    "l2_hit_pct": "requests to L2 that were answered there; low when every byte is read once, as weights are",
    "issue_pct": "cycles in which a scheduler found a warp that could go on; the others are the stalls",
    "occupancy_pct": "warps that were resident, of the 64 that an SM can hold; few need long loads in flight",
    "occupancy_limit_pct": "the most that registers, shared memory and the CTA's size allow",
    "waves": "CTAs of the grid over CTAs that run at once; just above a whole number leaves SMs idle at the end",
    "cycles": "clock cycles from first to last",
    "instructions": "instructions of all warps; one counts once for its 32 threads",
    "pipe_tensor_pct": "cycles in which the tensor cores multiplied; near 100 the kernel is bound by arithmetic",
    "pipe_alu_pct": "integer and bit operations: unpacking of 4-bit codes, addresses",
    "pipe_fma_pct": "multiply-adds outside the tensor cores",
    "pipe_fp16_pct": "pairs of 16-bit multiply-adds: scaling of dequantised weights",
    "pipe_lsu_pct": "loads and stores, of shared memory too",
    "pipe_uniform_pct": "instructions done once for a whole warp",
    "pipe_xu_pct": "conversions, exponentials and the like",
}
_BY_NAME = {c.name: c for c in COUNTERS}


def counter(name: str) -> Counter:
    """The counter of that name. Raises KeyError for one that is not in COUNTERS."""
    return _BY_NAME[name]


def counter_frame(trace: Trace) -> pd.DataFrame:
    """A row a kernel of ``trace.kernels``, a column a counter, NaN where not collected; stalls as ``stall_*``."""
    import pandas as pd

    numbers = trace.metrics[trace.metrics["text"].isna()]
    names = numbers["metric"].astype(str)
    units = numbers["unit"].astype(str)
    values: dict[tuple[int, str, str], float] = {
        (k, m, u): v for k, m, u, v in zip(numbers["kernel"], names, units, numbers["value"], strict=True)
    }
    by_metric = {(k, m): v for (k, m, _), v in values.items()}
    columns: dict[str, list[float]] = {}
    rows = range(len(trace.kernels))
    for item in COUNTERS:
        columns[item.name] = [_value(item, row, by_metric, values) for row in rows]
    for stall in STALLS:
        detail = STALL_DETAIL.format(stall.replace("_", " ").title())
        columns[f"stall_{stall}"] = [
            by_metric.get((row, STALL_METRIC.format(stall)), by_metric.get((row, detail), float("nan"))) for row in rows
        ]
    return pd.DataFrame(columns, index=trace.kernels.index)


def _value(
    item: Counter, row: int, by_metric: dict[tuple[int, str], float], values: dict[tuple[int, str, str], float]
) -> float:
    for metric in item.metrics:
        if (row, metric) in by_metric:
            return by_metric[row, metric] * item.scale
    for detail, unit in item.details:
        if (row, detail, unit) in values:
            return values[row, detail, unit] * item.scale
    return float("nan")


def glossary() -> pd.DataFrame:
    """Every counter and stall reason that the figures show, and what it means."""
    import pandas as pd

    rows = {counter(name).label: meaning for name, meaning in MEANINGS.items()}
    rows |= {f"stall: {name.replace('_', ' ')}": f"the warp waits for {reason}" for name, reason in STALLS.items()}
    return pd.DataFrame({"meaning": rows.values()}, index=pd.Index(rows, name="counter"))


def missing_counters(frame: pd.DataFrame) -> list[str]:
    """Counters that no kernel has."""
    return [str(c) for c in frame.columns if frame[c].isna().all()]

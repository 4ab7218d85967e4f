"""Record the worked examples of the Nsight notebooks: ``python -m benchmarks.record_nsight`` on a machine with a GPU.

Writes into data/nsight/DEVICE: for ``decode`` and ``prefill`` a report, its table with the records' identity, the
event-timed records; and a PyTorch profiler trace of a whole layer. Takes about two minutes on an H200.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from chord_lab.cli.measuring import visible_gpus
from chord_lab.cli.profile import point_rows
from chord_lab.cli.profiling import Profiled, chosen_collector, chosen_jobs, run_profile
from chord_lab.errors import UserError
from chord_lab.traces.stored import STORED_SUFFIX

PARTS = ("decode", "prefill", "layer")
REPORT_LIMIT = 6_000_000  # bytes of all reports together: what the repository carries
SLICING_TOKENS, STREAM_TOKENS, PREFILL_TOKENS = 72, 50, 4096
SLICING = [f"mma_sync 24x256x128 w8 s2 c2 swap{how}" for how in ("", " semi_static", " dynamic", " branched")]
STREAM_K = [
    "default",
    "mma_sync 16x256x128 w4 s2 c3 swap branched",
    "mma_sync 16x256x128 w4 s2 c3 swap stream_k persistent branched",
]
BLOCK_M = [  # schedules that the shipped sweep measured at these points
    f"wgmma {tile} swap persistent queue branched"
    for tile in ("64x256x64 w8 s6", "96x256x64 w8 s6", "112x256x64 w8 s6", "128x256x64 w8 s6", "192x128x64 w8 s5")
]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder; data/nsight/DEVICE when not given")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--metrics", default="lab", help="lab, full, or ncu metrics by name")
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        out = arguments.out or Path("data/nsight") / device_folder()
        out.mkdir(parents=True, exist_ok=True)
        for name in arguments.only:
            if name == "layer":
                layer(out / "layer.pt.trace.json.gz")
            else:
                show(group(name, out, arguments.metrics))
            print(f"{name}: {time.monotonic() - began:.0f} s since the start", flush=True)
    except UserError as error:
        print(f"record_nsight: {error}", file=sys.stderr)
        return 2
    return sizes(out)


def device_folder() -> str:
    """The slug of the GPU at hand."""
    from w4a16_moe.devices import device_slug

    from chord_lab.measurement.nvml import Nvml

    gpus = visible_gpus()
    if not gpus:
        raise UserError("needs a CUDA GPU and none is visible (`chord-lab doctor` says why)")
    return device_slug(Nvml.of_visible(gpus[0]).name() or "unknown")


def group(name: str, out: Path, metrics: str) -> Profiled:
    """Counters and event times of one group of schedules, all captures of it in one report."""
    if name == "decode":
        jobs = chosen_jobs("kimi-k2/ep8/decode", SLICING, tokens=SLICING_TOKENS)
        jobs += chosen_jobs("kimi-k2/ep8/decode", STREAM_K, tokens=STREAM_TOKENS)
    else:
        jobs = chosen_jobs("kimi-k2/ep8/prefill", BLOCK_M, tokens=PREFILL_TOKENS)
    done = run_profile(jobs, out, collector=chosen_collector("ncu"), metrics=metrics, name=name)
    # what is replayed from data/ is found by the suffix .parquet: these records belong to the captures alone
    (out / f"{name}.records.parquet").replace(out / f"{name}.records{STORED_SUFFIX}")
    return done


def layer(path: Path) -> None:
    """One layer of each phase under the PyTorch profiler."""
    from chord_lab.measurement.layer_trace import trace_layers
    from chord_lab.sweeps.points import scenario_points

    pairs = []
    for scenario, tokens in (("kimi-k2/ep8/decode", STREAM_TOKENS), ("kimi-k2/ep8/prefill", PREFILL_TOKENS)):
        gate_up, down = scenario_points(scenario, tokens=[tokens])
        pairs.append((gate_up, down))
    trace_layers(pairs, path)


def show(done: Profiled) -> None:
    """The figures that must agree, a line a schedule."""
    for row in point_rows(done):
        print(
            f"{row['projection']} {row['routed_m']:>5} rows  {row['schedule']:<62} {row['status']:<5} "
            f"events {row['time_us'] or float('nan'):7.1f} us  ncu {row['profiled_us']:7.1f} us "
            f"({row['profiled_over_time']:.3f})  DRAM {row['dram_pct']:5.1f} %  "
            f"tensor {row['pipe_tensor_pct']:5.1f} %  stall wait {row['stall_wait']:.2f}",
            flush=True,
        )


def sizes(out: Path) -> int:
    """What was written; 1 when the reports are too large to be shipped."""
    files = sorted(p for p in out.iterdir() if p.is_file())
    for file in files:
        print(f"{file.stat().st_size:>9,} {file}")
    reports = sum(p.stat().st_size for p in files if p.suffix == ".ncu-rep")
    print(f"reports together: {reports:,} bytes (limit {REPORT_LIMIT:,})")
    return 1 if reports > REPORT_LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())

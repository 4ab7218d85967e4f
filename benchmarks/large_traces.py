"""`chord-lab trace` on files as large as promised: 10 million kernels in SQLite, 1 GB of profiler JSON (made; no GPU).

    python -m benchmarks.large_traces --out runs/large_traces

Asked for: the SQLite file in at most 60 s and 4 GB; the JSON as a stream, so in memory that its events do not fill.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

KERNELS, JSON_BYTES = 10_000_000, 1_000_000_000
KERNELS_A_RANGE, STREAMS, NAMES = 100, 4, 60
PID = 4242 << 24

TABLES = """
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
    streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER,
    registersPerThread INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER,
    blockZ INTEGER, staticSharedMemory INTEGER, dynamicSharedMemory INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER,
    textId INTEGER, domainId INTEGER);
"""
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {count}) "
ROWS = (
    # a kernel every 5 us, its launch 20 us earlier, a range around every hundred launches
    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL {numbers} SELECT 20000 + i * 5000, 22000 + i * 5000 + i % 977, i % 8, 1, "
    "7 + i % {streams}, i + 1, {pid}, 100 + i % {names}, 100 + i % {names}, 32 + i % 5 * 8, 1 + i % 400, 1, 1, "
    "128, 1, 1, 1024, i % 3 * 16384 FROM n",
    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME {numbers} SELECT i * 5000, i * 5000 + 900, 0, {pid} + 1 + i % 8, i + 1, "
    "99, 0 FROM n",
    "INSERT INTO NVTX_EVENTS {ranges} SELECT i * 5000 * {a_range}, (i + 1) * 5000 * {a_range} - 1, 59, NULL, "
    "{pid} + 1, 1 + i % 20, 0 FROM n",
)


def make_sqlite(path: Path, count: int) -> None:
    """An Nsight Systems export of ``count`` kernels, as many launches, and a hundredth as many NVTX ranges."""
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = OFF")
    database.executescript(TABLES)
    database.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.25.0')")
    database.executemany("INSERT INTO TARGET_INFO_GPU VALUES (?, 'NVIDIA H200')", [(i,) for i in range(8)])
    texts = [(1 + i, f"step {i}") for i in range(20)] + [(100 + i, f"kernel_{i}<bf16, int4>") for i in range(NAMES)]
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", texts)
    values = {
        "numbers": NUMBERS.format(count=count),
        "ranges": NUMBERS.format(count=count // KERNELS_A_RANGE),
        "streams": STREAMS,
        "pid": PID,
        "names": NAMES,
        "a_range": KERNELS_A_RANGE,
    }
    for statement in ROWS:
        database.execute(statement.format(**values))
    database.commit()
    database.close()


def make_json(path: Path, size: int) -> None:
    """A PyTorch profile of ``size`` bytes: operators, launches and kernels, one of each every 5 us."""
    with open(path, "w", encoding="utf-8") as out:
        out.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": [\n')
        out.write(
            json.dumps({"ph": "X", "cat": "user_annotation", "name": "step", "pid": 9, "tid": 9, "ts": 0, "dur": 9})
        )
        number = 0
        while out.tell() < size:
            out.writelines(_events(i) for i in range(number, number + 10_000))
            number += 10_000
        out.write("\n]}\n")


def _events(i: int) -> str:
    ts = i * 5.0
    return (
        f',\n{{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 9, "ts": {ts}, "dur": 4.5, "args": '
        f'{{"External id": {i}, "Input Dims": [[64, 7168], [7168, 4096]], "Input type": ["bf16", "bf16"]}}}}'
        f',\n{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": {ts + 1}, '
        f'"dur": 2.25, "args": {{"External id": {i}, "cbid": 211, "correlation": {i + 1}}}}}'
        f',\n{{"ph": "X", "cat": "kernel", "name": "kernel_{i % NAMES}<bf16, int4>", "pid": 0, "tid": 7, '
        f'"ts": {ts + 20}, "dur": {2 + i % 977 / 1000}, "args": {{"External id": {i}, "device": 0, "context": 1, '
        f'"stream": 7, "correlation": {i + 1}, "registers per thread": {32 + i % 5 * 8}, "shared memory": 16384, '
        f'"grid": [{1 + i % 400}, 1, 1], "block": [128, 1, 1]}}}}'
    )


def measure(path: Path) -> tuple[float, float, float]:
    """Seconds by the clock and of CPU, and peak GB, of the command that a person would run."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "chord_lab", "trace", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        sys.exit(f"{path}: chord-lab trace ended with {os.waitstatus_to_exitcode(status)}")
    peak_gb = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    return seconds, usage.ru_utime + usage.ru_stime, peak_gb


def main() -> None:
    """Make each file, measure, remove it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/large_traces"), help="needs 2 GB of room")
    parser.add_argument("--kernels", type=int, default=KERNELS)
    parser.add_argument("--json-bytes", type=int, default=JSON_BYTES)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, make, size in (
        ("kernels.sqlite", make_sqlite, options.kernels),
        ("profile.json", make_json, options.json_bytes),
    ):
        path = options.out / name
        try:
            make(path, size)
            num_bytes = path.stat().st_size
            seconds, cpu, peak_gb = measure(path)
        finally:
            path.unlink(missing_ok=True)
        times = f"read in {seconds:.1f} s ({cpu:.1f} s of CPU)"
        print(f"{name:<15} {num_bytes / 1e9:.2f} GB {times}, at most {peak_gb:.2f} GB of memory", flush=True)


if __name__ == "__main__":
    main()

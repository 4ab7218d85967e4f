"""Records: what was measured, where, how, and what failed. No GPU, no torch."""

from chord_lab.records.frames import read_frame, to_frame
from chord_lab.records.journal import Journal, ReadResult, lock, new_run_id, now, read_journal
from chord_lab.records.parquet import arrow_schema, read_records, read_tables, to_table, write_parquet
from chord_lab.records.record import CompileFacts, Environment, Method, Record, RoutingRef, candidate_key, plain
from chord_lab.records.rows import from_row, schedule_of, to_row
from chord_lab.records.statistics import (
    bandwidth_gbps,
    flops,
    is_too_short,
    median_us,
    num_bytes,
    round_medians_us,
    spread,
    tflops,
)

__all__ = [
    "CompileFacts",
    "Environment",
    "Journal",
    "Method",
    "ReadResult",
    "Record",
    "RoutingRef",
    "arrow_schema",
    "bandwidth_gbps",
    "candidate_key",
    "flops",
    "from_row",
    "is_too_short",
    "lock",
    "median_us",
    "new_run_id",
    "now",
    "num_bytes",
    "plain",
    "read_frame",
    "read_journal",
    "read_records",
    "read_tables",
    "round_medians_us",
    "schedule_of",
    "spread",
    "tflops",
    "to_frame",
    "to_row",
    "to_table",
    "write_parquet",
]

"""This project's own Parquet form of a trace: read anywhere, with no NVIDIA package, one file a capture.

A row a kernel: KERNEL_COLUMNS, all metrics as a list, and the identity of the record that the kernel belongs to.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chord_lab.errors import UserError
from chord_lab.traces.table import KERNEL_COLUMNS, Trace, kernel_frame, metric_frame, nvtx_frame

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
STORED_SUFFIX = ".pq"  # not .parquet: folders of records are read by that suffix
METADATA_KEY = b"chord_lab.trace"


def write_stored(trace: Trace, path: Path) -> None:
    """Write the file whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = trace.kernels.astype({c: object for c, t in KERNEL_COLUMNS.items() if t == "category"})
    words = {c: pa.field(c, pa.string()) for c, t in KERNEL_COLUMNS.items() if t == "category"}
    schema = pa.schema([words.get(f.name, f) for f in pa.Schema.from_pandas(plain, preserve_index=False)])
    table = pa.Table.from_pandas(plain, schema, preserve_index=False)
    table = table.append_column("metrics", _metric_lists(trace))
    identity = [json.dumps(i) if i else None for i in trace.identity]
    table = table.append_column(
        "identity", pa.array(identity, pa.string()) if identity else pa.nulls(len(plain), pa.string())
    )
    about = {"format": FORMAT, "kind": trace.kind, "device": trace.device, "notes": trace.notes, "facts": trace.facts}
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(about).encode()})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)


def _metric_lists(trace: Trace) -> pa.Array:
    import pyarrow as pa

    fields = [("metric", pa.string()), ("value", pa.float64()), ("unit", pa.string()), ("text", pa.string())]
    kind = pa.list_(pa.struct(fields))
    rows = trace.metrics
    if not len(rows):
        return pa.nulls(len(trace.kernels), kind)
    metrics: list[list[dict[str, Any]]] = [[] for _ in range(len(trace.kernels))]
    names, units = rows["metric"].astype(str), rows["unit"].astype(str)
    for kernel, *values in zip(rows["kernel"], names, rows["value"], units, rows["text"], strict=True):
        metrics[kernel].append(dict(zip(("metric", "value", "unit", "text"), values, strict=True)))
    return pa.array(metrics, kind)


def read_stored(path: Path) -> Trace:
    """The inverse of `write_stored`. Raises UserError for any other Parquet file, by its columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        metadata = file.schema_arrow.metadata or {}
        about = json.loads(metadata[METADATA_KEY]) if METADATA_KEY in metadata else None
        if about is None:
            columns = ", ".join(file.schema_arrow.names[:5])
            raise UserError(f"{path}: a Parquet file, but not a stored trace (its columns: {columns})")
        if about.get("format") != FORMAT:
            raise UserError(f"{path}: stored trace of format {about.get('format')}; this version reads format {FORMAT}")
        return _trace(path, about, file.read())
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: damaged or cut-off Parquet file ({reason})") from None


def _trace(path: Path, about: dict[str, Any], table: pa.Table) -> Trace:
    import pandas as pd
    import pyarrow as pa

    integers = {pa.int16(): pd.Int16Dtype(), pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype()}
    frame = table.select(list(KERNEL_COLUMNS)).to_pandas(types_mapper=integers.get)
    rows = [
        (kernel, m["metric"], m["value"], m["unit"], m["text"])
        for kernel, metrics in enumerate(table.column("metrics").to_pylist())
        for m in metrics or ()
    ]
    identity = [json.loads(text) if text else None for text in table.column("identity").to_pylist()]
    return Trace(
        kind=about["kind"],
        path=path,
        device=about["device"],
        kernels=kernel_frame({name: frame[name] for name in KERNEL_COLUMNS}),
        nvtx=nvtx_frame(),
        metrics=metric_frame(rows),
        notes=tuple(about["notes"]),
        facts=about["facts"],
        identity=tuple(identity) if any(identity) else (),
    )

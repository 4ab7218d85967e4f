"""Parquet for what ships in data/, and columnar reading of many files at once."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

from chord_lab.errors import UserError
from chord_lab.records.journal import JOURNAL_GLOB, ReadResult, read_journal
from chord_lab.records.record import CompileFacts, Environment, Method, Record
from chord_lab.records.rows import OWN_COLUMNS, ROUTING_COLUMNS, from_row, to_row

if TYPE_CHECKING:
    import pyarrow as pa


def arrow_schema() -> pa.Schema:
    """Column names and types of a records file; strings are dictionary-encoded, because most repeat."""
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    special = {
        "times_us": pa.list_(pa.list_(pa.float32())),
        "rounds": pa.list_(pa.int32()),
        "sm_mhz": pa.list_(pa.float32()),
        "power_w": pa.list_(pa.float32()),
    }
    columns: dict[str, Any] = {"format": pa.int16()}
    hints = get_type_hints(Record)
    for name in OWN_COLUMNS:
        columns[name] = special.get(name) or _arrow_type(hints[name], word)
    for part in (MoeProblem, Schedule, Environment, Method, CompileFacts):
        for name, hint in get_type_hints(part).items():
            columns[name] = _arrow_type(hint, word)
    for column in ROUTING_COLUMNS.values():
        columns[column] = word if column in ("draw", "generator") else pa.int32()
    columns["tok_e"] = pa.list_(pa.int32())
    for name in ("seed", "work_bytes", "work_flops", "peak_memory_bytes"):
        columns[name] = pa.int64()
    return pa.schema(list(columns.items()))


def _arrow_type(hint: Any, word: Any) -> Any:
    import pyarrow as pa

    options = [hint, *get_args(hint)]
    for python, arrow in ((bool, pa.bool_()), (int, pa.int32()), (float, pa.float32())):
        if python in options:
            return arrow
    return word


def to_table(records: Iterable[Record]) -> pa.Table:
    """Records as an Arrow table of `arrow_schema`."""
    import pyarrow as pa

    return pa.Table.from_pylist([to_row(record) for record in records], schema=arrow_schema())


def write_parquet(table_or_records: pa.Table | Iterable[Record], path: pathlib.Path, level: int = 15) -> pathlib.Path:
    """Write zstd Parquet to a temporary name, then rename."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = table_or_records if isinstance(table_or_records, pa.Table) else to_table(table_or_records)
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            pq.write_table(table, file, compression="zstd", compression_level=level)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or ' '.join(str(error).split())}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


# Without one of these a file holds no records; any other column that an older file lacks is null.
ESSENTIAL = (
    "run_id", "date", "kind", "status", "source", "scenario", "projection", "profile", "num_experts", "N", "K",
    "group_size", "top_k", "num_tokens", "routed_m", "draw", "tok_e", "kernel", "block_m", "block_n", "block_k",
    "default", "times_us", "device_name",
)  # fmt: skip
NO_RECORDS = (".", "bench-")  # hidden files, and summaries of a comparison: no records by their name


def record_files(paths: Sequence[pathlib.Path] | pathlib.Path) -> list[pathlib.Path]:
    """Journals and Parquet files under the given files and directories, in a stable order."""
    if isinstance(paths, (str, pathlib.Path)):
        paths = [pathlib.Path(paths)]
    files: list[pathlib.Path] = []
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            files += sorted(p for p in path.rglob("*.parquet") if not p.name.startswith(NO_RECORDS))
            files += sorted(path.rglob(JOURNAL_GLOB))
        elif path.exists():
            files.append(path)
        else:
            raise UserError(f"{path} does not exist; expected a records file or a directory of them")
    return list(dict.fromkeys(files))


def read_tables(
    paths: Sequence[pathlib.Path] | pathlib.Path, columns: Sequence[str] | None = None
) -> tuple[pa.Table, list[str]]:
    """All records under `paths` as one Arrow table, and a notice for each file or line that was skipped."""
    import pyarrow as pa

    schema = arrow_schema()
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    tables, notices = [], []
    for file in record_files(paths):
        if file.suffix == ".jsonl":
            result = read_journal(file)
            notices += result.notices
            table = to_table(result.records).select(schema.names)
        else:
            try:
                table = _read_parquet(file, schema)
            except (OSError, ValueError, pa.ArrowException) as error:
                notices.append(f"{file}: not a records file ({_why_unread(error)}); skipped")
                continue
        tables.append(table)
    if not tables:
        return schema.empty_table(), notices
    whole = pa.concat_tables(tables)
    if any(column.num_chunks > 1 for column in whole.columns):
        whole = whole.unify_dictionaries().combine_chunks()
    return whole, notices


def _read_parquet(path: pathlib.Path, schema: pa.Schema) -> pa.Table:
    """The columns of `schema`. The file is opened here: pyarrow itself takes no name that is not UTF-8."""
    import pyarrow.parquet as pq

    with open(path, "rb") as opened, pq.ParquetFile(opened) as file:
        present = set(file.schema_arrow.names)
        lacking = [name for name in ESSENTIAL if name not in present]
        if lacking:
            raise ValueError(f"it lacks the columns {', '.join(lacking[:3])}")
        return _conform(file.read(columns=[name for name in schema.names if name in present]), schema)


def _why_unread(error: Exception) -> str:
    text = " ".join(str(error).split())
    return "no Parquet file, or cut off" if "magic bytes" in text or "file size" in text else text[:160]


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A column that an older file lacks is null."""
    import pyarrow as pa

    def column(field: pa.Field) -> Any:
        if field.name not in table.column_names:
            return pa.nulls(len(table), field.type)
        have = table.column(field.name)
        return have if have.type == field.type else have.cast(field.type)

    arrays = [column(field) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def read_records(paths: Sequence[pathlib.Path] | pathlib.Path) -> ReadResult:
    """All records under `paths` as dataclasses; for very many of them use `read_frame`."""
    result = ReadResult()
    for file in record_files(paths):
        if file.suffix == ".jsonl":
            result.extend(read_journal(file))
            continue
        table, notices = read_tables(file)
        result.notices += notices
        for row in table.to_pylist():
            try:
                result.records.append(from_row(row))
            except ValueError as error:
                result.notices.append(f"{file}: {error}; skipped")
    return result

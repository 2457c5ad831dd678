"""The Parquet tables of a run: their columns, the streaming conversion that fills them, and reading them back."""

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from reports.measured import derive
from reports.results import FIELDS, REQUESTS, ROWS_PER_BATCH, SCHEMA_VERSION, TIMESERIES, RequestRecord, RunManifest


def write_rows(table: str, rows: Iterator[Mapping[str, Any]], path: Path, manifest: RunManifest) -> None:
    """Write one table, batch by batch; request rows are those of `RequestRecord.to_json`."""
    schema = _schema(table)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in _batches(rows):
            columns = _request_columns(batch, manifest) if table == REQUESTS else _columns(batch, schema)
            writer.write_table(pa.table(columns, schema=schema))
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _columns(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> dict[str, list[Any]]:
    return {name: [row.get(name) for row in rows] for name in schema.names}


UnreadableError = pa.ArrowException


def read_rows(path: Path, names: Container[str] | None) -> Iterator[dict[str, Any]]:
    """The rows of a table, those of its columns that are in `names`. Raises UnreadableError."""
    with pq.ParquetFile(path) as file:
        known = [name for name in file.schema_arrow.names if names is None or name in names]
        for batch in file.iter_batches(ROWS_PER_BATCH, columns=known):
            yield from batch.to_pylist()


def _request_columns(rows: Sequence[Mapping[str, Any]], manifest: RunManifest) -> dict[str, Any]:
    records = [RequestRecord.from_json(row) for row in rows]
    frame = derive(records, manifest)
    columns: dict[str, Any] = {name: [getattr(record, name) for record in records] for name in FIELDS}
    columns["gap_ns"] = [record.gap_ns if record.t_first_ns is not None else None for record in records]
    for name in DERIVED_FLOATS:
        columns[name] = [None if value != value else value for value in frame[name].tolist()]
    for name in DERIVED_FLAGS:
        columns[name] = frame[name].tolist()
    return columns


DERIVED_FLOATS = (
    "ttft_s",
    "ttft_co_s",
    "ttfat_s",
    "ttfb_s",
    "tpot_s",
    "max_gap_s",
    "e2e_s",
    "e2e_co_s",
    "ntpot_s",
    "schedule_lag_s",
)
DERIVED_FLAGS = ("itl_exact", "slo_ok")


def _schema(table: str) -> pa.Schema:
    columns = {REQUESTS: _request_types, TIMESERIES: _timeseries_types}.get(table, _server_types)()
    return pa.schema(columns, metadata={"schema_version": str(SCHEMA_VERSION)})


def _request_types() -> list[tuple[str, pa.DataType]]:
    special = {"http_status": pa.int16(), "gap_ns": pa.list_(pa.int64())}
    wide = {name: pa.int64() for name in FIELDS if name.startswith(("t_", "bytes_"))}
    types = {name: _arrow_type(each.type) for name, each in FIELDS.items()} | special | wide
    types |= dict.fromkeys(DERIVED_FLOATS, pa.float64()) | dict.fromkeys(DERIVED_FLAGS, pa.bool_())
    return list(types.items())


def _timeseries_types() -> list[tuple[str, pa.DataType]]:
    counts = ("in_flight", "sent", "completed", "failed", "tokens_out", "tokens_in", "rss_bytes")
    numbers = ("t_s", "ttft_p50_s", "ttft_p95_s", "loop_lag_max_s", "cpu_share")
    types = {"worker": pa.int32()} | dict.fromkeys(counts, pa.int64()) | dict.fromkeys(numbers, pa.float64())
    return list(types.items())


def _server_types() -> list[tuple[str, pa.DataType]]:
    return [("t_s", pa.float64()), ("name", pa.string()), ("labels", pa.string()), ("value", pa.float64())]


def _arrow_type(annotation: Any) -> pa.DataType:
    kinds = {str: pa.string(), int: pa.int32(), float: pa.float64(), bool: pa.bool_()}
    plain = next((kind for kind in (annotation, *get_args(annotation)) if kind in kinds), None)
    return pa.list_(pa.int32()) if plain is None or "list" in str(annotation) else kinds[plain]


def _batches(rows: Iterator[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    batch: list[Mapping[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS_PER_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch

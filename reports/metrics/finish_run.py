"""Finishes a run: turns its JSONL files into Parquet tables, with the derived metrics of each request."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from reports.metrics.measured import derive
from reports.metrics.windows import phases
from reports.request_columns import LISTS, Ragged, columns_of_rows
from reports.run_schema import FIELDS, Phase, Status
from reports.run_store import (
    REQUESTS,
    ROWS_PER_BATCH,
    SCHEMA_VERSION,
    TABLES,
    TIMESERIES,
    RunDirectoryError,
    RunManifest,
    jsonl_files,
    load_manifest,
    read_jsonl,
    replacing,
)


def finish_run(directory: Path) -> None:
    """Turn the JSONL files of a run into Parquet with derived columns, then remove them.

    Only one batch of rows is in memory. A finished run is not changed. Raises RunDirectoryError.
    """
    manifest = load_manifest(directory)
    for table in TABLES:
        sources = jsonl_files(directory, table)
        target = directory / f"{table}.parquet"
        if sources and not target.exists():
            write_table(directory, table, read_jsonl(sources), manifest)
        for source in sources:
            source.unlink()
    if not (directory / f"{REQUESTS}.parquet").exists():
        write_table(directory, REQUESTS, [], manifest)


def count_drain(directory: Path) -> dict[str, int]:
    """Numbers of requests of a finished run: started in the drain, cancelled at its end, cut off at its limit."""
    table = pq.read_table(directory / f"{REQUESTS}.parquet", columns=["phase", "status"])
    phase, status = table["phase"].to_pylist(), table["status"].to_pylist()
    return {
        "requests": phase.count(Phase.DRAIN),
        "cancelled": status.count(Status.CANCELLED),
        "cut_off": status.count(Status.UNFINISHED),
    }


def write_table(directory: Path, table: str, rows: Iterable[Mapping[str, Any]], manifest: RunManifest) -> None:
    """Write one Parquet table of a run atomically. Raises RunDirectoryError for a row that does not fit its schema.

    rows: those of `RequestRecord.to_json` for the table of requests.
    """
    try:
        with replacing(directory / f"{table}.parquet") as file:
            write_rows(table, iter(rows), file, manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{directory}: a row of {table} does not fit its schema ({error!r})") from error


def write_rows(table: str, rows: Iterator[Mapping[str, Any]], file: BinaryIO, manifest: RunManifest) -> None:
    """Write one table in batches, and flush it to the disk. rows: as in `write_table`."""
    schema = table_schema(table)
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in _batches(rows):
            columns = _request_columns(batch, manifest, schema) if table == REQUESTS else _columns(batch, schema)
            writer.write_table(pa.table(columns, schema=schema))
    file.flush()
    os.fsync(file.fileno())


def _columns(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> dict[str, pa.Array]:
    return {each.name: _text_safe([row.get(each.name) for row in rows], each.type) for each in schema}


def _text_safe(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as a column. Lone surrogates (from a server's JSON) are replaced, because Parquet stores valid Unicode."""
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([each if each is None else _unicode(each) for each in values], kind)


def _unicode(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _request_columns(rows: Sequence[Mapping[str, Any]], manifest: RunManifest, schema: pa.Schema) -> dict[str, Any]:
    requests = columns_of_rows(rows)
    frame = derive(requests.frame, manifest)
    frame["phase"] = phases(frame, manifest)
    columns = {
        each.name: _written(frame[each.name], each.type)
        for each in schema
        if each.name in (*FIELDS, *DERIVED_FLOATS, *DERIVED_FLAGS) and each.name not in LISTS
    }
    columns["gap_ns"] = _list_column(requests.gap_ns, np.asarray(frame["t_first_ns"].isna()), pa.int64())
    columns["event_tokens"] = _list_column(requests.event_tokens, requests.event_tokens.sizes == 0, pa.int32())
    return columns


def _written(column: "pd.Series[Any]", kind: pa.DataType) -> pa.Array:
    """A column of a frame as Arrow values. In the frame, integers are float64 and missing values are NaN."""
    if column.dtype == object:
        return _text_safe(column.tolist(), kind)
    values = np.asarray(column)
    if values.dtype != np.float64:
        return pa.array(values, kind)
    missing = np.isnan(values)
    return pa.array(np.where(missing, 0, values) if pa.types.is_integer(kind) else values, mask=missing).cast(kind)


def _list_column(lists: Ragged, is_null: Any, kind: pa.DataType) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum(lists.sizes))).astype(np.int32)
    values = pa.array(lists.values).cast(kind)
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(np.asarray(is_null, dtype=np.bool_)))


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


def table_schema(table: str) -> pa.Schema:
    """The columns of a table of a run, with their types."""
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

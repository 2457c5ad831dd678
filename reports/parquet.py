"""The Parquet tables of a run: their columns, the streaming conversion that fills them, and reading them back."""

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reports.frames import LISTS, TEXT, Ragged, RequestColumns, columns_of_rows, longest_s
from reports.measured import derive
from reports.records import DEFAULTS, FIELDS
from reports.results import REQUESTS, ROWS_PER_BATCH, SCHEMA_VERSION, TIMESERIES, RunDirectoryError, RunManifest


def write_rows(table: str, rows: Iterator[Mapping[str, Any]], path: Path, manifest: RunManifest) -> None:
    """Write one table, batch by batch; request rows are those of `RequestRecord.to_json`."""
    schema = _schema(table)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in _batches(rows):
            columns = _request_columns(batch, manifest, schema) if table == REQUESTS else _columns(batch, schema)
            writer.write_table(pa.table(columns, schema=schema))
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _columns(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> dict[str, pa.Array]:
    return {each.name: _text_safe([row.get(each.name) for row in rows], each.type) for each in schema}


def _text_safe(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as a column; of a text that is no Unicode (a lone surrogate in a server's JSON) what can be written."""
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([each if each is None else _unicode(each) for each in values], kind)


def _unicode(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Table:
    """A saved table, open. Raises RunDirectoryError, naming it, where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._readable():
            self._file = pq.ParquetFile(path)

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def rows(self, names: Container[str] | None = None) -> Iterator[dict[str, Any]]:
        """Row by row, those of its columns that are in `names`."""
        known = [name for name in self._file.schema_arrow.names if names is None or name in names]
        with self._readable():
            for batch in self._file.iter_batches(ROWS_PER_BATCH, columns=known):
                yield from batch.to_pylist()

    def requests(self) -> RequestColumns:
        """The requests of a run, without an object for each."""
        known = set(self._file.schema_arrow.names)
        with self._readable():
            gaps, tokens = (_read_lists(self._file, name, name in known) for name in ("gap_ns", "event_tokens"))
            columns: dict[str, Any] = {}
            for name in FIELDS:
                if name not in LISTS:
                    column = self._file.read([name])[name] if name in known else pa.chunked_array([pa.nulls(len(self))])
                    columns[name] = _read_scalars(column, name)
        columns["max_gap_s"] = longest_s(gaps)
        return RequestColumns(pd.DataFrame(columns), gaps, tokens)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowException as error:
            raise RunDirectoryError(f"{self.path}: not a readable Parquet file ({error})") from error


def _read_scalars(column: pa.ChunkedArray, name: str) -> Any:
    """A column as `RequestColumns` holds it; a null takes the field's default."""
    default = DEFAULTS.get(name)
    if default is not None and column.null_count:
        column = pc.fill_null(column.cast(pa.string() if name in TEXT else pa.float64()), default)
    if name in TEXT:
        return pd.Series(column.to_numpy(zero_copy_only=False), dtype=object)
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _read_lists(file: pq.ParquetFile, name: str, is_known: bool) -> Ragged:
    """A column of lists, 32 bits wide where all its values fit."""
    count = file.metadata.num_rows
    if not is_known:
        return Ragged(np.empty(0, dtype=np.int32), np.zeros(count, dtype=np.int64))
    place = next(i for i in range(file.metadata.num_columns) if file.schema.column(i).path.split(".")[0] == name)
    groups = [file.metadata.row_group(i).column(place) for i in range(file.metadata.num_row_groups)]
    values: Any = np.empty(sum(group.num_values for group in groups), dtype=np.int32)
    sizes, row, filled = np.zeros(count, dtype=np.int64), 0, 0
    for batch in file.iter_batches(ROWS_PER_BATCH, columns=[name]):
        lists = batch[name]
        lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), 0), dtype=np.int64)
        flat = np.asarray(pc.list_flatten(lists), dtype=np.int64)
        if len(flat) and values.dtype == np.int32 and int(flat.max()) >= 2**31:
            values = values.astype(np.int64)
        sizes[row : row + len(lengths)] = lengths
        values[filled : filled + len(flat)] = flat
        row, filled = row + len(lengths), filled + len(flat)
    return Ragged(values[:filled], sizes)


def _request_columns(rows: Sequence[Mapping[str, Any]], manifest: RunManifest, schema: pa.Schema) -> dict[str, Any]:
    requests = columns_of_rows(rows)
    frame = derive(requests.frame, manifest)
    columns = {
        each.name: _written(frame[each.name], each.type)
        for each in schema
        if each.name in (*FIELDS, *DERIVED_FLOATS, *DERIVED_FLAGS) and each.name not in LISTS
    }
    columns["gap_ns"] = _list_column(requests.gap_ns, np.asarray(frame["t_first_ns"].isna()), pa.int64())
    columns["event_tokens"] = _list_column(requests.event_tokens, requests.event_tokens.sizes == 0, pa.int32())
    return columns


def _written(column: "pd.Series[Any]", kind: pa.DataType) -> pa.Array:
    """One column of a frame; whole numbers are float64 in it, NaN for what is missing."""
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

"""Reads a saved run: its manifest, its records, and its tables from JSONL or Parquet."""

import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reports.request_columns import LISTS, TEXT, Ragged, RequestColumns, longest_gap_s
from reports.run_schema import DEFAULTS, FIELDS, RequestRecord
from reports.run_store import (
    CLIENT_FILE,
    REQUESTS,
    ROWS_PER_BATCH,
    SERVER_METRICS,
    TIMESERIES,
    RunDirectoryError,
    RunResult,
    jsonl_files,
    load_manifest,
    read_json,
    read_jsonl,
)


class SavedRecords(Sequence[RequestRecord]):
    """The records of a finished run, read on first access. `Measured` reads the columns of `table` instead.

    The file stays open, so the records are readable even after the directory is moved or replaced.
    """

    def __init__(self, path: Path) -> None:
        self.table = ParquetTable(path)
        self._read: list[RequestRecord] | None = None

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestRecord]: ...
    def __getitem__(self, index: int | slice) -> RequestRecord | list[RequestRecord]:
        return self._records[index]

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    @property
    def _records(self) -> list[RequestRecord]:
        if self._read is None:
            self._read = list(_records(self.table.path, self.table.rows(FIELDS)))
        return self._read


def load_run(directory: Path) -> RunResult:
    """The run in a directory, finished or crashed.

    Raises RunDirectoryError if the directory is missing, is not a run, or is of a newer version.
    """
    manifest = load_manifest(directory)
    client_path, saved = directory / CLIENT_FILE, directory / f"{REQUESTS}.parquet"
    return RunResult(
        manifest=manifest,
        records=SavedRecords(saved) if saved.exists() else list(_records(directory, _table_rows(directory, REQUESTS))),
        timeseries=list(_table_rows(directory, TIMESERIES)),
        server_metrics=list(_table_rows(directory, SERVER_METRICS)),
        client=read_json(client_path) if client_path.exists() else {},
        directory=directory,
    )


def _records(path: Path, rows: Iterable[Mapping[str, Any]]) -> Iterator[RequestRecord]:
    for number, row in enumerate(rows, start=1):
        try:
            yield RequestRecord.from_json(row)
        except (TypeError, ValueError, struct.error) as error:
            raise RunDirectoryError(f"{path}: request {number} is not a record ({error})") from error


def _table_rows(directory: Path, table: str) -> Iterator[dict[str, Any]]:
    path = directory / f"{table}.parquet"
    if not path.exists():
        yield from read_jsonl(jsonl_files(directory, table))
        return
    yield from ParquetTable(path).rows()


class ParquetTable:
    """An open Parquet table. Raises RunDirectoryError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._readable():
            self._file = pq.ParquetFile(path)

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def rows(self, names: Container[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows with the columns in `names`; with all columns for None."""
        known = [name for name in self._file.schema_arrow.names if names is None or name in names]
        with self._readable():
            for batch in self._file.iter_batches(ROWS_PER_BATCH, columns=known):
                yield from batch.to_pylist()

    def requests(self) -> RequestColumns:
        """The requests of a run as columns, without an object per request."""
        known = set(self._file.schema_arrow.names)
        with self._readable():
            gaps, tokens = (_read_lists(self._file, name, name in known) for name in ("gap_ns", "event_tokens"))
            columns: dict[str, Any] = {}
            for name in FIELDS:
                if name not in LISTS:
                    column = self._file.read([name])[name] if name in known else pa.chunked_array([pa.nulls(len(self))])
                    columns[name] = _read_scalars(column, name)
        columns["max_gap_s"] = longest_gap_s(gaps)
        return RequestColumns(pd.DataFrame(columns), gaps, tokens)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowException as error:
            raise RunDirectoryError(f"{self.path}: not a readable Parquet file ({error})") from error


def _read_scalars(column: pa.ChunkedArray, name: str) -> Any:
    """A column in the form of `RequestColumns`; a null becomes the field's default."""
    default = DEFAULTS.get(name)
    if default is not None and column.null_count:
        column = pc.fill_null(column.cast(pa.string() if name in TEXT else pa.float64()), default)
    if name in TEXT:
        return pd.Series(column.to_numpy(zero_copy_only=False), dtype=object)
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _read_lists(file: pq.ParquetFile, name: str, is_known: bool) -> Ragged:
    """A column of lists, as 32-bit integers if all values fit."""
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

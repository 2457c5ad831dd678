"""What one bench run leaves behind: its records, its manifest, and the directory that holds them.

While a run lasts, rows are appended to `*.jsonl`; `finish_run` turns them into Parquet. The load generator's worker
imports this module, so pandas and pyarrow are imported only by the functions that need them.
"""

import dataclasses
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from reports.records import FIELDS, RequestRecord

SCHEMA_VERSION = 1

MANIFEST_FILE = "manifest.json"
CLIENT_FILE = "client.json"
SUMMARY_FILE = "summary.json"
REQUESTS, TIMESERIES, SERVER_METRICS = "requests", "timeseries", "server_metrics"
TABLES = (REQUESTS, TIMESERIES, SERVER_METRICS)

ROWS_PER_BATCH = 2_000


class RunDirectoryError(Exception):
    """A directory that is missing, is no run, or was written by a newer version."""


@dataclass(slots=True)
class RunManifest:
    """What was run, on what, and how: enough to repeat the run and to refuse a wrong comparison.

    `target` holds url, api, info (as `/info` reported), info_end (the same at the end of the run), launch_argv,
    launch_chosen (the arguments the product chose itself) and accelerator; `clipped` holds requests, input_tokens and
    output_tokens; `objectives` a list of {metric, max or min}; `machine` the operating system, kernel, cpu, cpu_count,
    memory_bytes and container limits. `slots` is the concurrency of a closed loop, `window_end_s` when the load's
    window ended, `drain_s` the limit of the drain. Times in seconds are since the run's start.
    """

    run_id: str
    started_at: str = ""
    command: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    mode: str = "closed"
    label: str = ""
    notes: str = ""
    labels: dict[str, str] = field(default_factory=dict)

    version: str = ""
    revision: str | None = None
    python: str = ""
    libraries: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    seed: int | None = None

    workload_hash: str | None = None
    schedule_hash: str | None = None
    tokenizer_hash: str | None = None
    length_control: str = "free"
    prefix_cache: str = "natural"
    clipped: dict[str, int] = field(default_factory=dict)
    objectives: list[dict[str, Any]] = field(default_factory=list)
    price_per_hour: float | None = None
    target: dict[str, Any] = field(default_factory=dict)

    warmup_s: float = 0.0
    slots: int | None = None
    window_end_s: float | None = None
    drain_s: float | None = None
    stop_reason: str | None = None
    clock: dict[str, float] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The manifest of one JSON object; unknown keys are ignored."""
        known = {each.name for each in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in row.items() if name in known})

    @property
    def is_open_loop(self) -> bool:
        """Whether requests started at scheduled times, whatever was in flight."""
        return self.mode not in ("closed", "burst") and self.config.get("stages_of") != "concurrency"

    @property
    def title(self) -> str:
        return self.label or self.run_id


class SavedRecords(Sequence[RequestRecord]):
    """The records of a finished run, read when they are asked for one by one; measuring takes the file's columns.

    The file stays open, so that they are the same whatever becomes of the directory.
    """

    def __init__(self, path: Path) -> None:
        from reports import parquet

        self.table = parquet.Table(path)
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


@dataclass(slots=True)
class RunResult:
    """One bench run, whole.

    `timeseries` has one row per second and worker; `server_metrics` rows of {t_s, name, labels, value}; `client` what
    the generator measured of itself.
    """

    manifest: RunManifest
    records: Sequence[RequestRecord]
    timeseries: list[dict[str, Any]] = field(default_factory=list)
    server_metrics: list[dict[str, Any]] = field(default_factory=list)
    client: dict[str, Any] = field(default_factory=dict)
    directory: Path | None = None


class JsonlWriter:
    """Appends JSON objects to a file, each one handed to the kernel whole and at once, so a crash loses none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. Raises OSError when the disk is full."""
        line = json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        written = self._file.write(line)
        while written is not None and written < len(line):
            line = line[written:]
            written = self._file.write(line)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    replace_file(path, json.dumps(value, indent=2, allow_nan=False, default=str).encode() + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old content or the new, never a part."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def write_manifest(directory: Path, manifest: RunManifest) -> None:
    """Write `manifest.json`; a run writes it at its start and again, completed, at its end."""
    write_json(directory / MANIFEST_FILE, manifest.to_json())


def write_client(directory: Path, client: Mapping[str, Any]) -> None:
    """Write what the generator measured of itself."""
    write_json(directory / CLIENT_FILE, {"schema_version": SCHEMA_VERSION, **client})


def load_run(directory: Path) -> RunResult:
    """The run in a directory, finished or crashed.

    Raises RunDirectoryError, naming what is wrong, when the directory is missing, is no run, or is of a newer version.
    """
    manifest = load_manifest(directory)
    client_path, saved = directory / CLIENT_FILE, directory / f"{REQUESTS}.parquet"
    return RunResult(
        manifest=manifest,
        records=SavedRecords(saved) if saved.exists() else list(_records(directory, _table_rows(directory, REQUESTS))),
        timeseries=list(_table_rows(directory, TIMESERIES)),
        server_metrics=list(_table_rows(directory, SERVER_METRICS)),
        client=_read_json(client_path) if client_path.exists() else {},
        directory=directory,
    )


def _records(path: Path, rows: Iterable[Mapping[str, Any]]) -> Iterator[RequestRecord]:
    for number, row in enumerate(rows, start=1):
        try:
            yield RequestRecord.from_json(row)
        except (TypeError, ValueError, struct.error) as error:
            raise RunDirectoryError(f"{path}: request {number} is not a record ({error})") from error


def load_manifest(directory: Path) -> RunManifest:
    """The manifest of a run directory; raises RunDirectoryError as `load_run` does."""
    if not directory.is_dir():
        raise RunDirectoryError(f"{directory}: no such directory")
    path = directory / MANIFEST_FILE
    if not path.exists():
        raise RunDirectoryError(f"{directory}: not a run directory, it has no {MANIFEST_FILE}")
    row = _read_json(path)
    version = row.get("schema_version")
    if not isinstance(version, int) or "run_id" not in row:
        raise RunDirectoryError(f"{path}: not the manifest of a run")
    if version > SCHEMA_VERSION:
        raise RunDirectoryError(
            f"{directory}: written with results schema {version}, but this version reads up to {SCHEMA_VERSION}; update"
        )
    return RunManifest.from_json(row)


def finish_run(directory: Path) -> None:
    """Turn the JSONL files of a run into Parquet, with derived columns, and remove them once that is in place.

    Memory stays bounded by a batch of rows. A run that is already finished is left as it is.
    """
    manifest = load_manifest(directory)
    for table in TABLES:
        sources = _jsonl_files(directory, table)
        target = directory / f"{table}.parquet"
        if sources and not target.exists():
            write_table(directory, table, _jsonl_rows(sources), manifest)
        for source in sources:
            source.unlink()
    if not (directory / f"{REQUESTS}.parquet").exists():
        write_table(directory, REQUESTS, [], manifest)


def write_table(directory: Path, table: str, rows: Iterable[Mapping[str, Any]], manifest: RunManifest) -> None:
    """Write one Parquet table of a run atomically; request rows are those of `RequestRecord.to_json`."""
    from reports import parquet

    target = directory / f"{table}.parquet"
    part = target.with_name(target.name + ".part")
    try:
        parquet.write_rows(table, iter(rows), part, manifest)
        part.replace(target)
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{directory}: a row of {table} is not one ({error!r})") from error
    finally:
        part.unlink(missing_ok=True)


def _table_rows(directory: Path, table: str) -> Iterator[dict[str, Any]]:
    path = directory / f"{table}.parquet"
    if not path.exists():
        yield from _jsonl_rows(_jsonl_files(directory, table))
        return
    from reports import parquet

    yield from parquet.Table(path).rows()


def _jsonl_files(directory: Path, table: str) -> list[Path]:
    return sorted(directory.glob(f"{table}*.jsonl"))


def _jsonl_rows(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Rows of JSONL files; a last line that a crash cut off is left out."""
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise RunDirectoryError(f"{path}:{number}: not a JSON record ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunDirectoryError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path}: not a JSON object")
    return value

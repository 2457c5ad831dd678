"""What one bench run leaves behind: its records, its manifest, and the directory that holds them.

`RequestRecord` keeps what was observed and nothing derived from it; formulas are in `metrics.py`. While a run lasts,
rows are appended to `*.jsonl`; `finish_run` turns them into Parquet. The load generator's worker imports this module,
so pandas and pyarrow are imported only by the functions that need them.
"""

import base64
import dataclasses
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

SCHEMA_VERSION = 1

MANIFEST_FILE = "manifest.json"
CLIENT_FILE = "client.json"
SUMMARY_FILE = "summary.json"
REQUESTS, TIMESERIES, SERVER_METRICS = "requests", "timeseries", "server_metrics"
TABLES = (REQUESTS, TIMESERIES, SERVER_METRICS)

ROWS_PER_BATCH = 2_000


class RunDirectoryError(Exception):
    """A directory that is missing, is no run, or was written by a newer version."""


class Phase(StrEnum):
    WARMUP = "warmup"
    MEASURE = "measure"
    DRAIN = "drain"


class Status(StrEnum):
    """How a request ended; exactly one each."""

    OK = "ok"
    CONNECT_ERROR = "connect_error"
    TIMEOUT = "timeout"
    OVERLOADED = "overloaded"
    HTTP_4XX = "http_4xx"
    HTTP_5XX = "http_5xx"
    STREAM_ERROR = "stream_error"
    TRUNCATED = "truncated"
    BAD_PAYLOAD = "bad_payload"
    PROTOCOL_ERROR = "protocol_error"
    CANCELLED = "cancelled"
    UNFINISHED = "unfinished"
    CLIENT_ERROR = "client_error"


class TokensSource(StrEnum):
    """Where a record's output token count comes from, best first."""

    SERVER_STREAM = "server_stream"
    SERVER_USAGE = "server_usage"
    CLIENT_TOKENIZER = "client_tokenizer"
    EVENTS = "events"


class RequestPhase(StrEnum):
    """The part of a request in which an error struck."""

    CONNECT = "connect"
    HEADERS = "headers"
    FIRST_EVENT = "first_event"
    STREAM = "stream"


def error_type(phase: RequestPhase, cause: str) -> str:
    """The text of `RequestRecord.error_type`: where it struck, then what it was.

    >>> error_type(RequestPhase.STREAM, "ConnectionResetError")
    'stream/ConnectionResetError'
    """
    return f"{phase}/{cause}"


@dataclass(slots=True)
class RequestRecord:
    """Everything observed of one request.

    Times are ns since the run's start on the generator's monotonic clock, None where the moment never came. `gap_ns`
    holds the gaps between successive token events, so event i is at `t_first_ns + sum(gap_ns[:i])`; `event_tokens` the
    token count of each event, None where every event carried one. `limit_wait_s` is the part of the delay before
    `t_dispatch_ns` that was spent at the in-flight limit.
    """

    run_id: str
    request_id: str
    prompt_id: str = ""
    session_id: str | None = None
    turn: int = 0
    worker: int = 0
    point: int = 0
    phase: str = Phase.MEASURE

    status: str = Status.OK
    error_type: str | None = None
    finish_reason: str | None = None
    http_status: int | None = None

    t_intended_ns: int | None = None
    t_dispatch_ns: int | None = None
    t_sent_ns: int | None = None
    t_headers_ns: int | None = None
    t_first_ns: int | None = None
    t_first_answer_ns: int | None = None
    t_last_ns: int | None = None
    t_end_ns: int | None = None
    connect_s: float | None = None
    conn_reused: bool | None = None
    limit_wait_s: float | None = None

    planned_input_tokens: int | None = None
    planned_output_tokens: int | None = None
    requested_output_tokens: int | None = None
    input_tokens: int | None = None
    cached_input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    first_event_tokens: int | None = None
    tokens_source: str | None = None
    client_output_tokens: int | None = None

    events: int = 0
    coalesced_events: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    gap_ns: list[int] = field(default_factory=list)
    event_tokens: list[int] | None = None

    srv_validation_s: float | None = None
    srv_queue_s: float | None = None
    srv_inference_s: float | None = None
    srv_time_per_token_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object of the fields that differ from their default; gaps as `encode_gaps` writes them."""
        row = {name: value for name in FIELDS if (value := getattr(self, name)) != DEFAULTS.get(name)}
        gap_ns = row.pop("gap_ns", None)
        if gap_ns:
            row["gap_ns"] = encode_gaps(gap_ns)
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The record of one JSONL or Parquet row; unknown keys are ignored and nulls take the field's default."""
        known = {name: value for name, value in row.items() if name in FIELDS and value is not None}
        gap_ns = known.get("gap_ns")
        if isinstance(gap_ns, str):
            known["gap_ns"] = decode_gaps(gap_ns)
        return cls(**known)


FIELDS: dict[str, Any] = {each.name: each for each in dataclasses.fields(RequestRecord)}
DEFAULTS = {
    name: [] if each.default_factory is list else each.default
    for name, each in FIELDS.items()
    if name not in ("run_id", "request_id")
}


# A gap of 2.1 s and more does not fit 32 bits: -1 announces it, and the next two words are its low and high halves.
LONG_GAP = -1


def encode_gaps(gap_ns: Sequence[int]) -> str:
    """Gaps (the deltas of event times, ns, none negative) as base64 of little-endian int32."""
    words: list[int] = []
    for gap in gap_ns:
        if gap < 2**31:
            words.append(gap)
        else:
            words += (LONG_GAP, *struct.unpack("<2i", struct.pack("<q", gap)))
    return base64.b64encode(struct.pack(f"<{len(words)}i", *words)).decode("ascii")


def decode_gaps(text: str) -> list[int]:
    """The inverse of `encode_gaps`."""
    packed = base64.b64decode(text, validate=True)
    words = iter(struct.unpack(f"<{len(packed) // 4}i", packed))
    return [
        struct.unpack("<q", struct.pack("<2i", next(words), next(words)))[0] if word == LONG_GAP else word
        for word in words
    ]


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

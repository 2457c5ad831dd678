"""The directory of a bench run: its manifest and its files while the run lasts.

During a run, rows are appended to `*.jsonl`; `metrics/finish_run.py` turns them into Parquet, which `saved_run.py`
reads.
The load generator's worker imports this module, so it needs only the standard library.
"""

import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from reports.run_schema import RequestRecord

SCHEMA_VERSION = 1

MANIFEST_FILE = "manifest.json"
CLIENT_FILE = "client.json"
SUMMARY_FILE = "summary.json"
REQUESTS, TIMESERIES, SERVER_METRICS = "requests", "timeseries", "server_metrics"
TABLES = (REQUESTS, TIMESERIES, SERVER_METRICS)

ROWS_PER_BATCH = 2_000


def is_open_loop(mode: str, stages_of: str | None) -> bool:
    """Whether requests start at scheduled times, independently of the number in flight."""
    return mode != "closed" and not (mode == "stages" and stages_of == "concurrency")


class RunDirectoryError(Exception):
    """A directory is missing, is not a run, or was written by a newer version."""


@dataclass(slots=True)
class RunManifest:
    """The server, the load and the machine of a run, to repeat it and to check that runs are comparable.

    `reference/file_keys.py` has the meaning of each field. `open_loop` is None in runs of earlier versions.
    """

    run_id: str
    started_at: str = ""
    command: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    mode: str = "closed"
    open_loop: bool | None = None
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

    salt: str | None = None
    workload_hash: str | None = None
    text_hash: str | None = None
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
    drain: dict[str, Any] = field(default_factory=dict)
    stop_reason: str | None = None
    clock: dict[str, float] = field(default_factory=dict)
    arrival_times: dict[str, Any] = field(default_factory=dict)
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
        return is_open_loop(self.mode, self.config.get("stages_of")) if self.open_loop is None else self.open_loop

    @property
    def title(self) -> str:
        return self.label or self.run_id

    @property
    def model(self) -> str | None:
        """The served model: that of `/info`, which only some servers have, or the one that the requests named."""
        model = (self.target.get("info") or {}).get("model_id") or self.target.get("model")
        return None if model is None else str(model)


@dataclass(slots=True)
class RunResult:
    """One bench run.

    timeseries: a row per second and worker. server_metrics: rows of {t_s, name, labels, value}.
    client: the generator's measurements of itself; {} if the run was killed.
    """

    manifest: RunManifest
    records: Sequence[RequestRecord]
    timeseries: list[dict[str, Any]] = field(default_factory=list)
    server_metrics: list[dict[str, Any]] = field(default_factory=list)
    client: dict[str, Any] = field(default_factory=dict)
    directory: Path | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the load ended normally: a killed run has no `client.json` or no stop reason."""
        return bool(self.client) and self.manifest.stop_reason is not None


class JsonlWriter:
    """Appends JSON objects to a file. Each is a single unbuffered write, so a crash loses no complete row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. Raises OSError, for example if the disk is full; the file then ends with a complete line."""
        append_whole(self._file, json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def append_whole(file: io.FileIO, data: bytes) -> None:
    """Append all of `data` or nothing. Raises OSError."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[file.write(data) or 0 :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    replace_file(path, json.dumps(value, indent=2, allow_nan=False, default=str).encode() + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically, as `replacing`."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces `path` once it is written: a reader sees the old or the new content, never a part.

    Links are not followed: a run directory of another person can contain links to files of this user.
    """
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    try:
        with part.open("xb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def links_in(directory: Path) -> list[str]:
    """The names of the links in a directory. Files that are appended to would be written through them."""
    return sorted(path.name for path in directory.iterdir() if path.is_symlink())


def write_manifest(directory: Path, manifest: RunManifest) -> None:
    """Write `manifest.json`: a run writes it at its start, and again with all fields at its end."""
    write_json(directory / MANIFEST_FILE, manifest.to_json())


def write_client(directory: Path, client: Mapping[str, Any]) -> None:
    """Write `client.json`, the generator's measurements of itself."""
    write_json(directory / CLIENT_FILE, {"schema_version": SCHEMA_VERSION, **client})


def load_manifest(directory: Path) -> RunManifest:
    """The manifest of a run directory. Raises RunDirectoryError if it is missing, not a run, or of a newer version."""
    if not directory.is_dir():
        raise RunDirectoryError(f"{directory}: no such directory")
    path = directory / MANIFEST_FILE
    if not path.exists():
        raise RunDirectoryError(f"{directory}: not a run directory, it has no {MANIFEST_FILE}")
    row = read_json(path)
    version = row.get("schema_version")
    if not isinstance(version, int) or "run_id" not in row:
        raise RunDirectoryError(f"{path}: not a run manifest")
    if version > SCHEMA_VERSION:
        raise RunDirectoryError(
            f"{directory}: has schema {version} but this version reads up to {SCHEMA_VERSION}; update tgi-bench"
        )
    return RunManifest.from_json(row)


def jsonl_files(directory: Path, table: str) -> list[Path]:
    """The JSONL files of a table, one per worker."""
    return sorted(directory.glob(f"{table}*.jsonl"))


def read_jsonl(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Rows of JSONL files; an incomplete last line, left by a crash, is ignored. Raises RunDirectoryError."""
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise RunDirectoryError(f"{path}:{number}: not a JSON record ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises RunDirectoryError."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path}: not a JSON object")
    return value

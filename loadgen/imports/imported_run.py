"""A run of another load generator as a run directory of ours, with everything that its file cannot support."""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError
from loadgen.run_directory import make_run_directory
from loadgen.target.machine import product_version
from reports.metrics.finish_run import finish_run
from reports.run_schema import Phase, RequestRecord
from reports.run_store import REQUESTS, JsonlWriter, RunManifest, write_client, write_manifest

NS_PER_S = 1e9
MOMENTS = ("t_intended_ns", "t_sent_ns", "t_first_ns", "t_last_ns", "t_end_ns")


@dataclass(frozen=True, slots=True)
class ImportedLoad:
    """The load of a file: users of a closed loop, or arrivals of an open one. Neither: all requests at once."""

    concurrency: int | None = None
    rate: float | None = None
    mode: str = "closed"

    @property
    def config(self) -> dict[str, Any]:
        """The settings of our own load that describe it."""
        given = {"concurrency": self.concurrency, "rate": self.rate}
        return {"mode": self.mode, "workload": "imported", **{k: v for k, v in given.items() if v is not None}}

    @property
    def name(self) -> str:
        """`concurrency-8`, `rate-2.5` or `burst`: the directory of the run."""
        if self.rate is not None:
            return f"rate-{self.rate:g}"
        return "burst" if self.concurrency is None else f"concurrency-{self.concurrency}"


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """One run of a file. Times of the records are ns since any moment; `lacks` names what the file does not have.

    `window_end_ns`: end of the measurement on the same clock; None: with the last send.
    """

    tool: str
    version: str
    model: str
    started_at: str
    load: ImportedLoad
    records: Sequence[RequestRecord]
    lacks: Sequence[str]
    measure_start_ns: int | None = None
    window_end_ns: int | None = None

    def write(self, directory: Path, source: Path) -> None:
        """Write the run directory. Raises UsageError for a directory that holds a run, or a file without requests."""
        if not self.records:
            raise UsageError(f"{source}: it has no requests")
        make_run_directory(directory)
        zero_ns = min(self._start_ns(record) for record in self.records)
        records = [self._shifted(record, zero_ns) for record in self.records]
        with JsonlWriter(directory / f"{REQUESTS}.jsonl") as writer:
            for record in sorted(records, key=self._start_ns):
                writer.write(record.to_json())
        write_manifest(directory, self._manifest(directory.name, source, zero_ns, records))
        write_client(directory, {"imported_from": self.tool})
        finish_run(directory)

    def _start_ns(self, record: RequestRecord) -> int:
        """The send in a closed loop, the intended start in an open one."""
        start_ns = record.t_sent_ns if self.load.mode == "closed" else record.t_intended_ns
        assert start_ns is not None, "each reader sets both"
        return start_ns

    def _shifted(self, record: RequestRecord, zero_ns: int) -> RequestRecord:
        """The record with its times counted from the start of the run.

        A request of a closed loop has no schedule: its wait for a free user is the load itself.
        """
        moved = {name: value - zero_ns for name in MOMENTS if (value := getattr(record, name)) is not None}
        moved["t_dispatch_ns"] = moved["t_sent_ns"]
        found = dataclasses.replace(record, **moved)
        if self.load.mode == "closed":
            found = dataclasses.replace(found, t_intended_ns=found.t_sent_ns, limit_wait_s=None)
        return found

    def _manifest(self, run_id: str, source: Path, zero_ns: int, records: Sequence[RequestRecord]) -> RunManifest:
        def since_zero_s(at_ns: int | None) -> float | None:
            return None if at_ns is None else (at_ns - zero_ns) / NS_PER_S

        # A window excludes its end, and includes the last request.
        last_s = (max(self._start_ns(record) for record in records) + 1) / NS_PER_S
        end_s = since_zero_s(self.window_end_ns)
        return RunManifest(
            run_id=run_id,
            started_at=self.started_at,
            config=self.load.config,
            mode=self.load.mode,
            open_loop=self.load.mode != "closed",
            label=self.load.name.replace("-", " "),
            version=product_version(),
            workload_hash=_workload_hash(records),
            target={
                "model": self.model,
                "info": {"model_id": self.model},
                "imported": {
                    "tool": self.tool,
                    "version": self.version,
                    "file": source.name,
                    "lacks": list(self.lacks),
                },
            },
            warmup_s=since_zero_s(self.measure_start_ns) or 0.0,
            window_end_s=last_s if end_s is None else end_s,
            stop_reason="requests" if end_s is None else self.tool,
        )


def at_ns(seconds: float | None) -> int | None:
    """A moment in seconds as whole ns."""
    return None if seconds is None else round(seconds * NS_PER_S)


def iso_time(seconds: float) -> str:
    """A Unix time as the start of a manifest."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def _workload_hash(records: Sequence[RequestRecord]) -> str:
    """Equal for files whose measured requests have the same numbers of prompt tokens."""
    measured = [record.input_tokens for record in records if record.phase == Phase.MEASURE]
    return hashlib.sha256(json.dumps(sorted(each or 0 for each in measured)).encode()).hexdigest()

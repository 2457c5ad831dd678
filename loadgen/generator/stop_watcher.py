"""Reads a run's files while they grow and ends the load when a stop rule applies.

Runs in the command's process, so that it costs the load processes nothing.
"""

import dataclasses
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.generator.settled_requests import settled_requests
from loadgen.generator.stop_rules import InterimLooks, PartialRun, StopRule
from reports.run_schema import Phase, RequestRecord
from reports.run_store import REQUESTS, TIMESERIES, RunManifest, RunResult

if TYPE_CHECKING:
    from loadgen.generator.stop_rules import Array
    from reports.metrics.measured import Measured

INTERVAL_S = 0.5
logger = logging.getLogger(__name__)


class StopWatcher:
    """Evaluates the rules in a thread; calls `on_stop` once, with the reason."""

    def __init__(
        self, manifest: RunManifest, directory: Path, rules: tuple[StopRule, ...], on_stop: Callable[[str], None]
    ) -> None:
        self._run_so_far = GrowingRun(manifest, directory)
        self._on_stop = on_stop
        self._rules = rules
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stop rules", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)

    def _run(self) -> None:
        looks = InterimLooks(self._rules)
        while not self._stop.wait(INTERVAL_S):
            try:
                reason = self._run_so_far.look(looks)
            except Exception:
                logger.exception("the stop rules failed; the run continues without them")
                return
            if reason is not None:
                self._on_stop(reason)
                return


class GrowingRun:
    """A run that is being written: the records and the requests in flight so far."""

    def __init__(self, manifest: RunManifest, directory: Path) -> None:
        self._manifest = manifest
        self._requests = GrowingFiles(directory, REQUESTS)
        self._timeseries = GrowingFiles(directory, TIMESERIES)
        self._records: list[RequestRecord] = []
        self._in_flight: dict[int, dict[int, float]] = defaultdict(dict)

    def look(self, looks: InterimLooks) -> str | None:
        """Read what was appended and evaluate the rules that are due; the reason to stop, or None."""
        self._records += (RequestRecord.from_json(row) for row in self._requests.rows())
        for row in self._timeseries.rows():
            self._in_flight[int(row["t_s"])][int(row.get("worker") or 0)] = float(row["in_flight"])
        workers = {worker for levels in self._in_flight.values() for worker in levels}
        settled = settled_requests(self._records, workers, is_open_loop=self._manifest.is_open_loop)
        if not looks.is_due(_num_measured(self._records), _num_measured(settled.records)):
            return None
        end_s = max((record.t_end_ns or 0) for record in self._records) / 1e9
        return looks.look(
            PartialRun(
                self._until(end_s, self._records), self._levels(), self._until(settled.end_ns / 1e9, settled.records)
            )
        )

    def _until(self, end_s: float, records: list[RequestRecord]) -> "Measured":
        from reports.metrics.measured import Measured

        return Measured.of(RunResult(dataclasses.replace(self._manifest, window_end_s=end_s), records))

    def _levels(self) -> tuple["Array", "Array"]:
        """Times (s) and the requests in flight of all workers at each."""
        import numpy as np

        seconds = sorted(self._in_flight)
        levels = [sum(self._in_flight[second].values()) for second in seconds]
        return np.array(seconds, dtype=np.float64), np.array(levels, dtype=np.float64)


def _num_measured(records: list[RequestRecord]) -> int:
    return sum(record.phase == Phase.MEASURE for record in records)


class GrowingFiles:
    """The JSONL files of one table, read as they grow."""

    def __init__(self, directory: Path, table: str) -> None:
        self._directory = directory
        self._table = table
        self._offsets: dict[Path, int] = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows appended since the last call; an incomplete line is left for the next call."""
        for path in sorted(self._directory.glob(f"{self._table}*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    yield json.loads(line)

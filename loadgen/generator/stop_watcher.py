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
from typing import Any

from loadgen.generator.stop_rules import InterimLooks, PartialRun, StopRule
from reports.run_schema import Phase, RequestRecord
from reports.run_store import REQUESTS, TIMESERIES, RunManifest, RunResult

INTERVAL_S = 0.5
logger = logging.getLogger(__name__)


class StopWatcher:
    """Evaluates the rules in a thread; calls `on_stop` once, with the reason."""

    def __init__(
        self, manifest: RunManifest, directory: Path, rules: tuple[StopRule, ...], on_stop: Callable[[str], None]
    ) -> None:
        self._manifest = manifest
        self._on_stop = on_stop
        self._rules = rules
        self._requests = GrowingFiles(directory, REQUESTS)
        self._timeseries = GrowingFiles(directory, TIMESERIES)
        self._records: list[RequestRecord] = []
        self._in_flight: dict[int, dict[int, float]] = defaultdict(dict)
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
                reason = self._look(looks)
            except Exception:
                logger.exception("the stop rules failed; the run continues without them")
                return
            if reason is not None:
                self._on_stop(reason)
                return

    def _look(self, looks: InterimLooks) -> str | None:
        self._records += (RequestRecord.from_json(row) for row in self._requests.rows())
        for row in self._timeseries.rows():
            self._in_flight[int(row["t_s"])][int(row.get("worker") or 0)] = float(row["in_flight"])
        measured = sum(record.phase == Phase.MEASURE for record in self._records)
        return looks.look(self._partial_run()) if measured >= looks.next_size else None

    def _partial_run(self) -> PartialRun:
        """The run up to the last end; requests in flight are not included."""
        import numpy as np

        from reports.metrics.measured import Measured

        end_s = max((record.t_end_ns or 0) for record in self._records) / 1e9
        manifest = dataclasses.replace(self._manifest, window_end_s=end_s)
        seconds = sorted(self._in_flight)
        levels = [sum(self._in_flight[second].values()) for second in seconds]
        measured = Measured.of(RunResult(manifest, self._records))
        return PartialRun(measured, (np.array(seconds, dtype=np.float64), np.array(levels, dtype=np.float64)))


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

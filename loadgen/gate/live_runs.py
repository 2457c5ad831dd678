"""One run of a side: launches its server, runs the load on it, reads the metrics of the stored run."""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from loadgen import runner
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import MeasurementError
from loadgen.gate.sides import LiveSide, RunningServer
from loadgen.generator.load_process import StartLoad
from loadgen.progress import ProgressDisplay
from loadgen.target.launched.contention import ProcessorTimes
from loadgen.target.target import Target
from reports.gate.side_run import SideRun
from reports.metrics.summary import analyse_run
from reports.run_store import load_manifest, write_manifest

ReadRun = Callable[[], SideRun]
"""Reads the metrics of a run that was measured before."""
Measure = Callable[[LiveSide, Path], SideRun]
"""Launches the server of a side for one run, stored in a directory."""


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A side's server that answers, and the load that is run on it."""

    side: LiveSide
    target: Target
    load: BenchConfig
    metrics: Sequence[str]
    progress: ProgressDisplay
    start_load: StartLoad | None = None

    @property
    def pid(self) -> int | None:
        """The process that was launched; None for a server that ran before."""
        return self.target.process.pid if self.target.process is not None else None

    def run(self, directory: Path, salt: str | None) -> SideRun:
        """One run of the load with its metrics, as `measured`."""
        return self.measured(directory, salt)()

    def measured(self, directory: Path, salt: str | None) -> ReadRun:
        """One run of the load; the salt selects its texts. Its metrics are read later.

        Raises MeasurementError if the server ends.
        """
        directory.mkdir(parents=True, exist_ok=True)
        labelled = self.load.model_copy(update={"label": self.side.label, "salt": salt})
        before = self._processor_times()
        runner.measure(labelled, self.target, directory, self.progress, start_load=self.start_load)
        after = self._processor_times()
        exit_code = self.target.process.exit_code if self.target.process is not None else None
        if exit_code is not None:
            raise MeasurementError(
                f"{self.side.label} ended with exit code {exit_code} during its run; log in {directory}"
            )
        if self.side.identity:
            manifest = load_manifest(directory)
            write_manifest(directory, replace(manifest, labels={**manifest.labels, **self.side.identity}))
        contention = after.contention_since(before) if before is not None and after is not None else None
        return lambda: replace(stored_run(directory, self.metrics), contention=contention)

    def _processor_times(self) -> ProcessorTimes | None:
        return None if self.pid is None else ProcessorTimes.of(self.pid)


@dataclass(frozen=True, slots=True)
class LiveMeasure:
    """A `Measure` with real servers; `base` keeps the texts of this command new to every server.

    start_load: of the load processes, if they are not new ones.
    """

    load: BenchConfig
    metrics: Sequence[str]
    progress: ProgressDisplay
    base: str = field(default_factory=lambda: secrets.token_hex(8))
    start_load: StartLoad | None = None

    def __call__(self, side: LiveSide, directory: Path) -> SideRun:
        """Both runs of a pair send the same texts, unless a server that is not restarted has them in its cache."""
        knows_texts = isinstance(side.server, RunningServer) and not self.load.reset_cache
        salt = self.load.salt or (None if knows_texts else f"{self.base}:{directory.name.split('-')[0]}")
        with self.launch(side, directory / "server.log") as server:
            return server.run(directory, salt)

    @contextlib.contextmanager
    def launch(self, side: LiveSide, log: Path) -> Iterator[LiveServer]:
        """The server of a side, for any number of runs. Raises StartError."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with side.server.open(self.load, log) as target:
            yield self.on(side, target)

    def on(self, side: LiveSide, target: Target) -> LiveServer:
        """The load on a server that answers."""
        return LiveServer(side, target, self.load, self.metrics, self.progress, self.start_load)

    def salt_of(self, text: str) -> str:
        """The salt of a part of a comparison, the same for both sides; with `salt` of the load it repeats."""
        return f"{self.load.salt or self.base}:{text}"


def live_measure(
    load: BenchConfig, metrics: Sequence[str], progress: ProgressDisplay, start_load: StartLoad | None = None
) -> LiveMeasure:
    """Runs of this load."""
    return LiveMeasure(load, metrics, progress, start_load=start_load)


def stored_run(directory: Path, metrics: Sequence[str]) -> SideRun:
    """The metrics of a run directory. Raises MeasurementError for an unknown metric."""
    try:
        return SideRun.of(load_manifest(directory), analyse_run(directory).summary, metrics, directory)
    except KeyError as error:
        raise MeasurementError(f"unknown metric {error}") from error

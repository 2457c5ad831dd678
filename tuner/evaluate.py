"""One trial: launch, warm, measure, stop. What goes wrong comes back as a value, never as a bare exception."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen import runner
from loadgen.config import BenchConfig
from loadgen.errors import LoadgenError, StartError
from loadgen.launch import find_launcher
from loadgen.progress import Progress
from loadgen.target import LaunchedTarget
from reference_server.config import ServerConfig
from reports.results import RunDirectoryError
from reports.summary import write_summary
from reports.validity import Level
from tuner.outcome import Failed, Infeasible, Measured, TrialOutcome, cause_of

EVENTS_FILE = "events.jsonl"
SERVER_LOG = "server.log"


@dataclass(frozen=True, slots=True)
class Bench:
    """How every trial of a study is measured."""

    load: BenchConfig
    ready_timeout_s: float
    progress: Progress


def command_of(config: ServerConfig) -> list[str]:
    """The launcher's command line for a configuration."""
    return [find_launcher(), *config.to_argv()]


def evaluate(config: ServerConfig, bench: Bench, directory: Path) -> TrialOutcome:
    """Measure one configuration on a fresh launch; everything it leaves lies in `directory`.

    A measurement that metrics.md section 11 calls invalid says nothing about the configuration: `Failed`.
    """
    events = Events(directory / EVENTS_FILE)
    launched = LaunchedTarget(
        command_of(config),
        directory / SERVER_LOG,
        ready_timeout_s=bench.ready_timeout_s,
        environment=config.to_environ(),
    )
    process = launched.process
    try:
        events.begin("launching", command=process.command)
        with launched as target:
            events.begin("measuring")
            died: int | None = None
            try:
                run = runner.run(bench.load, target, directory / "run", bench.progress)
            except LoadgenError as error:
                died = process.exit_code
                if died is None:
                    return Failed(str(error))
                return Infeasible(
                    "measure", cause_of(process.log_tail(), exit_code=died), str(error), process.log_tail()
                )
            died = process.exit_code
            events.begin("stopping")
    except StartError as error:
        code = process.exit_code
        cause = "timeout" if "not ready after" in str(error) else cause_of(error.log_tail, exit_code=code)
        return Infeasible("launch", cause, str(error).splitlines()[0], error.log_tail)
    except (LoadgenError, RunDirectoryError, OSError) as error:
        return Failed(str(error))
    finally:
        events.begin("stopped")
    if died is not None:
        reason = f"the server ended with exit code {died} while it was measured"
        return Infeasible("measure", cause_of(process.log_tail(), exit_code=died), reason, process.log_tail())
    assert run.directory is not None
    return judged(run.directory)


def judged(run: Path) -> Measured | Failed:
    """A finished run as an outcome; an invalid one is a fault of the measurement."""
    summary = write_summary(run)
    verdict = summary["verdict"]
    if verdict["status"] == Level.INVALID:
        return Failed("invalid run: " + "; ".join(reason["message"] for reason in verdict["reasons"]))
    return Measured(run, summary)


@dataclass(slots=True)
class Events:
    """The steps of a trial with their times, each written before it begins."""

    path: Path
    _start_s: float = field(default_factory=time.monotonic)

    def begin(self, step: str, **facts: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row: Mapping[str, Any] = {"t_s": round(time.monotonic() - self._start_s, 3), "step": step, **facts}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

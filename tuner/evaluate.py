"""One attempt at a configuration: launch, warm, measure, stop. What goes wrong comes back as a value."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadgen import runner
from loadgen.config import BenchConfig
from loadgen.errors import LoadgenError, StartError
from loadgen.launch import LaunchedProcess
from loadgen.progress import Progress
from loadgen.target import LaunchedTarget
from reference_server.config import ServerConfig
from reports.results import RunDirectoryError
from reports.summary import metric_value, write_summary
from reports.validity import Level
from tuner.config import ServerSection
from tuner.device_lock import GpuMemory, device_lock
from tuner.early_stop import early_reason, stopping_early
from tuner.errors import DeviceBusyError
from tuner.outcome import Failed, Infeasible, Measured, TrialOutcome, cause_of, is_memory_death
from tuner.standing import StandingShards
from tuner.targets import Launch, launch_of, remove_container

EVENTS_FILE = "events.jsonl"
SERVER_LOG = "server.log"
STEPS_FILE = "steps.jsonl"
NOT_READY = "not ready after"
KILLED = (-9, 137)


@dataclass(frozen=True, slots=True)
class Bench:
    """How every trial of a study is measured: under which load, on which target.

    `limits` are bounds that end a run which surely misses them; `standing` keeps model servers between trials that
    differ in the router alone, where there is one. `with_steps` has the server leave a step trace for the simulator.
    """

    load: BenchConfig
    ready_timeout_s: float
    progress: Progress
    server: ServerSection = field(default_factory=ServerSection)
    limits: tuple[str, ...] = ()
    standing: StandingShards | None = None
    with_steps: bool = False

    @property
    def fresh(self) -> "Bench":
        """The same, with a fresh launch each time: what confirmation asks for."""
        return replace(self, standing=None, with_steps=False)


def evaluate(config: ServerConfig, bench: Bench, directory: Path) -> TrialOutcome:
    """Measure one configuration; everything it leaves lies in `directory`.

    A measurement that metrics.md section 11 calls invalid says nothing about the configuration: `Failed`.
    """
    events = Events(directory / EVENTS_FILE)
    if bench.with_steps:
        config = ServerConfig.model_validate(config.model_dump() | {"step_trace": directory.resolve() / STEPS_FILE})
    launch = launch_of(bench.server, config, directory)
    try:
        with device_lock(bench.server.gpus, bench.progress.say):
            memory = GpuMemory(bench.server.gpus)
            try:
                return _measured(config, launch, bench, directory, events)
            finally:
                remove_container(launch.container)
                if bench.standing is None:
                    memory.wait_until_back()
                events.begin("stopped")
    except DeviceBusyError:
        raise
    except (LoadgenError, RunDirectoryError, OSError) as error:
        return Failed(str(error))


def _measured(config: ServerConfig, launch: Launch, bench: Bench, directory: Path, events: "Events") -> TrialOutcome:
    events.begin("launching", command=list(launch.command))
    standing = bench.standing
    log = directory / SERVER_LOG
    process: LaunchedProcess | None = None
    try:
        if standing is not None:
            launch = standing.launch_for(config, launch, directory)
            events.begin("launching", command=list(launch.command), model_server=standing.state)
        launched = LaunchedTarget(
            launch.command, log, ready_timeout_s=bench.ready_timeout_s, environment=launch.environment
        )
        process = launched.process
        with launched as target:
            events.begin("warming")
            fault, run = "", None
            try:
                with events.later("measuring", bench.load.warmup or 0.0):
                    run = runner.run(stopping_early(bench), target, directory / "run", bench.progress).directory
            except LoadgenError as error:
                fault = str(error)
            died = _end_of(process.exit_code, standing)
            events.begin("stopping")
    except StartError as error:
        tail = "\n".join(filter(None, (error.log_tail, standing.log_tail() if standing is not None else "")))
        code = _end_of(process.exit_code if process is not None else None, standing)
        if standing is not None:
            standing.stop()
        is_late = NOT_READY in str(error)
        return Infeasible("launch", "timeout" if is_late else cause_of(tail, exit_code=code), first_line(error), tail)
    tail = "\n".join(filter(None, (process.log_tail(), standing.log_tail() if standing is not None else "")))
    if died is not None:
        if standing is not None:
            standing.stop()
        reason = f"the server ended with exit code {died} while it was measured"
        # The system kills what takes more memory than there is.
        cause = "memory" if died in KILLED else cause_of(tail, exit_code=died)
        return Infeasible("measure", cause, reason, tail)
    if run is None:
        return Failed(fault)
    return judged(run, events, tail)


def _end_of(code: int | None, standing: StandingShards | None) -> int | None:
    """The exit code of whatever has ended: the server's, or that of the model server behind it."""
    return code if code is not None or standing is None else standing.exit_code


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def judged(run: Path, events: "Events | None" = None, log_tail: str = "") -> Measured | Infeasible | Failed:
    """A finished run as an outcome; an invalid one is a fault of the measurement, if the server did not cause it."""
    summary = write_summary(run)
    verdict = summary["verdict"]
    steps = events.seconds() if events is not None else {}
    if metric_value(summary, "error_rate", is_open_loop=False) and is_memory_death(log_tail):
        return Infeasible("measure", "memory", "requests failed and the server ran out of memory", log_tail)
    stopped = early_reason(run)
    if not stopped and verdict["status"] == Level.INVALID:
        return Failed("invalid run: " + "; ".join(reason["message"] for reason in verdict["reasons"]), is_invalid=True)
    return Measured(run, summary, steps, stopped)


@dataclass(slots=True)
class Events:
    """The steps of a trial with their times, each written before it begins."""

    path: Path
    _start_s: float = field(default_factory=time.monotonic)
    _begun: list[tuple[str, float]] = field(default_factory=list)

    def begin(self, step: str, **facts: Any) -> None:
        now_s = time.monotonic() - self._start_s
        self._begun.append((step, now_s))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row: Mapping[str, Any] = {"t_s": round(now_s, 3), "at": round(time.time(), 3), "step": step, **facts}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @contextmanager
    def later(self, step: str, delay_s: float) -> Iterator[None]:
        """Begin a step after a while, unless what is inside ends before."""
        timer = threading.Timer(delay_s, self.begin, (step,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def seconds(self) -> dict[str, float]:
        """How long each step has taken that has ended."""
        found: dict[str, float] = {}
        now_s = time.monotonic() - self._start_s
        for (step, begun_s), (_, ended_s) in pairwise([*self._begun, ("now", now_s)]):
            found[step] = round(found.get(step, 0.0) + ended_s - begun_s, 3)
        return found

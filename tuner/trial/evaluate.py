"""One attempt at a configuration: launch, warm up, measure, stop. Failures are returned as values."""

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
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import LoadgenError, StartError
from loadgen.progress import ProgressDisplay
from loadgen.target.launch import LaunchedProcess
from loadgen.target.target import LaunchedTarget
from reference_server.config import ServerConfig
from reports.metrics.summary import analyse_run, metric_value
from reports.metrics.validity import Level
from reports.run_store import RunDirectoryError
from tuner.config import ServerSection
from tuner.errors import DeviceBusyError
from tuner.servers.launch_command import LaunchCommand, launch_command_of, remove_container
from tuner.trial.device_lock import GpuMemory, device_lock
from tuner.trial.early_stop import early_reason, with_stop_rules
from tuner.trial.outcome import AttemptOutcome, Failed, Infeasible, MeasuredAttempt, cause_of, is_out_of_memory
from tuner.trial.warm_shards import WarmShards

EVENTS_FILE = "events.jsonl"
SERVER_LOG = "server.log"
STEPS_FILE = "steps.jsonl"
NOT_READY = "not ready after"
KILLED = (-9, 137)
STUDY_SALT = "study"


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """The load and the target of every trial of a study.

    `bounds` end a run that certainly misses a limit. `warm_shards` keeps the model server between trials that differ in
    router settings only, if set. `with_steps` records a step trace for the simulator.
    """

    load: BenchConfig
    ready_timeout_s: float
    progress: ProgressDisplay
    server: ServerSection = field(default_factory=ServerSection)
    bounds: tuple[str, ...] = ()
    warm_shards: WarmShards | None = None
    with_steps: bool = False

    @property
    def fresh(self) -> "TrialSetup":
        """The setup of confirming launches: without warm shards and step traces."""
        return replace(self, warm_shards=None, with_steps=False)


def evaluate(config: ServerConfig, setup: TrialSetup, directory: Path) -> AttemptOutcome:
    """Measure one configuration; its files are in `directory`. An invalid measurement is `Failed`.

    Raises DeviceBusyError.
    """
    events = Events(directory / EVENTS_FILE)
    if setup.with_steps:
        config = ServerConfig.model_validate(config.model_dump() | {"step_trace": directory.resolve() / STEPS_FILE})
    launch = launch_command_of(setup.server, config, directory)
    try:
        with device_lock(setup.server.gpus, setup.progress.show):
            memory = GpuMemory(setup.server.gpus)
            try:
                return _measured(config, launch, setup, directory, events)
            finally:
                remove_container(launch.container)
                if setup.warm_shards is None:
                    memory.wait_until_freed()
                events.begin("stopped")
    except DeviceBusyError:
        raise
    except (LoadgenError, RunDirectoryError, OSError) as error:
        return Failed(str(error))


def _measured(
    config: ServerConfig, launch: LaunchCommand, setup: TrialSetup, directory: Path, events: "Events"
) -> AttemptOutcome:
    events.begin("launching", command=list(launch.command))
    warm_shards = setup.warm_shards
    log = directory / SERVER_LOG
    process: LaunchedProcess | None = None
    try:
        if warm_shards is not None:
            launch = warm_shards.launch_for(config, launch, directory)
            events.begin("launching", command=list(launch.command), model_server=warm_shards.state)
        launched = LaunchedTarget(
            launch.command, log, ready_timeout_s=setup.ready_timeout_s, environment=launch.environment
        )
        process = launched.process
        with launched as target:
            events.begin("warming")
            fault, run = "", None
            try:
                with events.later("measuring", setup.load.warmup or 0.0):
                    run = runner.measure(
                        with_stop_rules(_salted(setup.load), setup.bounds), target, directory / "run", setup.progress
                    ).directory
            except LoadgenError as error:
                fault = str(error)
            exit_code = _exit_code(process.exit_code, warm_shards)
            events.begin("stopping")
    except StartError as error:
        tail = "\n".join(filter(None, (error.log_tail, warm_shards.log_tail() if warm_shards is not None else "")))
        code = _exit_code(process.exit_code if process is not None else None, warm_shards)
        if warm_shards is not None:
            warm_shards.stop()
        is_late = NOT_READY in str(error)
        return Infeasible("launch", "timeout" if is_late else cause_of(tail, exit_code=code), first_line(error), tail)
    tail = "\n".join(filter(None, (process.log_tail(), warm_shards.log_tail() if warm_shards is not None else "")))
    if exit_code is not None:
        if warm_shards is not None:
            warm_shards.stop()
        reason = f"the server ended with exit code {exit_code} during the measurement"
        # The kernel kills a process when memory is exhausted.
        cause = "memory" if exit_code in KILLED else cause_of(tail, exit_code=exit_code)
        return Infeasible("measure", cause, reason, tail)
    if run is None:
        return Failed(fault)
    return outcome_of(run, events, tail)


def _salted(load: BenchConfig) -> BenchConfig:
    """Every trial has a new server, so all of them send the same texts."""
    return load if load.salt is not None else load.model_copy(update={"salt": STUDY_SALT})


def _exit_code(code: int | None, warm_shards: WarmShards | None) -> int | None:
    """The exit code of the server, or of its warm model server; None while both run."""
    return code if code is not None or warm_shards is None else warm_shards.exit_code


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def outcome_of(run: Path, events: "Events | None" = None, log_tail: str = "") -> MeasuredAttempt | Infeasible | Failed:
    """The outcome of a finished run. An invalid run is `Failed`, unless the server ran out of memory."""
    summary = analyse_run(run).summary
    verdict = summary["verdict"]
    steps = events.seconds() if events is not None else {}
    if metric_value(summary, "error_rate", is_open_loop=False) and is_out_of_memory(log_tail):
        return Infeasible("measure", "memory", "requests failed and the server ran out of memory", log_tail)
    stopped = early_reason(run)
    if not stopped and verdict["status"] == Level.INVALID:
        return Failed("invalid run: " + "; ".join(reason["message"] for reason in verdict["reasons"]), is_invalid=True)
    return MeasuredAttempt(run, summary, steps, stopped)


@dataclass(slots=True)
class Events:
    """The steps of a trial; each is written to the file with its time before it begins."""

    path: Path
    _start_s: float = field(default_factory=time.monotonic)
    _steps: list[tuple[str, float]] = field(default_factory=list)

    def begin(self, step: str, **facts: Any) -> None:
        now_s = time.monotonic() - self._start_s
        self._steps.append((step, now_s))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row: Mapping[str, Any] = {"t_s": round(now_s, 3), "at": round(time.time(), 3), "step": step, **facts}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @contextmanager
    def later(self, step: str, delay_s: float) -> Iterator[None]:
        """Begin a step after a delay, unless the block ends before."""
        timer = threading.Timer(delay_s, self.begin, (step,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def seconds(self) -> dict[str, float]:
        """Seconds of each step."""
        found: dict[str, float] = {}
        now_s = time.monotonic() - self._start_s
        for (step, start_s), (_, end_s) in pairwise([*self._steps, ("now", now_s)]):
            found[step] = round(found.get(step, 0.0) + end_s - start_s, 3)
        return found

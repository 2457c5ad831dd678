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
from loadgen.target.launched.launch import LaunchedProcess
from reports.metrics.checks.findings import NO_STEADY_STATE, Level
from reports.metrics.summary import analyse_run, metric_value
from reports.run_store import RunDirectoryError
from tuner.config import ServerSection
from tuner.errors import DeviceBusyError
from tuner.servers.launch_command import LaunchCommand, remove_container
from tuner.servers.select import server_of
from tuner.servers.tuned_server import TunedServer, WarmParts
from tuner.trial.device_lock import GpuMemory, device_lock
from tuner.trial.early_stop import early_reason, with_stop_rules
from tuner.trial.outcome import AttemptOutcome, Failed, Infeasible, MeasuredAttempt
from tuner.trial.step_probe import probe_steps

EVENTS_FILE = "events.jsonl"
SERVER_LOG = "server.log"
STEPS_FILE = "steps.jsonl"
NOT_READY = "not ready after"
KILLED = (-9, 137)
STUDY_SALT = "study"


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """The load and the target of every trial of a study.

    bounds: a run ends early if it certainly misses one. warm: part of the server that keeps running between trials.
    with_steps: record a step trace for the simulator.
    """

    load: BenchConfig
    ready_timeout_s: float
    progress: ProgressDisplay
    server: TunedServer = field(default_factory=lambda: server_of(ServerSection()))
    bounds: tuple[str, ...] = ()
    warm: WarmParts | None = None
    with_steps: bool = False

    @property
    def fresh(self) -> "TrialSetup":
        """The setup of confirming launches: the whole server is started, without a step trace."""
        return replace(self, warm=None, with_steps=False)


def evaluate(settings: Mapping[str, Any], setup: TrialSetup, directory: Path) -> AttemptOutcome:
    """Measure one configuration and write its files to `directory`. An invalid measurement is `Failed`.

    Raises DeviceBusyError.
    """
    events = Events(directory / EVENTS_FILE)
    steps = directory / STEPS_FILE if setup.with_steps else None
    launch = setup.server.launch(settings, directory, steps)
    gpus = setup.server.section.gpus
    try:
        with device_lock(gpus, setup.progress.show):
            memory = GpuMemory(gpus)
            try:
                return _measured(settings, launch, setup, directory, events, steps)
            finally:
                remove_container(launch.container)
                if setup.warm is None:
                    memory.wait_until_freed()
                events.begin("stopped")
    except DeviceBusyError:
        raise
    except (LoadgenError, RunDirectoryError, OSError) as error:
        return Failed(str(error))


def _measured(
    settings: Mapping[str, Any],
    launch: LaunchCommand,
    setup: TrialSetup,
    directory: Path,
    events: "Events",
    steps: Path | None,
) -> AttemptOutcome:
    events.begin("launching", command=list(launch.command))
    server, warm = setup.server, setup.warm
    log = directory / SERVER_LOG
    process: LaunchedProcess | None = None
    try:
        if warm is not None:
            launch = warm.launch_for(settings, launch, directory, steps)
            events.begin("launching", command=list(launch.command), model_server=warm.state)
        launched = launch.target(log, setup.ready_timeout_s)
        process = launched.process
        with launched as target:
            events.begin("warming")
            fault, run = "", None
            try:
                if steps is not None:
                    probe_steps(target, setup.load, settings, setup.progress)
                with events.later("measuring", setup.load.warmup or 0.0):
                    run = runner.measure(
                        with_stop_rules(_salted(setup.load), setup.bounds), target, directory / "run", setup.progress
                    ).directory
            except LoadgenError as error:
                fault = str(error)
            exit_code = _exit_code(process.exit_code, warm)
            events.begin("stopping")
    except StartError as error:
        tails = (error.log_tail, warm.log_tail() if warm is not None else "")
        tail = _with_failure("\n".join(filter(None, tails)), server, log)
        code = _exit_code(process.exit_code if process is not None else None, warm)
        if warm is not None:
            warm.stop()
        is_late = NOT_READY in str(error)
        return Infeasible(
            "launch", "timeout" if is_late else server.cause_of(tail, exit_code=code), first_line(error), tail
        )
    tail = "\n".join(filter(None, (process.log_tail(), warm.log_tail() if warm is not None else "")))
    if exit_code is not None:
        if warm is not None:
            warm.stop()
        tail = _with_failure(tail, server, log)
        reason = f"the server ended with exit code {exit_code} during the measurement"
        # The kernel kills a process when memory is exhausted.
        cause = "memory" if exit_code in KILLED else server.cause_of(tail, exit_code=exit_code)
        return Infeasible("measure", cause, reason, tail)
    if run is None:
        return Failed(fault)
    return outcome_of(run, server, events, tail, log)


def _salted(load: BenchConfig) -> BenchConfig:
    """The load with a constant salt: trials can send equal prompts, because each has a new server."""
    return load if load.salt is not None else load.model_copy(update={"salt": STUDY_SALT})


def _exit_code(code: int | None, warm: WarmParts | None) -> int | None:
    """The exit code of the server, or of its warm part; None while both are running."""
    return code if code is not None or warm is None else warm.exit_code


def _with_failure(tail: str, server: TunedServer, log: Path) -> str:
    """The end of a log, followed by its line with the cause: some servers end with the traceback of another process."""
    line = server.failure_line(log.read_text(errors="replace")) if log.exists() else None
    return tail if line is None else f"{tail}\n{line}"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def outcome_of(
    run: Path, server: TunedServer, events: "Events | None" = None, log_tail: str = "", log: Path | None = None
) -> MeasuredAttempt | Infeasible | Failed:
    """The outcome of a finished run. An invalid run is `Failed`, unless the server ran out of memory."""
    summary = analyse_run(run).summary
    verdict = summary["verdict"]
    steps = events.seconds() if events is not None else {}
    is_out_of_memory = server.cause_of(log_tail, exit_code=None) == "memory"
    if metric_value(summary, "error_rate", is_open_loop=False) and is_out_of_memory:
        return Infeasible("measure", "memory", "requests failed and the server ran out of memory", log_tail)
    stopped = early_reason(run)
    if not stopped and verdict["status"] == Level.INVALID:
        why = "; ".join(reason["message"] for reason in verdict["reasons"])
        is_unsteady = any(reason["check"] == NO_STEADY_STATE for reason in verdict["reasons"])
        return Failed(f"invalid run: {why}", is_invalid=True, is_unsteady=is_unsteady)
    facts = server.facts_of(log.read_text(errors="replace")) if log is not None and log.exists() else {}
    return MeasuredAttempt(run, summary, steps, stopped, facts)


@dataclass(slots=True)
class Events:
    """The steps of a trial. Each is written to the file with its time when it begins."""

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
        """Begin a step after a delay, unless the block ends earlier."""
        timer = threading.Timer(delay_s, self.begin, (step,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def seconds(self) -> dict[str, float]:
        """Duration of each step, in seconds."""
        found: dict[str, float] = {}
        now_s = time.monotonic() - self._start_s
        for (step, start_s), (_, end_s) in pairwise([*self._steps, ("now", now_s)]):
            found[step] = round(found.get(step, 0.0) + end_s - start_s, 3)
        return found

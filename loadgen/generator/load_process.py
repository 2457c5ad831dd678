"""The process that makes a load, one worker or the master of several: starts it, reads its messages, stops it."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from loadgen.config.distribution import Distribution
from loadgen.errors import WorkerError
from loadgen.generator.worker_messages import END_SIGNAL, STOP_REQUESTED, STOP_SIGNAL, WorkerPlan
from loadgen.progress import ProgressDisplay

WORKER_LOG = "worker.log"
LOG_TAIL_LINES = 20


class RunningLoad(Protocol):
    """The part of `Popen` that a load process needs."""

    @property
    def stdout(self) -> IO[bytes] | None: ...

    @property
    def returncode(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: signal.Signals, /) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


StartLoad = Callable[[WorkerPlan, Distribution, Path], RunningLoad]


class LoadProcess:
    """Runs one load. `on_started` is called with the start time (monotonic ns) when the load begins.

    start: of the process; by default a new one, as `start_load` does.
    `end` is the final message; None if the process died. `failure` is the reason why it made no load.
    """

    def __init__(
        self, progress: ProgressDisplay, on_started: Callable[[int], None], start: StartLoad | None = None
    ) -> None:
        self._progress = progress
        self._on_started = on_started
        self._start = start
        self._process: RunningLoad | None = None
        self._requested_reason: str | None = None
        self.is_finish_requested = False
        self.started: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        self.failure: str | None = None

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    @property
    def stop_reason(self) -> str | None:
        if self.end is None:
            return "interrupted" if self.is_finish_requested else "worker_lost"
        reason = self.end.get("stop_reason")
        return self._requested_reason if reason == STOP_REQUESTED and self._requested_reason else reason

    def run(self, plan: WorkerPlan, distribution: Distribution, out: Path) -> None:
        """Start the process and read its messages until it ends. Raises WorkerError if it does not start."""
        process = self._process = (self._start or start_load)(plan, distribution, out)
        assert process.stdout is not None
        try:
            if self.is_finish_requested:
                process.terminate()
            for line in process.stdout:
                self._read(json.loads(line))
            process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()

    def finish(self) -> None:
        """Send nothing more, wait for requests in flight, end."""
        self.is_finish_requested = True
        if self._process is not None:
            self._process.terminate()

    def stop(self, reason: str) -> None:
        """As `finish`, for a reason that goes into the manifest; the first reason stays."""
        self._send(STOP_SIGNAL, reason)

    def end_window(self, reason: str) -> None:
        """End the window for a reason that goes into the manifest; the load goes on through the drain."""
        self._send(END_SIGNAL, reason)

    def _send(self, number: signal.Signals, reason: str) -> None:
        self._requested_reason = self._requested_reason or reason
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _read(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "started":
                self.started = message
                self._on_started(message["start_ns"])
            case "progress":
                self._progress.update(message)
            case "notice":
                self._progress.show(message["text"])
            case "failed":
                self.failure = message["text"]
            case "done":
                self.end = message


def start_load(plan: WorkerPlan, distribution: Distribution, out: Path) -> RunningLoad:
    """Start the one worker, or the master of several."""
    if distribution.is_alone:
        return _start_process("loadgen.generator.worker", plan.to_json(), out)
    return _start_process(
        "loadgen.generator.distributed.master", {"plan": plan.to_json(), "distribution": distribution.to_json()}, out
    )


def _start_process(module: str, plan: Mapping[str, Any], out: Path) -> "subprocess.Popen[bytes]":
    """Start a module in its own session, so that Ctrl-C reaches it only through this process."""
    with (out / WORKER_LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(plan).encode())
        process.stdin.close()
    except OSError as error:
        process.kill()
        process.wait()
        raise WorkerError(f"the load generator's process did not start\n{log_tail(out)}") from error
    return process


def log_tail(out: Path) -> str:
    """The last lines of the load processes' log."""
    try:
        return "\n".join((out / WORKER_LOG).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
    except OSError:
        return ""

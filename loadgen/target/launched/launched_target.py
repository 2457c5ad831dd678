"""A target that is started for a run: its command, the wait until it answers, and its stop."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loadgen.errors import StartError, TargetError
from loadgen.target.access import NO_ACCESS, Access
from loadgen.target.control import ControlClient
from loadgen.target.launched.file_cache import NATURAL, FileCache
from loadgen.target.launched.launch import LaunchedProcess, split_command
from loadgen.target.target import StartUp, Target

POLL_S = 0.05
REPORT_WAIT_EVERY_S = 5.0

OnWait = Callable[[float], None]


class LaunchedTarget:
    """Starts a server command, waits until it answers, and stops it when the context ends.

    >>> with LaunchedTarget(["text-generation-launcher"], log=Path("server.log")) as target:  # doctest: +SKIP
    ...     runner.measure(config, target, out)

    Raises StartError, with the end of the log, if the server ends or is not ready in time.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        log: Path,
        *,
        chosen: Sequence[str] = (),
        ready_timeout_s: float = 600.0,
        api: str = "auto",
        access: Access = NO_ACCESS,
        environment: Mapping[str, str] | None = None,
        on_wait: OnWait | None = None,
        ready_route: str = "/health",
        file_cache: FileCache = NATURAL,
    ) -> None:
        self.process = LaunchedProcess(split_command(command), log, environment)
        self._chosen = tuple(chosen)
        self._ready_timeout_s = ready_timeout_s
        self._api = api
        self._access = access
        self._on_wait = on_wait
        self._ready_route = ready_route
        self._file_cache = file_cache

    def __enter__(self) -> Target:
        try:
            return self._start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if getattr(error, "is_urgent", False):
            self.process.kill()
        else:
            self.process.stop()

    def _start(self) -> Target:
        deadline_s = time.monotonic() + self._ready_timeout_s
        while True:
            file_cache = self._file_cache.prepare()
            launched_s = time.monotonic()
            self.process.start()
            target = Target(
                self.process.url, self._access, tuple(self.process.argv), self._chosen, process=self.process
            )
            try:
                ready_s, first_token_s = self._wait_ready(target, deadline_s)
            except StartError:
                if self.process.port_was_taken and self.process.attempts_left:
                    self.process.kill()
                    continue
                raise
            return replace(target, start_up=StartUp(ready_s - launched_s, first_token_s - launched_s, file_cache))

    def _wait_ready(self, target: Target, deadline_s: float) -> tuple[float, float]:
        """Poll the route of readiness, then generate one token. Returns when each was answered (monotonic s)."""
        control = target.control()
        try:
            return self._poll(target, control, deadline_s)
        finally:
            control.close()

    def _poll(self, target: Target, control: ControlClient, deadline_s: float) -> tuple[float, float]:
        reported_s = started_s = time.monotonic()
        ready_s: float | None = None
        problem = "it does not listen"
        while True:
            self.process.check_alive()
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise StartError(
                    f"the server was not ready after {self._ready_timeout_s:g} s: {problem}", self.process.log_tail()
                )
            if self._on_wait is not None and now_s - reported_s >= REPORT_WAIT_EVERY_S:
                reported_s = now_s
                self._on_wait(now_s - started_s)
            try:
                status, _ = control.get(self._ready_route, timeout_s=5.0)
                if status in (200, 404):
                    ready_s = ready_s or time.monotonic()
                    target.generate_once(self._api)
                    # Another server may have answered if this one could not bind its port.
                    self.process.check_alive()
                    return ready_s, time.monotonic()
                problem = f"{self._ready_route} answers {status}"
            except TargetError as error:
                problem = str(error)
            time.sleep(POLL_S)

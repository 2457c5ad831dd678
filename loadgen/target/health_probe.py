"""Polls the health route of the server under load; a run ends when the server no longer answers."""

import threading
from collections.abc import Callable

from loadgen.errors import TargetError
from loadgen.target.control import ControlClient

INTERVAL_S = 1.0
TIMEOUT_S = 5.0
ROUTE = "/health"


class HealthProbe:
    """Polls once a second from a thread; calls `on_unhealthy` once, after `limit` failures in a row.

    Does not poll if the first answer is not 200, or if `limit` is 0.
    """

    def __init__(self, control: ControlClient, limit: int, on_unhealthy: Callable[[], None]) -> None:
        self._control = control
        self._limit = limit
        self._on_unhealthy = on_unhealthy
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        if self._limit and self._is_healthy():
            self._thread.start()

    def finish(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2 * TIMEOUT_S)
        self._control.close()

    def _run(self) -> None:
        failures = 0
        while not self._stop.wait(INTERVAL_S):
            failures = 0 if self._is_healthy() else failures + 1
            if failures >= self._limit:
                self._on_unhealthy()
                return

    def _is_healthy(self) -> bool:
        try:
            status, _ = self._control.get(ROUTE, timeout_s=TIMEOUT_S)
        except TargetError:
            return False
        return status == 200

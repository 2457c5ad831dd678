"""Whether the server under load still answers its health route; a run is ended when it no longer does."""

import signal
import threading
from collections.abc import Callable

from loadgen.control import ControlClient
from loadgen.errors import TargetError

INTERVAL_S = 1.0
TIMEOUT_S = 5.0
ROUTE = "/health"
# What the worker is sent to end its load, and the reason it then gives; who sent it knows the true one.
UNHEALTHY_SIGNAL = signal.SIGUSR1
ASKED_TO_STOP = "server_unhealthy"


class HealthProbe:
    """Asks once a second from a thread; calls `on_unhealthy` once, after `limit` failures in a row.

    A server that has no such route, or is not healthy to begin with, is left alone, as is any with a limit of 0.
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

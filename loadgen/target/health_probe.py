"""Polls a health route of the server under load; a run ends when the server no longer answers."""

import threading
from collections.abc import Callable, Sequence

from loadgen.errors import TargetError
from loadgen.target.control import ControlClient

INTERVAL_S = 1.0
TIMEOUT_S = 5.0


class HealthProbe:
    """Polls once a second from a thread; calls `on_unhealthy` with the route once, after `limit` failures in a row.

    The route is the first of `routes` whose first answer is 200. Does not poll without one, or if `limit` is 0.
    """

    def __init__(
        self,
        control: ControlClient,
        limit: int,
        on_unhealthy: Callable[[str], None],
        routes: Sequence[str] = ("/health",),
    ) -> None:
        self._control = control
        self._routes = tuple(routes)
        self._route: str | None = None
        self._limit = limit
        self._on_unhealthy = on_unhealthy
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        if not self._limit:
            return
        self._route = next((route for route in self._routes if self._is_healthy(route)), None)
        if self._route is not None:
            self._thread.start()

    def finish(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2 * TIMEOUT_S)
        self._control.close()

    def _run(self) -> None:
        route = self._route or ""
        failures = 0
        while not self._stop.wait(INTERVAL_S):
            failures = 0 if self._is_healthy(route) else failures + 1
            if failures >= self._limit:
                self._on_unhealthy(route)
                return

    def _is_healthy(self, route: str) -> bool:
        try:
            status, _ = self._control.get(route, timeout_s=TIMEOUT_S)
        except TargetError:
            return False
        return status == 200

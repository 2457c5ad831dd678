"""Ctrl-C and SIGTERM during a run: the first lets it finish, the second ends it at once."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived. `is_urgent`: a second one arrived. `note`: the message of the command it ended."""

    note: str = ""

    def __init__(self, number: signal.Signals, *, is_urgent: bool = False) -> None:
        super().__init__(number.name)
        self.number = number
        self.is_urgent = is_urgent

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.number]


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
    """Set the message of a signal that ends the context, unless it has one."""
    try:
        yield
    except Interrupted as interrupted:
        interrupted.note = interrupted.note or note
        raise


def raise_on_signals() -> None:
    """Make SIGINT and SIGTERM raise `Interrupted` in the main thread."""
    for number in EXIT_CODES:
        signal.signal(number, _raise)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(signal.Signals(number))


class TwoStageInterrupt:
    """Within the context, the first signal calls `on_first`; the second calls `on_second` and raises `Interrupted`.

    Does nothing outside the main thread, where handlers cannot be set.
    """

    def __init__(self, on_first: Callable[[], None], on_second: Callable[[], None]) -> None:
        self.first: signal.Signals | None = None
        self._on_first = on_first
        self._on_second = on_second
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in EXIT_CODES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self.first is None:
            self.first = received
            self._on_first()
            return
        self._on_second()
        raise Interrupted(received, is_urgent=True)

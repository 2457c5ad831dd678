"""SIGINT, SIGTERM and SIGHUP: one handler for the whole process, whose receiver changes with the phase."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave(_: signal.Signals) -> None:
    """Exit with 0, while no process is started."""
    sys.exit(0)


def ignore(_: signal.Signals) -> None:
    """Do nothing, when all processes are stopped."""


class StopSignals:
    """Passes stop signals to a receiver."""

    def __init__(self) -> None:
        self._receiver: Callable[[signal.Signals], object] = ignore

    @contextlib.contextmanager
    def received_by(self, receiver: Callable[[signal.Signals], object]) -> Iterator[None]:
        """Pass signals to `receiver`, which runs in the main thread; afterwards ignore them."""
        self._receiver = receiver
        try:
            yield
        finally:
            self._receiver = ignore

    def handle(self, number: int, _: FrameType | None) -> None:
        self._receiver(signal.Signals(number))


@contextlib.contextmanager
def stop_signals(is_program: bool) -> Iterator[StopSignals]:
    """Handle stop signals, first by exiting; at the end restore the previous handlers.

    is_program: the process ends afterwards, so signals stay ignored; one during the interpreter's exit would kill it.
    """
    signals = StopSignals()
    previous = {number: signal.signal(number, signals.handle) for number in STOP_SIGNALS}
    try:
        with signals.received_by(leave):
            yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if is_program else handler)

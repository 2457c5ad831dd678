"""SIGINT, SIGTERM and SIGHUP: one handler for the life of the process, whose receiver changes with the phase."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave(_: signal.Signals) -> None:
    """Nothing is started yet: end with 0."""
    sys.exit(0)


def ignore(_: signal.Signals) -> None:
    """Everything is stopped: the exit status is decided."""


class StopSignals:
    """Where a stop signal goes."""

    def __init__(self) -> None:
        self._receiver: Callable[[signal.Signals], object] = ignore

    @contextlib.contextmanager
    def received_by(self, receiver: Callable[[signal.Signals], object]) -> Iterator[None]:
        """Signals go to `receiver`, in the main thread between two instructions; afterwards they are ignored."""
        self._receiver = receiver
        try:
            yield
        finally:
            self._receiver = ignore

    def handle(self, number: int, _: FrameType | None) -> None:
        self._receiver(signal.Signals(number))


@contextlib.contextmanager
def stop_signals(is_program: bool) -> Iterator[StopSignals]:
    """Handle stop signals, first by leaving; at the end put back what was there.

    Where the program itself ends here they are ignored: the interpreter's last moments would turn one into a death.
    """
    signals = StopSignals()
    previous = {number: signal.signal(number, signals.handle) for number in STOP_SIGNALS}
    try:
        with signals.received_by(leave):
            yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if is_program else handler)

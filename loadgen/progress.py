"""Progress of a run on stderr: one updated line on a terminal, plain lines elsewhere, nothing if quiet."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from loadgen.config.parsing import environment
from loadgen.terminal.progress_line import MOST_COLUMNS, Position, RunLength, clock, plain_line, terminal_line
from reports.text import plain_text

if TYPE_CHECKING:
    from rich.text import Text

PLAIN_EVERY_S, VERBOSE_EVERY_S = 5.0, 1.0
REFRESHES_PER_S = 2


class Verbosity(IntEnum):
    """The amount of output of a command on stderr."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


class ProgressDisplay(Protocol):
    """Shows messages and the progress of a run, or of the runs of a series."""

    def show(self, text: str) -> None:
        """Show a message permanently. Control characters are removed."""

    def place(self, position: Position | None) -> None:
        """Place the next run in its series; None after the last."""

    def begin(self, length: RunLength) -> None:
        """Begin a run of this expected length."""

    def update(self, message: Mapping[str, Any]) -> None:
        """Show the numbers of one progress message."""

    def close(self) -> None:
        """End the updates of this run; another run may follow."""


class SilentProgress:
    """Shows nothing."""

    def show(self, text: str) -> None:
        pass

    def place(self, position: Position | None) -> None:
        pass

    def begin(self, length: RunLength) -> None:
        pass

    def update(self, message: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class _Rate:
    """Tokens per second between two messages."""

    def __init__(self) -> None:
        self._previous = (0.0, 0)

    def of(self, message: Mapping[str, Any]) -> float | None:
        now = (float(message["t_s"]), int(message["tokens_out"]))
        previous, self._previous = self._previous, now
        if now[0] <= previous[0]:
            return None
        return (now[1] - previous[1]) / (now[0] - previous[0])


class LineProgress:
    """One line every `every_s`, for logs and for callers. write: receives each line."""

    def __init__(self, write: Callable[[str], object], every_s: float = PLAIN_EVERY_S) -> None:
        self._write = write
        self._every_s = every_s
        self._shown_s = 0.0
        self._rate = _Rate()
        self._position: Position | None = None
        self._length = RunLength()

    def show(self, text: str) -> None:
        self._write(plain_text(text))

    def place(self, position: Position | None) -> None:
        self._position = position

    def begin(self, length: RunLength) -> None:
        self._length = length

    def update(self, message: Mapping[str, Any]) -> None:
        if message["t_s"] - self._shown_s >= self._every_s:
            self._shown_s = message["t_s"]
            self.show(plain_line(message, self._rate.of(message), self._length, str(self._position or "")))

    def close(self) -> None:
        self._shown_s, self._rate, self._length = 0.0, _Rate(), RunLength()


class TerminalProgress:
    """One line that is updated in place, from the first run or position to `close` or the end of the series."""

    def __init__(self, stream: TextIO, clock_s: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._clock_s = clock_s
        self._rate = _Rate()
        self._tokens_per_s: float | None = None
        self._position: Position | None = None
        self._length = RunLength()
        self._message: Mapping[str, Any] | None = None
        self._since_s = clock_s()
        self._live = Live(
            get_renderable=self._line,
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def show(self, text: str) -> None:
        self._console.print(plain_text(text), markup=False, highlight=False, soft_wrap=True)

    def place(self, position: Position | None) -> None:
        self._position, self._since_s = position, self._clock_s()
        if position is not None:
            self._live.start(refresh=True)
        else:
            self.close()

    def begin(self, length: RunLength) -> None:
        self._length = length

    def update(self, message: Mapping[str, Any]) -> None:
        self._tokens_per_s = self._rate.of(message)
        self._message = message
        self._live.start()
        self._live.refresh()

    def close(self) -> None:
        self._rate, self._tokens_per_s, self._length, self._message = _Rate(), None, RunLength(), None
        self._since_s = self._clock_s()
        if self._position is None:
            self._live.stop()
        else:
            self._live.refresh()

    def _line(self) -> "Text":
        from rich.text import Text

        position, columns = self._position, min(self._console.width, MOST_COLUMNS)
        place = str(position or "")
        if self._message is None:
            text = f"{place}: {position.idle}, {clock(self._clock_s() - self._since_s)}" if position else ""
        else:
            text = terminal_line(self._message, self._tokens_per_s, self._length, place, columns)
        return Text(text[:columns], no_wrap=True, overflow="crop")


def open_progress(stream: TextIO | None = None, verbosity: Verbosity = Verbosity.NORMAL) -> ProgressDisplay:
    """The display for a stream, stderr by default: a terminal or a log. CI=true makes a terminal a log."""
    stream = stream or sys.stderr
    if verbosity is Verbosity.QUIET:
        return SilentProgress()
    if stream.isatty() and verbosity is Verbosity.NORMAL and environment("CI").get("CI") != "true":
        return TerminalProgress(stream)
    every_s = VERBOSE_EVERY_S if verbosity is Verbosity.VERBOSE else PLAIN_EVERY_S
    return LineProgress(partial(print, file=stream, flush=True), every_s)


def progress_to(write: Callable[[str], object] | None) -> ProgressDisplay:
    """The display of a call: its lines go to `write`; without one nothing is shown."""
    return SilentProgress() if write is None else LineProgress(write)


def add_verbosity_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="No progress: the result and errors only.")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="Progress as lines with all numbers, every second."
    )


def progress_of(args: argparse.Namespace) -> ProgressDisplay:
    """The display that the flags of a command choose."""
    level = Verbosity.QUIET if args.quiet else Verbosity.VERBOSE if args.verbose else Verbosity.NORMAL
    return open_progress(verbosity=level)

"""Progress of a run on stderr: one updated line on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TextIO

from reports.text import plain_text

PLAIN_EVERY_S = 5.0


class ProgressDisplay(Protocol):
    """Shows messages and the progress of a run."""

    def show(self, text: str) -> None:
        """Show a message permanently. Control characters are removed."""

    def update(self, message: Mapping[str, Any]) -> None:
        """Show the numbers of one progress message."""

    def close(self) -> None:
        """End the updates of this run; another run may follow."""


class SilentProgress:
    """Shows nothing."""

    def show(self, text: str) -> None:
        pass

    def update(self, message: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def render(message: Mapping[str, Any], tokens_per_s: float | None) -> str:
    """One line: elapsed, phase, in flight, tokens per second, TTFT, errors.

    >>> render({"t_s": 4.2, "phase": "measure", "in_flight": 8, "completed": 30, "failed": 0, "ttft_p50_s": 0.0123,
    ...         "ttft_p95_s": 0.02}, 512.3)
    '    4s measure   8 in flight    30 done    0 failed    512 tokens/s   TTFT p50 12.3 ms p95 20.0 ms'
    """
    parts = [
        f"{message['t_s']:5.0f}s {message['phase']:<7} {message['in_flight']:>3} in flight",
        f"{message['completed']:>5} done",
        f"{message['failed']:>4} failed",
        f"{tokens_per_s or 0:>6.0f} tokens/s",
    ]
    if message.get("ttft_p50_s") is not None:
        parts.append(f"TTFT p50 {message['ttft_p50_s'] * 1e3:.1f} ms p95 {message['ttft_p95_s'] * 1e3:.1f} ms")
    if message.get("waiting"):
        parts.append(f"{message['waiting']} waiting at the in-flight limit")
    return " ".join((parts[0], *(f" {part}" for part in parts[1:4]), *(f"  {part}" for part in parts[4:])))


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
    """One line every `PLAIN_EVERY_S`, for logs and for callers. write: receives each line."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._shown_s = 0.0
        self._rate = _Rate()

    def show(self, text: str) -> None:
        self._write(plain_text(text))

    def update(self, message: Mapping[str, Any]) -> None:
        if message["t_s"] - self._shown_s >= PLAIN_EVERY_S:
            self._shown_s = message["t_s"]
            self.show(render(message, self._rate.of(message)))

    def close(self) -> None:
        self._shown_s, self._rate = 0.0, _Rate()


class TerminalProgress:
    """One line that is updated in place."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.status import Status

        self._console = Console(file=stream)
        self._status = Status("", console=self._console, spinner="dots")
        self._is_live = False
        self._rate = _Rate()

    def show(self, text: str) -> None:
        self._console.print(plain_text(text), markup=False, highlight=False)

    def update(self, message: Mapping[str, Any]) -> None:
        from rich.text import Text

        self._status.update(Text(render(message, self._rate.of(message))))
        if not self._is_live:
            self._is_live = True
            self._status.start()

    def close(self) -> None:
        self._rate = _Rate()
        if self._is_live:
            self._is_live = False
            self._status.stop()


def open_progress(stream: TextIO | None = None) -> ProgressDisplay:
    """The display for a stream, stderr by default: a terminal or a log."""
    stream = stream or sys.stderr
    return TerminalProgress(stream) if stream.isatty() else LineProgress(partial(print, file=stream, flush=True))


def progress_to(write: Callable[[str], object] | None) -> ProgressDisplay:
    """The display of a call: its lines go to `write`; without one nothing is shown."""
    return SilentProgress() if write is None else LineProgress(write)

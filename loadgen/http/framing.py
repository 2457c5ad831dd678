"""The framing of a streamed response: its content type, and the splitter of its body into events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loadgen.http.sse import MAX_LINE_BYTES, EventSplitter, LineTooLongError


class Splitter(Protocol):
    """Splits body bytes into event payloads; reads may end anywhere."""

    def feed(self, body: bytes) -> Sequence[bytes]:
        """Payloads of the events that `body` completes. Raises LineTooLongError."""

    def finish(self) -> Sequence[bytes]:
        """The payload of a last event without its end."""


@dataclass(frozen=True, slots=True)
class Framing:
    """The content type of a streamed response, and the splitter of its body for a longest line in bytes."""

    content_type: str
    splitter: Callable[[int], Splitter]


class LineSplitter:
    """Splits newline-delimited JSON: every line that is not empty is an event.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b'{"a":1}\\n\\n{"b"'), splitter.feed(b':2}\\r\\n'), splitter.finish()
    ([b'{"a":1}'], [b'{"b":2}'], [])
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = b""

    def feed(self, body: bytes) -> Sequence[bytes]:
        """Payloads of the lines that `body` completes. Raises LineTooLongError."""
        lines = (self._rest + body).split(b"\n")
        self._rest = lines[-1]
        if max(map(len, lines)) > self._max_line_bytes:
            raise LineTooLongError(f"a line of the stream exceeds {self._max_line_bytes} bytes")
        return [payload for line in lines[:-1] if (payload := line.strip())]

    def finish(self) -> Sequence[bytes]:
        """The payload of a last line without its line feed."""
        payload, self._rest = self._rest.strip(), b""
        return [payload] if payload else []


SSE = Framing("text/event-stream", EventSplitter)
NDJSON = Framing("application/x-ndjson", LineSplitter)

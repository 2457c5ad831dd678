"""Splits a body into server-sent events: the payload of every event, without comments and other fields."""

from collections.abc import Sequence

MAX_LINE_BYTES = 2**20


class LineTooLongError(Exception):
    """A line, or the lines of one event, exceed the limit."""


class EventSplitter:
    """Splits body bytes into event payloads; reads may end anywhere, and all line ends of SSE are accepted.

    A `data:` line that ends like a JSON object or `[DONE]` is an event at once, because servers that stream tokens
    write one object per line. Any other line is joined with the following lines, up to the empty line.

    >>> splitter = EventSplitter()
    >>> splitter.feed(b'data: {"a":1}\\n\\n: ping\\n\\nda'), splitter.feed(b'ta:[DONE]\\r\\n\\r\\n')
    ([b'{"a":1}'], [b'[DONE]'])
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = b""
        self._pending: list[bytes] = []
        # A carriage return at the end of a read may be the first half of a line end.
        self._after_return = False

    def feed(self, body: bytes) -> Sequence[bytes]:
        """Payloads of the events that `body` completes. Raises LineTooLongError."""
        # Exactly one `data:` line and the empty line after it, as nearly every read is.
        if (
            body.endswith(b"}\n\n")
            and body.startswith(b"data:")
            and body.find(b"\n") == len(body) - 2
            and b"\r" not in body
            and not (self._rest or self._pending or self._after_return)
        ):
            return [body[5:-2].strip()]
        if self._after_return:
            body = body.removeprefix(b"\n")
        self._after_return = body.endswith(b"\r") or (self._after_return and not body)
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        payloads: list[bytes] = []
        for line in lines:
            self._take(line, payloads)
        if len(self._rest) + sum(map(len, self._pending)) > self._max_line_bytes:
            raise LineTooLongError(f"a line of the stream exceeds {self._max_line_bytes} bytes")
        return payloads

    def finish(self) -> Sequence[bytes]:
        """The payload of a last event without its line feed or empty line."""
        payloads: list[bytes] = []
        self._take(self._rest, payloads)
        self._take(b"", payloads)
        self._rest = b""
        return payloads

    def _take(self, line: bytes, payloads: list[bytes]) -> None:
        if len(line) > self._max_line_bytes:
            raise LineTooLongError(f"a line of the stream exceeds {self._max_line_bytes} bytes")
        if line.startswith(b"data:"):
            payload = line[5:].strip()
            if not self._pending and payload.endswith((b"}", b"[DONE]")):
                payloads.append(payload)
            else:
                self._pending.append(payload)
        elif not line and self._pending:
            payloads.append(b"\n".join(self._pending))
            self._pending.clear()

"""Server-sent events out of body bytes: the payload of every event, comments and other fields dropped."""

from collections.abc import Sequence

from loadgen.limits import MAX_LINE_BYTES


class LineTooLongError(Exception):
    """A line, or the lines of one event, over the limit."""


class EventSplitter:
    """Cuts a body into event payloads, whatever the reads they came in and whichever line ends it has.

    A `data:` line that ends as a JSON object or `[DONE]` does is an event as soon as it is there: the servers that
    stream tokens write one object a line. Any other is joined with those that follow it, up to the empty line.

    >>> splitter = EventSplitter()
    >>> splitter.feed(b'data: {"a":1}\\n\\n: ping\\n\\nda'), splitter.feed(b'ta:[DONE]\\r\\n\\r\\n')
    ([b'{"a":1}'], [b'[DONE]'])
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = b""
        self._held: list[bytes] = []
        # The carriage return that ended the last read may be the first half of a line end.
        self._after_return = False

    def feed(self, body: bytes) -> Sequence[bytes]:
        """Payloads of the events that `body` completes. Raises LineTooLongError."""
        if not (self._rest or self._held or self._after_return) and _is_one_event(body):
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
        if len(self._rest) + sum(map(len, self._held)) > self._max_line_bytes:
            raise LineTooLongError(f"a line of the stream exceeds {self._max_line_bytes} bytes")
        return payloads

    def finish(self) -> Sequence[bytes]:
        """The payload of a last event that lacks its line feed or its empty line."""
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
            if not self._held and payload.endswith((b"}", b"[DONE]")):
                payloads.append(payload)
            else:
                self._held.append(payload)
        elif not line and self._held:
            payloads.append(b"\n".join(self._held))
            self._held.clear()


def _is_one_event(body: bytes) -> bool:
    """Whether this is nothing but one `data:` line and the empty line after it, as nearly every read is."""
    return (
        body.startswith(b"data:")
        and body.endswith(b"}\n\n")
        and body.find(b"\n") == len(body) - 2
        and b"\r" not in body
    )

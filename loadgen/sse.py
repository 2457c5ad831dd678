"""Server-sent events out of body bytes: the payload of every `data:` event, comments and other fields dropped."""

MAX_LINE_BYTES = 16 * 2**20


class LineTooLongError(Exception):
    """A line over `MAX_LINE_BYTES`."""


class EventSplitter:
    """Cuts a body into event payloads, whatever the reads they came in.

    Every `data:` line is one event: the servers that stream tokens write one JSON object a line, so nothing waits for
    the empty line that closes an event.

    >>> splitter = EventSplitter()
    >>> splitter.feed(b'data: {"a":1}\\n\\n: ping\\n\\nda'), splitter.feed(b'ta:[DONE]\\r\\n\\r\\n')
    ([b'{"a":1}'], [b'[DONE]'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Payloads of the lines that `body` completes. Raises LineTooLongError."""
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            raise LineTooLongError(f"a line of the stream exceeds {MAX_LINE_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def finish(self) -> list[bytes]:
        """The payload of a last line without its line feed."""
        rest, self._rest = self._rest, b""
        return [rest[5:].strip()] if rest.startswith(b"data:") else []

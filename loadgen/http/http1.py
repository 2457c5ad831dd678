"""Parses HTTP/1.1 responses from bytes: status, headers and the decoded body, without a socket.

The load generator must know which bytes arrived in which read, and must distinguish a broken or hostile server from a
slow one. Not httptools: it accepts headers of any size, any number of interim responses and a second response, so the
state kept here would be needed around it. It is not a base dependency and would save 3 us per streamed event.
"""

from dataclasses import dataclass, field

MAX_HEAD_BYTES = 65_536
MAX_CHUNK_LINE_BYTES = 1_024
MAX_LENGTH_DIGITS = 18
MAX_INTERIM_HEADS = 8
# Header lines of chunks of up to 2 KiB, with the bytes that follow: the chunk and its line end.
CHUNK_LINES = {b"%x" % size: size + 2 for size in range(1, 2_049)}


class ProtocolError(Exception):
    """The bytes are not an HTTP/1.1 response, or exceed a size limit."""


@dataclass(slots=True)
class ResponseHead:
    """Status and headers; names in lower case, repeated ones joined by a comma."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def keeps_alive(self) -> bool:
        return "close" not in self.headers.get("connection", "").lower()


class ResponseParser:
    """Parses one response into its head and the pieces of its body.

    >>> parser = ResponseParser()
    >>> parser.feed(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n3\\r\\nabc\\r\\n0\\r\\n\\r\\n")
    b'abc'
    >>> parser.head.status, parser.is_complete
    (200, True)
    """

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.is_complete = False
        self._buffer = b""
        self._is_chunked = False
        self._until_close = False
        # Bytes left of the current chunk, or of the body when it has a length.
        self._left = 0
        self._after_chunk = False
        self._in_trailers = False
        self._interim_heads = 0
        self._has_excess = False

    def feed(self, data: bytes) -> bytes:
        """The body bytes in `data`. Raises ProtocolError."""
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        if self.head is None:
            rest = self._read_head(data)
            if rest is None:
                return b""
            data = rest
        if not data:
            return b""
        if self.is_complete:
            self._has_excess = True
            return b""
        if self._is_chunked:
            return self._read_one_chunk(data) or self._read_chunks(data)
        if self._until_close:
            return data
        body = data[: self._left]
        self._has_excess = len(data) > len(body)
        self._left -= len(body)
        self.is_complete = self._left == 0
        return body

    def feed_eof(self) -> None:
        """The peer closed the connection, which ends a body without length or chunks."""
        if self.head is not None and self._until_close:
            self.is_complete = True

    @property
    def may_reuse(self) -> bool:
        """Whether the connection can carry another request."""
        if self._until_close or self._has_excess:
            return False
        return self.is_complete and self.head is not None and self.head.keeps_alive

    def _read_head(self, data: bytes) -> bytes | None:
        """The bytes after the head, None while it is incomplete; interim (1xx) heads are skipped."""
        while True:
            end = data.find(b"\r\n\r\n")
            if not b"HTTP/1.".startswith(data[:7]) and not data.startswith(b"HTTP/1."):
                raise ProtocolError("the response is not HTTP/1.1")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise ProtocolError(f"response headers exceed {MAX_HEAD_BYTES} bytes")
                self._buffer = data
                return None
            head = parse_head(data[:end])
            data = data[end + 4 :]
            if head.status >= 200:
                self.head = head
                self._choose_framing(head)
                return data
            self._interim_heads += 1
            if self._interim_heads > MAX_INTERIM_HEADS:
                raise ProtocolError(f"more than {MAX_INTERIM_HEADS} interim responses")
            if not data:
                return None

    def _choose_framing(self, head: ResponseHead) -> None:
        length = head.headers.get("content-length")
        if head.status in (204, 304):
            self.is_complete = True
        elif "chunked" in head.headers.get("transfer-encoding", "").lower():
            self._is_chunked = True
        elif length is None:
            self._until_close = True
        elif length.isascii() and length.isdigit() and len(length) <= MAX_LENGTH_DIGITS:
            self._left = int(length)
            self.is_complete = self._left == 0
        else:
            raise ProtocolError(f"content-length is {length[:40]!r}")

    def _read_one_chunk(self, data: bytes) -> bytes:
        """The body of a read that is exactly one chunk, as nearly every read of a stream is; else nothing."""
        if self._left or self._after_chunk or self._in_trailers:
            return b""
        size, _, rest = data.partition(b"\r\n")
        if CHUNK_LINES.get(size) == len(rest) and rest.endswith(b"\r\n"):
            return rest[:-2]
        return b""

    def _read_chunks(self, data: bytes) -> bytes:
        pieces: list[bytes] = []
        at = 0
        while not self.is_complete:
            if self._left:
                piece = data[at : at + self._left]
                if not piece:
                    break
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._after_chunk = self._left == 0
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > MAX_CHUNK_LINE_BYTES:
                    raise ProtocolError("a chunk header has no end")
                self._buffer = data[at:]
                break
            line = data[at:end]
            at = end + 2
            self._read_chunk_line(line)
        else:
            self._has_excess = at < len(data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_chunk_line(self, line: bytes) -> None:
        if self._in_trailers:
            self.is_complete = not line
            return
        if self._after_chunk:
            if line:
                raise ProtocolError("a chunk is longer than its header states")
            self._after_chunk = False
            return
        try:
            self._left = int(line.split(b";", 1)[0], 16)
        except ValueError:
            raise ProtocolError(f"chunk header {line[:40]!r} is not a size") from None
        if self._left < 0:
            raise ProtocolError(f"chunk header {line[:40]!r} is not a size")
        self._in_trailers = self._left == 0


def parse_head(head: bytes) -> ResponseHead:
    """Status and headers of a response head without its final empty line. Raises ProtocolError."""
    status_line, *lines = head.decode("latin-1").split("\r\n")
    parts = status_line.split(" ", 2)
    if len(parts) < 2 or not (parts[1].isascii() and parts[1].isdigit() and len(parts[1]) == 3):
        raise ProtocolError(f"status line {status_line[:80]!r} is not HTTP/1.1")
    parsed = ResponseHead(int(parts[1]))
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise ProtocolError(f"header line {line[:80]!r} has no colon")
        name = name.strip().lower()
        value = value.strip()
        known = parsed.headers.get(name)
        parsed.headers[name] = f"{known}, {value}" if known is not None else value
    return parsed


def render_request(method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    """One request as the bytes that go to the socket."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body

"""One client connection: uvicorn's HTTP/1.1 protocol with limits on size and time.

httptools limits neither bytes nor fields of a header, and uvicorn's keep-alive timer restarts with every byte and does
not run before the first one. Here bytes and fields are counted, and each request has a deadline.
"""

import asyncio
import logging
import re
import resource
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from reference_server.router.sse import WRITE_NOW

logger = logging.getLogger(__name__)
# Uvicorn logs a warning for each malformed request, and a client can send any number of them.
_of_clients = logging.getLogger(f"{__name__}.of_clients")
_of_clients.setLevel(logging.ERROR)

MAX_URL_BYTES = 16 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
MAX_UNREAD_BYTES = 256 * 1024
#: Bytes on the wire for each byte of a body, at most; a chunk of one byte takes six.
MAX_CHUNK_OVERHEAD = 16
#: The rate of a shorter pause is not judged.
SHORT_PAUSE_S = 10.0
#: Connections beyond the limit that may still request a health probe.
RESERVE = 16
PROBES = (b"/health", b"/ping", b"/ready")

_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)

_ANSWERS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    414: b"URI Too Long",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def default_max_connections() -> int:
    """The process's limit of open files, minus those it needs itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 16_384 if soft == resource.RLIM_INFINITY else max(16, min(16_384, soft - 512))


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a connection, in seconds, and the number of connections.

    A request has `request_s`, and one more second for each `bytes_per_s` of at most `body_bytes`. A client that leaves
    `MAX_UNREAD_BYTES` unread must read `drain_bytes_per_s`, something in `stall_s`, and may keep one answer waiting for
    `delivery_s` in all.
    """

    head_s: float = 30.0
    request_s: float = 60.0
    bytes_per_s: int = 64 * 1024
    body_bytes: int = 2_000_000
    stall_s: float = 120.0
    drain_bytes_per_s: int = 4096
    delivery_s: float = 600.0
    max_connections: int = field(default_factory=default_max_connections)


class _LimitError(Exception):
    """Stops parsing a request; the connection holds the answer's status."""


class LimitedProtocol(HttpToolsProtocol):
    """A connection that closes if its client sends too much, sends too slowly, or does not read."""

    _last_warning_s = float("-inf")

    def __init__(self, *, limits: ConnectionLimits, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.logger = _of_clients
        self._limits = limits
        self._status = 400
        self._in_head = False
        self._in_request = False
        self._head_bytes = self._num_headers = self._raw_bytes = self._body_bytes = 0
        self._began_s = 0.0
        self._paused_s = self._unread_since_s = 0.0
        self._unread = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._only_probes = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNREAD_BYTES)
        self._arm(self._limits.head_s)
        open_now, limit = len(self.connections), self._limits.max_connections
        if open_now > limit:
            self._only_probes = True
            self._warn_of_connections(limit)
        if open_now > limit + RESERVE:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and not self._in_request:
            self._arm(self._limits.head_s)
        self._raw_bytes += len(data)
        super().data_received(data if self._in_request else _without_upgrade(data))
        # httptools calls back only for complete headers.
        if self._in_head and self._raw_bytes > MAX_URL_BYTES + MAX_HEAD_BYTES and not self.transport.is_closing():
            self._status = 431 if self._num_headers or self.url else 400
            self.send_400_response("")
        elif self._raw_bytes > MAX_URL_BYTES + 2 * MAX_HEAD_BYTES + MAX_CHUNK_OVERHEAD * self._body_bytes:
            self._status = 400
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {WRITE_NOW: {"write": self.write_now}}
        self._in_head = self._in_request = True
        self._head_bytes = self._num_headers = self._body_bytes = 0
        self._paused_s = 0.0
        self._status = 400
        self._arm(self._limits.head_s)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(414)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._num_headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431 if self._in_head else 400)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._only_probes and self.url not in PROBES:
            self._refuse(503)
        if not self._is_well_framed() or (self.parser.should_upgrade() and self._announces_body()):
            self._refuse(400)
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        self._raw_bytes = 0
        self._disarm()
        super().on_message_complete()

    def write_now(self, body: bytes) -> bool:
        """Write a part of the streamed answer that has begun; False if the client has left or reads too slowly.

        An ASGI message does the same with a coroutine and a dictionary for each part.
        """
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's text for a malformed request
        """Answer a broken limit or a malformed request, and close."""
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                reason = _ANSWERS[self._status]
                head = b"HTTP/1.1 %d %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % (self._status, reason)
                self.transport.write(head)
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._unread, self._unread_since_s = self.transport.get_write_buffer_size(), self.loop.time()
            self._watch_reader()

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
            self._check_reader()
        if self.flow is not None:
            super().resume_writing()

    def _is_well_framed(self) -> bool:
        """Whether the request has a known version, one `Host`, and no encoding but `chunked`."""
        version = self.parser.get_http_version()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        encodings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        has_host = num_hosts == 1 or (version == "1.0" and not num_hosts)
        return version in ("1.0", "1.1") and has_host and encodings in ([], [b"chunked"])

    def _announces_body(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def _refuse(self, status: int) -> None:
        self._status = status
        raise _LimitError

    def _watch_reader(self) -> None:
        left_s = min(self._limits.stall_s, self._limits.delivery_s - self._paused_s)
        self._stall = self.loop.call_later(max(0.0, left_s), self._on_stall)

    def _on_stall(self) -> None:
        self._stall = None
        if self._check_reader():
            self._watch_reader()

    def _check_reader(self) -> bool:
        """Close the connection of a client that reads too slowly. While writing is paused the buffer only shrinks."""
        now_s, unread = self.loop.time(), self.transport.get_write_buffer_size()
        waited_s, read = now_s - self._unread_since_s, self._unread - unread
        self._paused_s += waited_s
        self._unread, self._unread_since_s = unread, now_s
        if reads_too_slowly(read, waited_s, self._paused_s, self._limits):
            logger.info("a client has read %d bytes in %.0f s: closing its connection", read, waited_s)
            self.transport.abort()
            return False
        return True

    def _arm(self, after_s: float) -> None:
        self._disarm()
        self._began_s = self.loop.time()
        self._deadline = self.loop.call_later(after_s, self._on_deadline)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        left_s = self._began_s + self._request_limit_s() - self.loop.time()
        if self._in_request and not self._in_head and left_s > 0:
            self._deadline = self.loop.call_later(left_s, self._on_deadline)
        elif self._in_request:
            self._status = 408
            self.send_400_response("")
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _request_limit_s(self) -> float:
        """Time limit of the current request, by its content length."""
        announced = next((value for name, value in self.headers or () if name == b"content-length"), b"0")
        length = int(announced) if announced.isdigit() else 0
        return self._limits.request_s + min(length, self._limits.body_bytes) / self._limits.bytes_per_s

    def _warn_of_connections(self, limit: int) -> None:
        now_s = self.loop.time()
        if now_s - LimitedProtocol._last_warning_s >= 10:
            LimitedProtocol._last_warning_s = now_s
            logger.warning("all %d connections are in use: refusing others", limit)


def _without_upgrade(data: bytes) -> bytes:
    """The start of a request without its offer of another protocol: httptools would drop the request's body.

    A server may ignore the offer (RFC 9110, section 7.8). Java's client and `curl --http2` offer HTTP/2.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-ignored-upgrade:", head) + end + rest if end else data


def reads_too_slowly(read: int, waited_s: float, total_s: float, limits: ConnectionLimits) -> bool:
    """Whether a client that read `read` bytes of its full buffer in `waited_s` is to be disconnected.

    total_s: time that this answer has waited for the client so far.

    >>> limits = ConnectionLimits()
    >>> reads_too_slowly(190_000, 64.0, 64.0, limits), reads_too_slowly(190_000, 30.0, 30.0, limits)
    (True, False)
    """
    is_slow = waited_s > SHORT_PAUSE_S and read < waited_s * limits.drain_bytes_per_s
    is_stalled = waited_s >= limits.stall_s and not read
    return is_slow or is_stalled or total_s >= limits.delivery_s

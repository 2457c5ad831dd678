"""TCP and TLS connections to one server, reused between calls.

Uses the standard socket module: cooperative in locust's process, blocking in any other.
"""

import contextlib
import socket
from collections import deque
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from loadgen.http.arrival_times import ArrivalTimes, Clock
from loadgen.http.tls import SYSTEM_TLS, TlsSettings, TlsSocket

READ_BYTES = 65_536
# Shorter than the keep-alive timeout of servers, which would otherwise appear as failed requests.
MAX_IDLE_S = 2.0


class NotSentError(ConnectionError):
    """The peer closed a reused connection before the first byte of a request was written."""


class Receiver(Protocol):
    """Processes the bytes of a connection."""

    def take(self, data: bytes, at_ns: int, late_ns: int = 0) -> bool:
        """Process one read that arrived at `at_ns` and was read `late_ns` later; empty data: the peer closed.

        Returns whether the response has ended.
        """

    def left_s(self, now_ns: int) -> float:
        """Seconds until the next limit. Raises TimeoutError once one has passed."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The address of a server and the path prefix of its routes."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> "Origin":
        """
        >>> Origin.parse("http://127.0.0.1:8080/tgi/").path("/info")
        '/tgi/info'
        >>> Origin.parse("http://127.0.0.1:8080/v1").path("/v1/models")
        '/v1/models'
        """
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname or "", port, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port in (80, 443) else f"{host}:{self.port}"

    def path(self, route: str) -> str:
        return self.prefix + route


@dataclass(slots=True)
class Connection:
    """One open connection; `connect_s` is the time it took to open."""

    sock: socket.socket | TlsSocket
    connect_s: float
    arrivals: ArrivalTimes
    is_reused: bool = False
    idle_since_ns: int = 0

    def send(self, data: bytes, timeout_s: float) -> None:
        """Write all bytes. Raises NotSentError, after which the data may be sent on another connection, and OSError."""
        self.sock.settimeout(timeout_s)
        try:
            written = self.sock.send(data)
        except ConnectionError as error:
            # TLS does not report whether a part was written.
            if self.is_reused and not isinstance(self.sock, TlsSocket):
                raise NotSentError(str(error)) from error
            raise
        if written < len(data):
            self.sock.sendall(memoryview(data)[written:])

    def receive(self, receiver: Receiver) -> None:
        """Read until the receiver has the whole response. Raises OSError and the receiver's exceptions."""
        sock, arrivals = self.sock, self.arrivals
        while True:
            sock.settimeout(receiver.left_s(arrivals.clock_ns()))
            try:
                data, at_ns, late_ns = arrivals.receive(sock.recvmsg, READ_BYTES)
            except TimeoutError:
                continue
            if receiver.take(data, at_ns, late_ns):
                return

    def is_stale(self) -> bool:
        """Whether the peer closed the idle connection or sent unexpected bytes."""
        return self.closes_within(0)

    def closes_within(self, seconds: float) -> bool:
        """Whether the peer closes the idle connection, or sends bytes, within a time."""
        try:
            self.sock.settimeout(seconds)
            self.sock.recv(1)
        except (BlockingIOError, TimeoutError):
            return False
        except (OSError, ValueError):
            return True
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


class ConnectionPool:
    """Connections idle for up to `MAX_IDLE_S`, last used first; opens one with `open_connection` if there are none.

    With `reuses` false every call has a new connection.
    """

    def __init__(
        self,
        origin: Origin,
        clock_ns: Clock,
        open_connection: type[Connection] = Connection,
        *,
        reuses: bool = True,
        tls: TlsSettings = SYSTEM_TLS,
    ) -> None:
        self.origin = origin
        self._open_connection = open_connection
        self._reuses = reuses
        self._clock_ns = clock_ns
        self.arrivals = ArrivalTimes(clock_ns)
        self._idle: deque[Connection] = deque()
        self._address: tuple[str, int] | None = None
        self._tls = tls.context() if origin.scheme == "https" else None

    def take(self, timeout_s: float) -> Connection:
        """An open connection. Raises OSError if none can be opened."""
        oldest_ns = self._clock_ns() - round(MAX_IDLE_S * 1e9)
        while self._idle and self._idle[0].idle_since_ns < oldest_ns:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_stale():
                connection.is_reused = True
                connection.connect_s = 0.0
                return connection
            connection.close()
        started_ns = self._clock_ns()
        # Later connections use the address of the first: the name is resolved once a run.
        address = self._address or (self.origin.host, self.origin.port)
        sock = socket.create_connection(address, timeout=timeout_s)
        self._address = sock.getpeername()[:2]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.arrivals.enable(sock)
        stream = sock if self._tls is None else TlsSocket(sock, self._tls, self.origin.host)
        return self._open_connection(stream, (self._clock_ns() - started_ns) / 1e9, self.arrivals)

    def give_back(self, connection: Connection) -> None:
        if not self._reuses:
            connection.close()
            return
        connection.idle_since_ns = self._clock_ns()
        self._idle.append(connection)

    def closes_within(self, seconds: float) -> bool:
        """Whether the peer closes the idle connections within a time; True if there are none."""
        return all(connection.closes_within(seconds) for connection in self._idle)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

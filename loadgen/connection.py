"""TCP and TLS connections to one server, kept and reused.

Uses the standard socket module, which locust's process has made cooperative; in any other process it blocks a thread.
"""

import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from loadgen.limits import CONNECT_TIMEOUT_S

READ_BYTES = 65_536
Clock = Callable[[], int]


class Receiver(Protocol):
    """Who a connection hands its reads to."""

    def take(self, data: bytes, now_ns: int) -> bool:
        """One read and its time, empty when the peer closed. Whether nothing more is wanted."""

    def left_s(self, now_ns: int) -> float:
        """Seconds to wait before this is asked again. Raises TimeoutError when none are left."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server listens, and the path its routes lie under."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> "Origin":
        """
        >>> Origin.parse("http://127.0.0.1:8080/tgi/").path("/info")
        '/tgi/info'
        """
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname or "", port, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port in (80, 443) else f"{host}:{self.port}"

    def path(self, route: str) -> str:
        return self.prefix + route


@dataclass(slots=True)
class Connection:
    """One open connection; `connect_s` is what opening it took."""

    sock: socket.socket
    connect_s: float
    clock_ns: Clock
    is_reused: bool = False

    def receive(self, receiver: Receiver) -> None:
        """Read until the receiver has all it wants. Raises what it raises, and OSError."""
        sock, clock_ns = self.sock, self.clock_ns
        while True:
            sock.settimeout(receiver.left_s(clock_ns()))
            try:
                data = sock.recv(READ_BYTES)
            except TimeoutError:
                continue
            if receiver.take(data, clock_ns()):
                return

    def is_stale(self) -> bool:
        """Whether the peer has closed it, or sent what nobody asked for, while it was idle."""
        try:
            self.sock.settimeout(0)
            self.sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except (OSError, ValueError):
            return True
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


class ConnectionPool:
    """Idle connections, the last used one first; opens another when none is idle, with `open_connection`."""

    def __init__(self, origin: Origin, clock_ns: Clock, open_connection: type[Connection] = Connection) -> None:
        self.origin = origin
        self._open_connection = open_connection
        self._clock_ns = clock_ns
        self._idle: deque[Connection] = deque()
        self._address: tuple[str, int] | None = None
        self._tls = ssl.create_default_context() if origin.scheme == "https" else None

    def take(self, timeout_s: float = CONNECT_TIMEOUT_S, *, fresh: bool = False) -> Connection:
        """An open connection. Raises OSError when none can be opened."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.is_stale():
                connection.is_reused = True
                connection.connect_s = 0.0
                return connection
            connection.close()
        started_ns = self._clock_ns()
        # The address of the first connection serves the others: a name is looked up once a run.
        address = self._address or (self.origin.host, self.origin.port)
        sock = socket.create_connection(address, timeout=timeout_s)
        self._address = sock.getpeername()[:2]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_hostname=self.origin.host)
        return self._open_connection(sock, (self._clock_ns() - started_ns) / 1e9, self._clock_ns)

    def give_back(self, connection: Connection) -> None:
        self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

"""The HTTP server: uvicorn on a socket that is bound beforehand; start/graceful_stop.py handles signals."""

import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from reference_server.errors import StartupError
from reference_server.listening import listening_address
from reference_server.router.app import RouterApp
from reference_server.router.connection import ConnectionLimits, LimitedProtocol

KEEP_ALIVE_S = 75
BACKLOG = 2048


def bind(hostname: str, port: int) -> socket.socket:
    """Bind an address without listening: connections are refused until the model is warm.

    Raises `StartupError` if the address is in use or the name does not resolve.
    """
    host = listening_address(hostname)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    _detect_vanished_clients(listener)
    listener.setblocking(False)
    return listener


def _detect_vanished_clients(listener: socket.socket) -> None:
    """Detect clients that vanished, within two minutes. Accepted connections inherit these options."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 60),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 6),
        ("TCP_USER_TIMEOUT", 120_000),
    ):
        if hasattr(socket, option):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class HttpServer(uvicorn.Server):
    """One application on one socket. `should_exit` stops it after its open requests, `force_exit` at once."""

    def __init__(self, app: RouterApp, listener: socket.socket, limits: ConnectionLimits | None = None) -> None:
        protocol: Any = functools.partial(LimitedProtocol, limits=limits or ConnectionLimits())
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=BACKLOG,
            )
        )
        self._listener = listener

    async def run_to_end(self) -> None:
        """Listen, and serve until `should_exit` is set."""
        await self.serve(sockets=[self._listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

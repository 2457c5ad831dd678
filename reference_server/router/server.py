"""The HTTP server: uvicorn on a socket bound beforehand, stopped by the command and not by signals of its own."""

import contextlib
import functools
import ipaddress
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from reference_server.errors import StartupError
from reference_server.router.app import RouterApp
from reference_server.router.connection import ConnectionLimits, LimitedProtocol

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
BACKLOG = 2048


def bind(hostname: str, port: int) -> socket.socket:
    """Claim an address without listening yet: connections are refused until the model is warm.

    Raises `StartupError` when it is taken.
    """
    host = _address(hostname)
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


def _address(hostname: str) -> str:
    try:
        return str(ipaddress.ip_address(hostname))
    except ValueError:
        logger.warning("the hostname %r is no IP address: listening on 0.0.0.0", hostname)
        return "0.0.0.0"


def _detect_vanished_clients(listener: socket.socket) -> None:
    """Let the system notice, within two minutes, a client that went without a packet; connections inherit this."""
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
    """One application on one socket. `should_exit` stops it once what is in flight has ended; `force_exit` at once."""

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
        """Listen, and serve until told to stop."""
        await self.serve(sockets=[self._listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command."""
        yield

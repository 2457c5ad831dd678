"""Clients of the soak test over plain sockets: one exchange, a stream with token times, and a slow reader."""

import asyncio
import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ANSWER_S = 120.0
SLOW_BYTES, SLOW_S = 300, 0.1


@dataclass(frozen=True, slots=True)
class SoakedServer:
    """Host and port of the server."""

    host: str
    port: int


def free_port() -> int:
    """A port of the loopback interface that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def request_bytes(method: str, path: str, body: dict[str, Any] | None) -> bytes:
    """One HTTP/1.1 request that closes its connection."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def exchange(
    address: SoakedServer, method: str, path: str, body: dict[str, Any] | None, answer: list[bytes] | None = None
) -> int | None:
    """The status of one request; None without an answer. answer: a list to which the received bytes are appended."""
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(request_bytes(method, path, body))
                content = await reader.read(-1)
            finally:
                writer.transport.abort()
        if answer is not None:
            answer.append(content)
        return status_of(content)
    return None


async def stream(
    address: SoakedServer, body: dict[str, Any], leave_after: int | None
) -> tuple[int | None, list[float]]:
    """The status of a `/generate_stream` request, and the arrival time of each token (monotonic, in seconds).

    leave_after: disconnect after this number of tokens.
    """
    times_s: list[float] = []
    status = None
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(request_bytes("POST", "/generate_stream", body))
                status = status_of(await reader.readline())
                while line := await reader.readline():
                    if line.startswith(b"data:"):
                        times_s.append(time.monotonic())
                    if leave_after is not None and len(times_s) >= leave_after:
                        break
            finally:
                writer.transport.abort()
    return status, times_s


async def hold(address: SoakedServer, body: dict[str, Any], end_s: float) -> None:
    """Read one stream slowly until it ends, the server disconnects, or the monotonic clock reaches `end_s`."""
    with suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=SLOW_BYTES)
        try:
            writer.write(request_bytes("POST", "/generate_stream", body))
            while time.monotonic() < end_s and await reader.read(SLOW_BYTES):  # noqa: ASYNC110
                await asyncio.sleep(SLOW_S)
        finally:
            writer.transport.abort()


def status_of(answer: bytes) -> int | None:
    """The status of an answer's first line.

    >>> status_of(b"HTTP/1.1 200 OK")
    200
    """
    parts = answer.split(b" ", 2)
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None

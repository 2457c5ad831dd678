"""Clients of the soak over plain sockets: one exchange, a stream with the time of each token, and a slow reader.

Times are the kernel's where it records them, so a client that reads late does not lengthen a wait: see
`loadgen/http/arrival_times.py`. All are in ns of the monotonic clock, which the server's step trace has too.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from loadgen.http.arrival_times import ArrivalTimes

ANSWER_S = 120.0
READ_BYTES = 1 << 16
SLOW_BYTES, SLOW_S = 300, 0.1


@dataclass(frozen=True, slots=True)
class SoakedServer:
    """Host and port of the server, and the reader of arrival times."""

    host: str
    port: int
    arrivals: ArrivalTimes = field(default_factory=lambda: ArrivalTimes(time.perf_counter_ns))


@dataclass(slots=True)
class Exchanged:
    """The answer to one request. `status` is None if the server closed the connection without one."""

    sent_ns: int
    content: bytes = b""
    status: int | None = None
    ended_ns: int = 0


@dataclass(slots=True)
class TokenTimes:
    """A stream: when the request was sent, when each token arrived, how late each was read, and how the stream ended.

    outcome: `whole`, `left`, `cut` (no last token), or the status of a refusal.
    """

    sent_ns: int = 0
    at_ns: list[int] = field(default_factory=list)
    late_ns: list[int] = field(default_factory=list)
    ended_ns: int = 0
    outcome: str = "no answer"


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


async def exchange(server: SoakedServer, method: str, path: str, body: dict[str, Any] | None) -> Exchanged:
    """One request and its whole answer."""
    request = request_bytes(method, path, body)
    answer = Exchanged(time.perf_counter_ns())
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_S), connection(server, request) as sock:
            while True:
                data, answer.ended_ns, _ = await receive(server.arrivals, sock)
                if not data:
                    break
                answer.content += data
        answer.status = status_of(answer.content)
    return answer


async def stream(server: SoakedServer, body: dict[str, Any], leave_after: int | None) -> TokenTimes:
    """A `/generate_stream` request. leave_after: disconnect after this number of tokens."""
    request = request_bytes("POST", "/generate_stream", body)
    times, content = TokenTimes(time.perf_counter_ns()), b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_S), connection(server, request) as sock:
            while True:
                data, at_ns, late_ns = await receive(server.arrivals, sock)
                if not data:
                    break
                *lines, content = (content + data).split(b"\n")
                for line in lines:
                    read_line(times, line, at_ns, late_ns)
                if leave_after is not None and len(times.at_ns) >= leave_after:
                    times.outcome = "left"
                    break
    times.ended_ns = time.perf_counter_ns()
    return times


def read_line(times: TokenTimes, line: bytes, at_ns: int, late_ns: int) -> None:
    """Add one line of the answer: its status, a token, or the last token."""
    if line.startswith(b"HTTP/"):
        status = status_of(line)
        times.outcome = "cut" if status == 200 else str(status)
    elif line.startswith(b"data:") and b'"token":' in line:
        times.at_ns.append(at_ns)
        times.late_ns.append(late_ns)
        if b'"generated_text":null' not in line:
            times.outcome = "whole"


async def hold(server: SoakedServer, body: dict[str, Any], end_ns: int) -> None:
    """Read one stream slowly until it ends, the server disconnects, or the clock reaches `end_ns`."""
    with suppress(OSError, TimeoutError):
        async with connection(server, request_bytes("POST", "/generate_stream", body)) as sock:
            while time.perf_counter_ns() < end_ns:
                data, _, _ = await receive(server.arrivals, sock, SLOW_BYTES)
                if not data:
                    break
                await asyncio.sleep(SLOW_S)


@asynccontextmanager
async def connection(server: SoakedServer, request: bytes) -> AsyncIterator[socket.socket]:
    """A connection over which the request was sent."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        server.arrivals.enable(sock)
        await loop.sock_connect(sock, (server.host, server.port))
        await loop.sock_sendall(sock, request)
        yield sock


async def receive(arrivals: ArrivalTimes, sock: socket.socket, size: int = READ_BYTES) -> tuple[bytes, int, int]:
    """The next bytes, when they arrived, and how much later they were read (ns); no bytes at the end."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return arrivals.receive(sock.recvmsg, size)
        except BlockingIOError:
            readable = loop.create_future()
            loop.add_reader(sock, set_once, readable)
            try:
                await readable
            finally:
                loop.remove_reader(sock)


def set_once(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def status_of(answer: bytes) -> int | None:
    """The status of an answer's first line.

    >>> status_of(b"HTTP/1.1 200 OK")
    200
    """
    parts = answer.split(b" ", 2)
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None

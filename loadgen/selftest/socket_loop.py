"""A loop that serves HTTP requests over sockets and runs actions when they are due.

One loop serves ready sockets and a heap of due actions, because timers of event-loop libraries cost more than the
effects that these servers are for.
"""

import heapq
import itertools
import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

BACKLOG = 4_096
NS_PER_S = 1_000_000_000


@dataclass(slots=True, eq=False)
class Peer:
    """One connection: received bytes of the next request, and bytes that could not be sent yet."""

    sock: socket.socket
    received: bytes = b""
    unsent: bytes = b""
    is_open: bool = True
    requests: int = 0


class SocketLoop:
    """Serves until the process ends. `answer` is called with the connection, path and body of each request.

    Actions run at their time (ns of `time.perf_counter_ns`) or as soon after as possible, in the order of their times.
    """

    def __init__(self, answer: Callable[[Peer, bytes, bytes], None], port: int = 0) -> None:
        self._answer = answer
        self._selector = selectors.DefaultSelector()
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._listener = self._listen(port)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def at(self, due_ns: int, action: Callable[[], None]) -> None:
        """Run an action at a time."""
        heapq.heappush(self._due, (due_ns, next(self._order), action))

    def serve(self) -> None:
        while True:
            wait_s = max(0, self._due[0][0] - time.perf_counter_ns()) / NS_PER_S if self._due else None
            for key, events in self._selector.select(wait_s):
                if key.data is None:
                    self._accept()
                    continue
                if events & selectors.EVENT_WRITE and key.data.is_open:
                    self.send(key.data, b"")
                if events & selectors.EVENT_READ and key.data.is_open:
                    self._receive(key.data)
            while self._due and self._due[0][0] <= time.perf_counter_ns():
                heapq.heappop(self._due)[2]()

    def send(self, peer: Peer, data: bytes) -> None:
        """Send what fits into the socket; the rest goes when the socket is writable."""
        if not peer.is_open:
            return
        had_unsent = bool(peer.unsent)
        data = peer.unsent + data
        try:
            peer.unsent = data[peer.sock.send(data) :]
        except BlockingIOError:
            peer.unsent = data
        except OSError:
            self.close(peer)
            return
        if bool(peer.unsent) != had_unsent:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            self._selector.modify(peer.sock, events, peer)

    def close(self, peer: Peer) -> None:
        if peer.is_open:
            peer.is_open = False
            self._selector.unregister(peer.sock)
            peer.sock.close()

    def stall(self, seconds: float) -> None:
        """Serve nothing for a time; every due action is late by as much."""
        time.sleep(seconds)
        self._due = [(due_ns + round(seconds * NS_PER_S), order, action) for due_ns, order, action in self._due]

    def restart(self, down_s: float) -> None:
        """Close every connection, drop every due action, and listen again on the same port after a time."""
        port = self.port
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self.close(key.data)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._due.clear()
        time.sleep(down_s)
        self._listener = self._listen(port)

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return listener

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(sock, selectors.EVENT_READ, Peer(sock))

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer.sock.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close(peer)
            return
        peer.received += data
        while peer.is_open and (request := take_request(peer)) is not None:
            peer.requests += 1
            self._answer(peer, *request)


def take_request(peer: Peer) -> tuple[bytes, bytes] | None:
    """Path and body of a complete request; None if there is none yet."""
    head, separator, rest = peer.received.partition(b"\r\n\r\n")
    if not separator:
        return None
    lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    length = int(lengths[0]) if lengths else 0
    if len(rest) < length:
        return None
    peer.received = rest[length:]
    return head.split(b" ", 2)[1], rest[:length]


def json_response(status: int, value: object) -> bytes:
    """A response with a JSON body."""
    return response(status, json.dumps(value).encode(), "application/json")


def response(status: int, content: bytes, kind: str) -> bytes:
    """A whole response."""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def chunk(data: bytes) -> bytes:
    """Data as one chunk of a chunked body; empty data ends the body."""
    return b"%x\r\n%s\r\n" % (len(data), data)

"""`python -m loadgen.truth_server`: a server whose every token has a known time, in a process of its own.

Speaks TGI's API. A stream's first token is due `--first-ms` after its request came, the others `--gap-ms` apart; when
each one really left is noted and told at `/truth`, on the clock that all processes of a machine share. One loop over
ready sockets and a heap of due tokens, because timers of an event loop cost more than what is measured; run before
others where that is permitted, because a truth that comes late comes in bursts.
"""

import argparse
import functools
import heapq
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from loadgen.errors import MeasurementError
from loadgen.machine import run_before_others
from loadgen.tether import tie_to_parent

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
INFO = {
    "model_id": "truth",
    "max_input_tokens": 100_000,
    "max_total_tokens": 200_000,
    "engine": {"extensions": ["ignore_eos_token", "min_new_tokens"]},
}
BACKLOG = 4_096
NS_PER_S = 1_000_000_000


@contextmanager
def truth_server(first_s: float, gap_s: float) -> Iterator[str]:
    """The URL of a truth server of one's own. Raises MeasurementError when it does not start."""
    words = [sys.executable, "-m", "loadgen.truth_server", "--first-ms", f"{first_s * 1e3}"]
    words += ["--gap-ms", f"{gap_s * 1e3}", "--parent-pid", str(os.getpid())]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise MeasurementError("the truth server did not start")
        yield f"http://127.0.0.1:{int(port)}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=20.0)
    parser.add_argument("--parent-pid", type=int)
    given = parser.parse_args()
    if given.parent_pid is not None and not tie_to_parent(given.parent_pid, signal.SIGKILL):
        return 1
    run_before_others()
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    TruthServer(listener, round(given.first_ms * 1e6), round(given.gap_ms * 1e6)).serve()
    return 0


@dataclass(slots=True, eq=False)
class Peer:
    """One connection: what came of the next request, and what could not be sent yet."""

    sock: socket.socket
    received: bytes = b""
    unsent: bytes = b""
    is_open: bool = True


@dataclass(slots=True, eq=False)
class Stream:
    """One answer. `written_ns` holds when each of its tokens was handed to the socket."""

    peer: Peer
    text: str
    total: int
    arrived_ns: int
    written_ns: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"inputs": self.text, "arrived_ns": self.arrived_ns, "written_ns": self.written_ns}


class TruthServer:
    """Serves until it is ended."""

    def __init__(self, listener: socket.socket, first_ns: int, gap_ns: int) -> None:
        self._listener = listener
        self._first_ns, self._gap_ns = first_ns, gap_ns
        self._selector = selectors.DefaultSelector()
        self._due: list[tuple[int, int, Stream]] = []
        self._order = itertools.count()
        self._streams: list[Stream] = []

    def serve(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            now_ns = time.perf_counter_ns()
            wait_s = max(0, self._due[0][0] - now_ns) / NS_PER_S if self._due else None
            for key, _ in self._selector.select(wait_s):
                if key.data is None:
                    self._accept()
                else:
                    self._receive(key.data)
            self._write_due()

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
            self._close(peer)
            return
        peer.received += data
        while (request := take_request(peer)) is not None:
            self._answer(peer, *request)

    def _close(self, peer: Peer) -> None:
        peer.is_open = False
        self._selector.unregister(peer.sock)
        peer.sock.close()

    def _answer(self, peer: Peer, path: bytes, body: bytes) -> None:
        if path == b"/generate_stream":
            asked = json.loads(body)
            stream = Stream(peer, asked["inputs"], asked["parameters"]["max_new_tokens"], time.perf_counter_ns())
            self._streams.append(stream)
            self._send(peer, HEAD)
            self._plan(stream)
        elif path == b"/truth":
            told, self._streams = self._streams, []
            self._send(peer, whole(200, [stream.to_json() for stream in told]))
        elif path == b"/tokenize":
            self._send(peer, whole(200, [{"id": 1, "text": word} for word in json.loads(body)["inputs"].split()]))
        elif path in (b"/info", b"/health"):
            self._send(peer, whole(200, INFO))
        else:
            self._send(peer, whole(404, {"error": "not found"}))

    def _plan(self, stream: Stream) -> None:
        """Put the stream's next token on the heap."""
        due_ns = stream.arrived_ns + self._first_ns + len(stream.written_ns) * self._gap_ns
        heapq.heappush(self._due, (due_ns, next(self._order), stream))

    def _write_due(self) -> None:
        while self._due and self._due[0][0] <= time.perf_counter_ns():
            stream = heapq.heappop(self._due)[2]
            if not stream.peer.is_open:
                continue
            index = len(stream.written_ns) + 1
            data = render_event(index, stream.total)
            stream.written_ns.append(time.perf_counter_ns())
            self._send(stream.peer, data + END if index == stream.total else data)
            if index < stream.total:
                self._plan(stream)

    def _send(self, peer: Peer, data: bytes) -> None:
        """Send what fits; a reader who fell behind gets the rest with the next token."""
        data = peer.unsent + data
        try:
            peer.unsent = data[peer.sock.send(data) :]
        except BlockingIOError:
            peer.unsent = data
        except OSError:
            self._close(peer)


def take_request(peer: Peer) -> tuple[bytes, bytes] | None:
    """Path and body of the request that has come whole; None while none has."""
    head, separator, rest = peer.received.partition(b"\r\n\r\n")
    if not separator:
        return None
    lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    length = int(lengths[0]) if lengths else 0
    if len(rest) < length:
        return None
    peer.received = rest[length:]
    return head.split(b" ", 2)[1], rest[:length]


def whole(status: int, value: object) -> bytes:
    """A response with a JSON body."""
    content = json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        len(content),
        content,
    )


@functools.lru_cache(maxsize=65_536)
def render_event(index: int, total: int) -> bytes:
    """Token `index` of `total` as TGI streams it, as one chunk."""
    is_last = index == total
    details = {"finish_reason": "length", "generated_tokens": total, "seed": None, "input_length": 9}
    token = {"id": 1234, "text": " token", "logprob": -0.123456, "special": False}
    said = {"generated_text": "done" if is_last else None, "details": details if is_last else None}
    data = b"data:" + json.dumps({"index": index, "token": token, **said}, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


if __name__ == "__main__":
    sys.exit(main())

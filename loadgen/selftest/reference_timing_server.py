"""`python -m loadgen.selftest.reference_timing_server`: a server that records the exact time of every token.

Has TGI's API. The first token of a stream is due `--first-ms` after its request, the others `--gap-ms` apart. With
`--bursts` tokens are due at multiples of the gap: all streams send at once, as an engine does after a step. `/times`
returns when each token was written, on the monotonic clock that all processes of a machine share. One loop serves ready
sockets and a heap of due tokens, because event-loop timers cost more than the measured effect. Real-time scheduling is
requested, because a late server writes tokens in bursts.
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
from loadgen.parent_death import end_with_parent
from loadgen.target.machine import request_realtime

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
INFO = {
    "model_id": "reference-timing",
    "max_input_tokens": 100_000,
    "max_total_tokens": 200_000,
    "engine": {"extensions": ["ignore_eos_token", "min_new_tokens"]},
}
BACKLOG = 4_096
NS_PER_S = 1_000_000_000


@contextmanager
def timing_server(first_s: float, gap_s: float, *, sends_bursts: bool = False) -> Iterator[str]:
    """Run a reference timing server; yields its URL. Raises MeasurementError if it does not start."""
    words = [sys.executable, "-m", "loadgen.selftest.reference_timing_server", "--first-ms", f"{first_s * 1e3}"]
    words += ["--gap-ms", f"{gap_s * 1e3}", "--parent-pid", str(os.getpid())]
    words += ["--bursts"] if sends_bursts else []
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise MeasurementError("the reference timing server did not start")
        yield f"http://127.0.0.1:{int(port)}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=20.0)
    parser.add_argument("--bursts", action="store_true")
    parser.add_argument("--parent-pid", type=int)
    args = parser.parse_args()
    if args.parent_pid is not None and not end_with_parent(args.parent_pid, signal.SIGKILL):
        return 1
    request_realtime()
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    first_ns, gap_ns = round(args.first_ms * 1e6), round(args.gap_ms * 1e6)
    ReferenceTimingServer(listener, first_ns, gap_ns, sends_bursts=args.bursts).serve()
    return 0


@dataclass(slots=True, eq=False)
class Peer:
    """One connection: received bytes of the next request, and bytes that could not be sent yet."""

    sock: socket.socket
    received: bytes = b""
    unsent: bytes = b""
    is_open: bool = True


@dataclass(slots=True, eq=False)
class Stream:
    """One answer. `due_ns` is when its first token is due, `written_ns` when its tokens were written to the socket."""

    peer: Peer
    text: str
    total: int
    arrived_ns: int
    due_ns: int
    written_ns: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        times = {"arrived_ns": self.arrived_ns, "due_ns": self.due_ns, "written_ns": self.written_ns}
        return {"inputs": self.text, **times}


class ReferenceTimingServer:
    """Serves until the process ends."""

    def __init__(self, listener: socket.socket, first_ns: int, gap_ns: int, *, sends_bursts: bool = False) -> None:
        self._listener = listener
        self._sends_bursts = sends_bursts
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
            for key, events in self._selector.select(wait_s):
                if key.data is None:
                    self._accept()
                    continue
                if events & selectors.EVENT_WRITE:
                    self._send(key.data, b"")
                if events & selectors.EVENT_READ and key.data.is_open:
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
            request = json.loads(body)
            now_ns = time.perf_counter_ns()
            due_ns = now_ns + self._first_ns
            if self._sends_bursts:
                due_ns += -due_ns % self._gap_ns
            stream = Stream(peer, request["inputs"], request["parameters"]["max_new_tokens"], now_ns, due_ns)
            self._streams.append(stream)
            self._send(peer, HEAD)
            self._schedule(stream)
        elif path == b"/times":
            streams, self._streams = self._streams, []
            self._send(peer, json_response(200, [stream.to_json() for stream in streams]))
        elif path == b"/tokenize":
            self._send(
                peer, json_response(200, [{"id": 1, "text": word} for word in json.loads(body)["inputs"].split()])
            )
        elif path in (b"/info", b"/health"):
            self._send(peer, json_response(200, INFO))
        else:
            self._send(peer, json_response(404, {"error": "not found"}))

    def _schedule(self, stream: Stream) -> None:
        """Put the stream's next token on the heap."""
        due_ns = stream.due_ns + len(stream.written_ns) * self._gap_ns
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
                self._schedule(stream)

    def _send(self, peer: Peer, data: bytes) -> None:
        """Send what fits into the socket; the rest goes when the socket is writable."""
        had_unsent = bool(peer.unsent)
        data = peer.unsent + data
        try:
            peer.unsent = data[peer.sock.send(data) :]
        except BlockingIOError:
            peer.unsent = data
        except OSError:
            self._close(peer)
            return
        if bool(peer.unsent) != had_unsent:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            self._selector.modify(peer.sock, events, peer)


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
    end = {"generated_text": "done" if is_last else None, "details": details if is_last else None}
    data = b"data:" + json.dumps({"index": index, "token": token, **end}, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


if __name__ == "__main__":
    sys.exit(main())

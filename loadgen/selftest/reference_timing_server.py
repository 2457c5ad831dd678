"""`python -m loadgen.selftest.reference_timing_server`: a server that records the exact time of every token.

Has TGI's API. The first token of a stream is due `--first-ms` after its request, the others `--gap-ms` apart. With
`--bursts` tokens are due at multiples of the gap: all streams send at once, as an engine does after a step. `/times`
returns when each token was written, on the monotonic clock that all processes of a machine share. Real-time scheduling
is requested, because a late server writes tokens in bursts.
"""

import argparse
import functools
import json
import signal
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from loadgen.parent_death import end_with_parent
from loadgen.selftest.server_process import selftest_server
from loadgen.selftest.socket_loop import Peer, SocketLoop, chunk, json_response
from loadgen.target.machine import request_realtime

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
INFO = {
    "model_id": "reference-timing",
    "max_input_tokens": 100_000,
    "max_total_tokens": 200_000,
    "engine": {"extensions": ["ignore_eos_token", "min_new_tokens"]},
}


def timing_server(first_s: float, gap_s: float, *, sends_bursts: bool = False) -> AbstractContextManager[str]:
    """Run a reference timing server; yields its URL. Raises MeasurementError if it does not start."""
    flags = ["--first-ms", f"{first_s * 1e3}", "--gap-ms", f"{gap_s * 1e3}", *(["--bursts"] if sends_bursts else [])]
    return selftest_server("reference_timing_server", flags)


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
    first_ns, gap_ns = round(args.first_ms * 1e6), round(args.gap_ms * 1e6)
    server = ReferenceTimingServer(first_ns, gap_ns, sends_bursts=args.bursts)
    sys.stdout.write(f"{server.loop.port}\n")
    sys.stdout.flush()
    server.loop.serve()
    return 0


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

    def __init__(self, first_ns: int, gap_ns: int, *, sends_bursts: bool = False) -> None:
        self.loop = SocketLoop(self._answer)
        self._sends_bursts = sends_bursts
        self._first_ns, self._gap_ns = first_ns, gap_ns
        self._streams: list[Stream] = []

    def _answer(self, peer: Peer, path: bytes, body: bytes) -> None:
        if path == b"/generate_stream":
            request = json.loads(body)
            now_ns = time.perf_counter_ns()
            due_ns = now_ns + self._first_ns
            if self._sends_bursts:
                due_ns += -due_ns % self._gap_ns
            stream = Stream(peer, request["inputs"], request["parameters"]["max_new_tokens"], now_ns, due_ns)
            self._streams.append(stream)
            self.loop.send(peer, HEAD)
            self._schedule(stream)
        elif path == b"/times":
            streams, self._streams = self._streams, []
            self.loop.send(peer, json_response(200, [stream.to_json() for stream in streams]))
        elif path == b"/tokenize":
            words = json.loads(body)["inputs"].split()
            self.loop.send(peer, json_response(200, [{"id": 1, "text": word} for word in words]))
        elif path in (b"/info", b"/health"):
            self.loop.send(peer, json_response(200, INFO))
        else:
            self.loop.send(peer, json_response(404, {"error": "not found"}))

    def _schedule(self, stream: Stream) -> None:
        """Write the stream's next token when it is due."""
        due_ns = stream.due_ns + len(stream.written_ns) * self._gap_ns
        self.loop.at(due_ns, functools.partial(self._write, stream))

    def _write(self, stream: Stream) -> None:
        if not stream.peer.is_open:
            return
        index = len(stream.written_ns) + 1
        data = render_event(index, stream.total)
        stream.written_ns.append(time.perf_counter_ns())
        self.loop.send(stream.peer, data + chunk(b"") if index == stream.total else data)
        if index < stream.total:
            self._schedule(stream)


@functools.lru_cache(maxsize=65_536)
def render_event(index: int, total: int) -> bytes:
    """Token `index` of `total` as TGI streams it, as one chunk."""
    is_last = index == total
    details = {"finish_reason": "length", "generated_tokens": total, "seed": None, "input_length": 9}
    token = {"id": 1234, "text": " token", "logprob": -0.123456, "special": False}
    end = {"generated_text": "done" if is_last else None, "details": details if is_last else None}
    data = b"data:" + json.dumps({"index": index, "token": token, **end}, separators=(",", ":")).encode() + b"\n\n"
    return chunk(data)


if __name__ == "__main__":
    sys.exit(main())

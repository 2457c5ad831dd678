"""`python -m loadgen.selftest.trap_server`: a server of known speed that deceives in one way, as its behaviour sets.

Has OpenAI's chat and completions as streams, `/tokenize`, `/metrics` under vLLM's names, `/health` and `/v1/models`. A
token is a word. The load starts when `MIN_IN_FLIGHT` requests are in flight; `/load` returns the seconds since then.
"""

import argparse
import functools
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from loadgen.parent_death import end_with_parent
from loadgen.selftest.server_process import selftest_server
from loadgen.selftest.socket_loop import NS_PER_S, Peer, SocketLoop, chunk, json_response, response
from loadgen.selftest.trap_behaviour import STALL_S, AnswerEvent, Behaviour, TrapRequest, answer_events, prelude
from loadgen.target.machine import request_realtime

MODEL = "trap"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MIN_IN_FLIGHT = 4
DOWN_S = 0.3
DROP_AFTER_S = 0.3
COMMENT_EVERY_S = 0.005
ROUTES = {b"/v1/chat/completions": True, b"/v1/completions": False}


def trap_server(behaviour: Behaviour) -> AbstractContextManager[str]:
    """Run a trap server; yields its URL. Raises MeasurementError if it does not start."""
    return selftest_server("trap_server", ["--behaviour", behaviour.to_json()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--behaviour", default="{}", help="JSON of the fields of `Behaviour`.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parent-pid", type=int)
    args = parser.parse_args()
    if args.parent_pid is not None and not end_with_parent(args.parent_pid, signal.SIGKILL):
        return 1
    request_realtime()
    server = TrapServer(Behaviour.from_json(args.behaviour), args.port)
    sys.stdout.write(f"{server.loop.port}\n")
    sys.stdout.flush()
    server.loop.serve()
    return 0


@dataclass(slots=True)
class Counters:
    """The counters of `/metrics`; a restart sets all of them to zero."""

    succeeded: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


@dataclass(slots=True, eq=False)
class Answer:
    """One answer: its connection, and the events that are left. `held` are bytes that a proxy has not released."""

    peer: Peer
    request: TrapRequest
    index: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    events: Iterator[AnswerEvent] = field(default_factory=lambda: iter(()))
    due_ns: int = 0
    held: bytes = b""
    num_events: int = 0


@dataclass(slots=True)
class PrefixCache:
    """Blocks of words that some earlier prompt began with."""

    block_tokens: int
    _known: set[int] = field(default_factory=set)

    def match(self, words: tuple[str, ...]) -> int:
        """Tokens of whole blocks that are known; then all blocks are."""
        ends = range(self.block_tokens, len(words) + 1, self.block_tokens)
        keys = [hash(words[:end]) for end in ends]
        matched = next((number for number, key in enumerate(keys) if key not in self._known), len(keys))
        self._known.update(keys)
        return matched * self.block_tokens


class TrapServer:
    """Serves until the process ends."""

    def __init__(self, behaviour: Behaviour, port: int = 0) -> None:
        self.loop = SocketLoop(self._answer, port)
        self._behaviour = behaviour
        block = behaviour.cache_block_tokens
        self._cache = None if block is None else PrefixCache(block)
        self._counters = Counters()
        self._load_start_ns: int | None = None
        self._requests = 0
        self._waiting: deque[Answer] = deque()
        self._running: set[Answer] = set()

    def _answer(self, peer: Peer, path: bytes, body: bytes) -> None:
        if path in ROUTES:
            self._generate(peer, TrapRequest.of(body, is_chat=ROUTES[path]))
        elif path == b"/tokenize":
            words = json.loads(body).get("inputs", "").split()
            self.loop.send(peer, json_response(200, [{"id": 1, "text": word} for word in words]))
        elif path == b"/metrics":
            self.loop.send(peer, response(200, self._metrics().encode(), "text/plain; version=0.0.4"))
        elif path == b"/v1/models":
            models = [{"id": MODEL, "object": "model", "created": 1, "owned_by": "trap", "max_model_len": 100_000}]
            self.loop.send(peer, json_response(200, {"object": "list", "data": models}))
        elif path == b"/load":
            self.loop.send(peer, json_response(200, {"load_s": self._load_s()}))
        elif path == b"/health":
            self.loop.send(peer, json_response(200, {}))
        else:
            self.loop.send(peer, json_response(404, {"error": "not found"}))

    def _generate(self, peer: Peer, request: TrapRequest) -> None:
        behaviour, index = self._behaviour, self._requests
        self._requests += 1
        if behaviour.concerns(behaviour.drop_every, index):
            self.loop.at(_after(DROP_AFTER_S), functools.partial(self.loop.close, peer))
            return
        if behaviour.concerns(behaviour.refuse_every, index):
            self.loop.send(peer, json_response(429, {"error": {"message": "overloaded", "type": "overloaded"}}))
            return
        self._waiting.append(Answer(peer, request, index))
        self._admit()
        self._note_load()

    def _note_load(self) -> None:
        """Start the clock of the load, with the events that depend on it."""
        if self._load_start_ns is not None or len(self._running) + len(self._waiting) < MIN_IN_FLIGHT:
            return
        self._load_start_ns = time.perf_counter_ns()
        if self._behaviour.stalls_after_s is not None:
            self.loop.at(_after(self._behaviour.stalls_after_s), functools.partial(self.loop.stall, STALL_S))
        if self._behaviour.restarts_after_s is not None:
            self.loop.at(_after(self._behaviour.restarts_after_s), self._restart)

    def _load_s(self) -> float | None:
        start_ns = self._load_start_ns
        return None if start_ns is None else (time.perf_counter_ns() - start_ns) / NS_PER_S

    def _restart(self) -> None:
        self._counters = Counters()
        self._waiting.clear()
        self._running.clear()
        self.loop.restart(DOWN_S)

    def _admit(self) -> None:
        """Start waiting requests while there are slots."""
        slots = self._behaviour.slots
        while self._waiting and (slots is None or len(self._running) < slots):
            answer = self._waiting.popleft()
            if answer.peer.is_open:
                self._start(answer)

    def _start(self, answer: Answer) -> None:
        behaviour, request = self._behaviour, answer.request
        answer.cached_tokens = 0 if self._cache is None else self._cache.match(request.words)
        answer.prompt_tokens = behaviour.prompt_tokens(len(request.words))
        answer.events = answer_events(behaviour, request, answer.index, answer.cached_tokens)
        answer.due_ns = _after(behaviour.first_s(answer.prompt_tokens, answer.cached_tokens))
        self._running.add(answer)
        self.loop.send(answer.peer, HEAD)
        first = prelude(behaviour, request)
        if first:
            self.loop.send(answer.peer, chunk(first))
        if behaviour.sends_comments:
            self._comment(answer)
        if behaviour.release_s is not None:
            self.loop.at(_after(behaviour.release_s), functools.partial(self._release, answer))
        self._schedule(answer)

    def _schedule(self, answer: Answer) -> None:
        event = next(answer.events, None)
        if event is None:
            self._finish(answer)
            return
        load_s = self._load_s() or 0.0
        token_s = self._behaviour.token_s(load_s, len(self._running))
        answer.due_ns += round(event.tokens * token_s * NS_PER_S)
        due_ns = answer.due_ns
        at_once = self._behaviour.events_at_once
        if event.tokens and answer.num_events % at_once:
            # Written with the last event of its group.
            due_ns += round((at_once - answer.num_events % at_once) * event.tokens * token_s * NS_PER_S)
        answer.num_events += event.tokens > 0 or answer.num_events == 0
        self.loop.at(due_ns, functools.partial(self._write, answer, event))

    def _write(self, answer: Answer, event: AnswerEvent) -> None:
        if not answer.peer.is_open:
            self._end(answer)
            return
        self._counters.generated_tokens += event.tokens
        if self._behaviour.release_s is not None:
            answer.held += chunk(event.data)
        else:
            self.loop.send(answer.peer, chunk(event.data))
        self._schedule(answer)

    def _finish(self, answer: Answer) -> None:
        if self._behaviour.release_s is not None:
            answer.held += chunk(b"")
        else:
            self.loop.send(answer.peer, chunk(b""))
        self._counters.succeeded += 1
        self._counters.prompt_tokens += answer.prompt_tokens
        self._counters.cached_tokens += answer.cached_tokens
        self._end(answer)
        if self._behaviour.idle_close_s is not None:
            close = functools.partial(self._close_idle, answer.peer, answer.peer.requests)
            self.loop.at(_after(self._behaviour.idle_close_s), close)

    def _end(self, answer: Answer) -> None:
        self._running.discard(answer)
        self._admit()

    def _close_idle(self, peer: Peer, requests: int) -> None:
        """Close a connection without a request since `requests` of them."""
        if peer.requests == requests:
            self.loop.close(peer)

    def _release(self, answer: Answer) -> None:
        """Send what a proxy held back, and again after the same time."""
        release_s = self._behaviour.release_s
        assert release_s is not None
        held, answer.held = answer.held, b""
        self.loop.send(answer.peer, held)
        if answer in self._running or answer.held:
            self.loop.at(_after(release_s), functools.partial(self._release, answer))

    def _comment(self, answer: Answer) -> None:
        """Send a comment now and every `COMMENT_EVERY_S` while the answer runs."""
        if answer in self._running and answer.peer.is_open:
            self.loop.send(answer.peer, chunk(b": keep-alive\n\n"))
            self.loop.at(_after(COMMENT_EVERY_S), functools.partial(self._comment, answer))

    def _metrics(self) -> str:
        counters = self._counters
        values = {
            "vllm:num_requests_running": len(self._running),
            "vllm:num_requests_waiting": len(self._waiting),
            "vllm:request_success_total": counters.succeeded,
            "vllm:prompt_tokens_total": counters.prompt_tokens,
            "vllm:generation_tokens_total": counters.generated_tokens,
            "vllm:prefix_cache_queries_total": counters.prompt_tokens,
            "vllm:prefix_cache_hits_total": counters.cached_tokens,
        }
        return "".join(f'{name}{{model_name="{MODEL}"}} {value}\n' for name, value in values.items())


def _after(seconds: float) -> int:
    return time.perf_counter_ns() + round(seconds * NS_PER_S)


if __name__ == "__main__":
    sys.exit(main())

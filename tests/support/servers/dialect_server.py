"""A scripted server of Anthropic's and Ollama's APIs, in which each word is a token and an event."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEMPLATE_TOKENS = 5


@dataclass
class Dialects:
    """The requests so far. `answers_messages`: the server has Anthropic's API instead of Ollama's.

    `models`: the ids that it lists in the form of Anthropic's API.
    """

    answers_messages: bool = False
    models: tuple[str, ...] = ()
    requests: list[dict[str, Any]] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Dialects

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        replies: dict[str, Any] = {
            "/api/version": {"version": "0.13.1"},
            "/api/tags": {"models": [{"name": "tiny:latest", "model": "tiny:latest", "size": 1}]},
        }
        if self.state.answers_messages:
            listed = [{"type": "model", "id": name, "display_name": name} for name in self.state.models]
            replies = {"/v1/models": {"data": listed, "has_more": False}} if listed else {}
        reply = replies.get(self.path)
        self._send(404 if reply is None else 200, "application/json", json.dumps(reply or {}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.state.requests.append({"path": self.path, "body": body})
        is_known = (self.path == "/v1/messages") == self.state.answers_messages
        if not is_known or not self.path.startswith(("/v1/messages", "/api/chat", "/api/generate")):
            self._send(404, "application/json", b'{"error":"not found"}')
        elif self.path == "/v1/messages" and "max_tokens" not in body:
            refusal = {"type": "error", "error": {"type": "invalid_request_error", "message": "max_tokens: required"}}
            self._send(400, "application/json", json.dumps(refusal).encode())
        elif self.path == "/v1/messages":
            kind = "text/event-stream" if body["stream"] else "application/json"
            self._send(200, kind, b"".join(anthropic_events(body)) if body["stream"] else anthropic_message(body))
        else:
            kind = "application/x-ndjson" if body["stream"] else "application/json; charset=utf-8"
            self._send(200, kind, b"".join(ollama_lines(self.path, body)))

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _prompt_tokens(body: dict[str, Any]) -> int:
    texts = [message["content"] for message in body.get("messages", ())] or [body["prompt"]]
    return len(" ".join(texts).split()) + (TEMPLATE_TOKENS if "messages" in body else 1)


def anthropic_message(body: dict[str, Any]) -> bytes:
    """A whole response."""
    words = [f" {number}" for number in range(body["max_tokens"])]
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "".join(words)}],
        "model": body["model"],
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": _prompt_tokens(body), "output_tokens": len(words)},
    }
    return json.dumps(message).encode()


def anthropic_events(body: dict[str, Any]) -> Iterator[bytes]:
    """A stream in which a fourth of the prompt comes from the cache."""

    def event(kind: str, **fields: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()

    tokens = _prompt_tokens(body)
    cached = tokens // 4
    usage = {"input_tokens": tokens - cached, "cache_read_input_tokens": cached, "output_tokens": 0}
    yield event("message_start", message={"id": "msg_1", "type": "message", "content": [], "usage": usage})
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    yield event("ping")
    for number in range(body["max_tokens"]):
        yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": f" {number}"})
    yield event("content_block_stop", index=0)
    end = {"stop_reason": "max_tokens", "stop_sequence": None}
    yield event("message_delta", delta=end, usage={"output_tokens": body["max_tokens"]})
    yield event("message_stop")


def ollama_lines(path: str, body: dict[str, Any]) -> Iterator[bytes]:
    """The lines of a stream; of a blocking answer, the only one."""
    total = body["options"]["num_predict"]
    words = [f" {number}" for number in range(total)]

    def line(text: str, **fields: Any) -> bytes:
        part = {"message": {"role": "assistant", "content": text}} if path == "/api/chat" else {"response": text}
        return json.dumps({"model": body["model"], "created_at": "2026-01-01T00:00:00Z", **part, **fields}).encode()

    end = {
        "done": True,
        "done_reason": "length",
        "total_duration": 5_000_000,
        "load_duration": 1_000_000,
        "prompt_eval_count": _prompt_tokens(body),
        "prompt_eval_duration": 1_000_000,
        "eval_count": total,
        "eval_duration": 3_000_000,
    }
    if body["stream"]:
        yield from (line(word, done=False) + b"\n" for word in words)
    yield line("" if body["stream"] else "".join(words), **end) + b"\n"


@contextmanager
def dialect_server(state: Dialects) -> Iterator[str]:
    """Run a server until the block ends; the value is its URL."""
    with serve_http(type("DialectHandler", (Handler,), {"state": state})) as url:
        yield url


@contextmanager
def serve_http(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve requests with a handler on a free port of the loopback until the block ends; the value is the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

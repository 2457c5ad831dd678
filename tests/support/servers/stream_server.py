"""A scripted HTTP server for the load generator: TGI and OpenAI streams with known gaps, errors and cuts.

Threaded, on a free loopback port. A `Script` defines the content of a stream; a test changes it, or picks
one per request.
"""

import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

TIMES = {
    "x-validation-time": "1",
    "x-queue-time": "2",
    "x-inference-time": "15",
    "x-time-per-token": "3",
}


@dataclass
class Script:
    """How one stream goes. `cut_after` breaks the connection after so many tokens; `tokens` None means as asked.

    `drops` closes the connection after `first_s`, before the response; `hangs_up` closes it after the stream without
    announcing it.
    """

    tokens: int | None = None
    first_s: float = 0.0
    gap_s: float = 0.0
    status: int = 200
    body: bytes | None = None
    content_type: str = "text/event-stream"
    error_after: int | None = None
    cut_after: int | None = None
    drops: bool = False
    end_without_final: bool = False
    bad_json_after: int | None = None
    closes: bool = False
    hangs_up: bool = False
    include_usage: bool = True
    coalesce: int = 1
    finish_reason: str = "length"
    wrote: Callable[[], None] = lambda: None


@dataclass
class ServerState:
    """`known_prompts` are cached; None: responses have no cached tokens. `reset` answers the routes of a reset."""

    script: Callable[[dict[str, Any]], Script] = lambda body: Script()
    requests: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    max_input_tokens: int = 1000
    max_total_tokens: int = 1200
    extensions: list[str] = field(default_factory=lambda: ["ignore_eos_token", "min_new_tokens"])
    has_info: bool = True
    has_models: bool = True
    owner: str | None = None
    has_tokenize: bool = True
    has_metrics: bool = True
    config: dict[str, Any] = field(default_factory=lambda: {"max_waiting_tokens": 20})
    metrics: str | None = None
    known_prompts: set[str] | None = None
    reset: Callable[["ServerState"], tuple[int, dict[str, Any]]] | None = None
    health: Iterator[int] = field(default_factory=lambda: itertools.repeat(200))
    lock: threading.Lock = field(default_factory=threading.Lock)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ServerState

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.state.lock:
            self.state.connections += 1

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/info" and self.state.has_info:
            info = {
                "model_id": "scripted",
                "max_input_tokens": self.state.max_input_tokens,
                "max_total_tokens": self.state.max_total_tokens,
                "engine": {"extensions": self.state.extensions},
            }
            self._json(200, info)
        elif self.path == "/config" and self.state.has_info:
            self._json(200, self.state.config)
        elif self.path == "/props" and self.state.owner == "llamacpp":
            self._json(200, {"total_slots": 2})
        elif self.path == "/health":
            self._json(next(self.state.health), {})
        elif self.path == "/v1/models" and self.state.has_models:
            owner = {"owned_by": self.state.owner} if self.state.owner is not None else {}
            self._json(200, {"object": "list", "data": [{"id": "scripted-model", **owner}]})
        elif self.path == "/metrics" and self.state.has_metrics:
            served = sum(request["path"] != "/tokenize" for request in self.state.requests)
            text = f"# TYPE tgi_request_count counter\ntgi_request_count {served}\ntgi_queue_size 0\n"
            self._send(200, (self.state.metrics or text).encode(), "text/plain")
        else:
            self._json(404, {"error": "not found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.state.lock:
            self.state.requests.append({"path": self.path, "body": body, "headers": dict(self.headers)})
        if self.path == "/tokenize":
            self._tokenize(body)
            return
        if self.path.startswith(("/reset_prefix_cache", "/flush_cache", "/slots/")):
            self._json(*(self.state.reset(self.state) if self.state.reset else (404, {})))
            return
        if not self.state.has_models and self.path.startswith("/v1/"):
            self._json(404, {"error": "not found"})
            return
        script = self.state.script(body)
        if script.drops:
            time.sleep(script.first_s)
            self.close_connection = True
            return
        if script.status != 200 or script.body is not None:
            self._send(script.status, script.body or b'{"error":"scripted"}', script.content_type)
            return
        if self.path == "/generate" or (self.path.startswith("/v1/") and not body.get("stream")):
            self._whole(script, body)
            return
        self._stream(script, body)

    def _tokenize(self, body: dict[str, Any]) -> None:
        """The count in the form of the server whose request it is: TGI's, llama.cpp's, or vLLM's."""
        if not self.state.has_tokenize:
            self._json(404, {"error": "not found"})
        elif "inputs" in body:
            self._json(200, tokenize(body["inputs"]))
        elif "content" in body:
            self._json(200, {"tokens": [each["id"] for each in tokenize(body["content"])]})
        else:
            self._json(200, {"count": len(tokenize(body["prompt"])), "max_model_len": 1000})

    def _whole(self, script: Script, body: dict[str, Any]) -> None:
        """A blocking answer: one event's worth of waiting, then everything."""
        time.sleep(script.first_s)
        is_native = self.path == "/generate"
        tokens = script.tokens or (body["parameters"]["max_new_tokens"] if is_native else body["max_tokens"])
        details = {"finish_reason": "length", "generated_tokens": tokens, "prefill": [], "tokens": []}
        prompt = body.get("prompt") or "".join(each["content"] for each in body.get("messages", ()))
        count = len(tokenize(prompt)) if prompt else 7
        usage: dict[str, Any] = {
            "prompt_tokens": count,
            "completion_tokens": tokens,
            "total_tokens": tokens + count,
        }
        if self.state.known_prompts is not None:
            cached = count if prompt in self.state.known_prompts else 0
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
            self.state.known_prompts.add(prompt)
        choice = {"index": 0, "message": {"content": "x"}, "text": "x", "finish_reason": "length"}
        native = {"generated_text": "x", "details": details}
        content = json.dumps(native if is_native else {"choices": [choice], "usage": usage}).encode()
        self._send(200, content, "application/json", TIMES if is_native else {})

    def _json(self, status: int, value: object) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        try:
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def _stream(self, script: Script, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        if script.closes:
            self.send_header("connection", "close")
            self.close_connection = True
        self.close_connection |= script.hangs_up
        self.end_headers()
        is_native = self.path == "/generate_stream"
        held = b""
        try:
            for number, event in enumerate(_native(script, body) if is_native else _openai(script, body, self.path)):
                time.sleep(script.first_s if number == 0 else script.gap_s)
                if script.cut_after == number:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                script.wrote()
                held += b"data: " + event + b"\n\n"
                if (number + 1) % script.coalesce == 0:
                    self._chunk(held)
                    held = b""
            self._chunk(held)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _chunk(self, data: bytes) -> None:
        if data:
            self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
            self.wfile.flush()


def tokenize(text: str) -> list[dict[str, Any]]:
    """One special token, then one token per word."""
    return [{"id": number, "text": word, "start": 0, "stop": 0} for number, word in enumerate(["<s>", *text.split()])]


def _native(script: Script, body: dict[str, Any]) -> Iterator[bytes]:
    total = script.tokens or body["parameters"].get("max_new_tokens", 8)
    for index in range(1, total + 1):
        if script.error_after == index - 1:
            yield json.dumps({"error": "Model is overloaded", "error_type": "overloaded"}).encode()
            return
        if script.bad_json_after == index - 1:
            yield b'{"index":'
            return
        is_last = index == total and not script.end_without_final
        details = {
            "finish_reason": script.finish_reason,
            "generated_tokens": total,
            "seed": None,
            "input_length": len(tokenize(body["inputs"])),
        }
        event = {
            "index": index,
            "token": {"id": index, "text": f" {index}", "logprob": -0.5, "special": False},
            "generated_text": "done" if is_last else None,
            "details": details if is_last else None,
        }
        yield json.dumps(event).encode()


def _openai(script: Script, body: dict[str, Any], path: str) -> Iterator[bytes]:
    is_chat = "chat" in path
    total = script.tokens or body.get("max_tokens", 8)

    def chunk(choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> bytes:
        return json.dumps({"id": "", "choices": [choice] if choice else [], "usage": usage}).encode()

    if is_chat:
        yield chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    for index in range(1, total + 1):
        if script.error_after == index - 1:
            yield json.dumps({"error": {"message": "scripted", "http_status_code": 422}}).encode()
            yield b"[DONE]"
            return
        finish = script.finish_reason if index == total and not script.end_without_final else None
        said: dict[str, Any] = {"delta": {"content": f" {index}"}} if is_chat else {"text": f" {index}"}
        yield chunk({"index": 0, **said, "finish_reason": finish})
    if script.end_without_final:
        return
    if script.include_usage and (body.get("stream_options") or {}).get("include_usage"):
        yield chunk(None, {"prompt_tokens": 7, "completion_tokens": total, "total_tokens": total + 7})
    yield b"[DONE]"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is part of many tests: its reset connection is not printed."""


@contextmanager
def stream_server(
    state: ServerState | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[tuple[str, ServerState]]:
    """The URL of a running server, and its state."""
    state = state or ServerState()
    handler = type("ScriptedHandler", (Handler,), {"state": state})
    server = _Server(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        scheme, host = ("http", "127.0.0.1") if tls is None else ("https", "localhost")
        yield f"{scheme}://{host}:{server.server_address[1]}", state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

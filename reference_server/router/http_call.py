"""One HTTP request and its answer, directly on ASGI: reads the body, writes JSON or an event stream.

No framework is between a handler and the server, so a streamed token costs one ASGI message.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic

from reference_server.errors import shorten_error
from reference_server.router.decoder import (
    INLINE_BYTES,
    MalformedJsonError,
    WrongShapeError,
    decode_first,
    decode_json,
)
from reference_server.router.sse import WRITE_NOW, AsgiMessage, EventStream, Header, Send, render_json
from reference_server.router.telemetry.request_context import NO_CONTEXT

AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]

WRONG_CONTENT_TYPE = "Expected request with `Content-Type: application/json`"
TOO_LARGE = "Failed to buffer the request body: length limit exceeded"
NOT_JSON = "Failed to parse the request body as JSON: "
WRONG_SHAPE = "Failed to deserialize the JSON body into the target type: "

_JSON: list[Header] = [(b"content-type", b"application/json")]
PIECE_BYTES = 256 << 10
#: After a body that is too large, this much more is read and discarded, so that the client receives the answer.
_DRAINED_BYTES, _DRAINED_S = 4 << 20, 2.0


class HttpError(Exception):
    """Ends a request with a status and an `ErrorResponse`, for errors without a `RequestError` of their own."""

    def __init__(self, status: int, error: str, error_type: str = "validation", is_decoding: bool = False) -> None:
        super().__init__(shorten_error(error))
        self.status, self.error_type, self.is_decoding = status, error_type, is_decoding


class ClientGoneError(Exception):
    """The client closed the connection."""


class HttpCall:
    """One request: reads its body and writes its answer. Its route sets `context` before the handler runs."""

    def __init__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.receive = receive
        self._scope = scope
        self.context = NO_CONTEXT
        self.has_answered = False
        self._send = send
        self._request_headers: list[Header] = scope["headers"]
        self.headers: list[Header] = []

    def add_headers(self, headers: Iterable[Header]) -> None:
        """Add headers to the answer, of any kind and status."""
        self.headers += headers

    @property
    def client_address(self) -> str:
        """The address of the peer."""
        client = self._scope.get("client")
        return str(client[0]) if client else ""

    @property
    def path_params(self) -> Mapping[str, str]:
        """The variable parts of the path."""
        params: Mapping[str, str] = self._scope["path_params"]
        return params

    def header(self, name: bytes) -> bytes | None:
        """The first value of a request header; `name` in lower case."""
        return next((value for key, value in self._request_headers if key == name), None)

    async def read(self, models: Sequence[type[pydantic.BaseModel]], limit: int) -> pydantic.BaseModel:
        """The body as the first of `models` that accepts it. Raises `HttpError` with 400, 413, 415 or 422."""
        if not is_json(self.header(b"content-type")) or self.header(b"content-encoding") not in (None, b"identity"):
            raise HttpError(415, WRONG_CONTENT_TYPE, is_decoding=True)
        body = await self.read_body(limit)
        if len(body) > INLINE_BYTES:
            return await asyncio.to_thread(_decode, models, body)
        return _decode(models, body)

    async def read_body(self, limit: int) -> bytes:
        """The whole body, at most `limit` bytes."""
        announced = self.header(b"content-length")
        parts: list[bytes] = []
        size = 0
        if announced is not None and announced.isdigit() and int(announced) > limit:
            size = limit + 1
        while size <= limit:
            part, is_last = await self._read_part()
            parts.append(part)
            size += len(part)
            if is_last and size <= limit:
                return b"".join(parts)
            if is_last:
                break
        else:
            await self._drain()
        raise HttpError(413, TOO_LARGE, is_decoding=True)

    async def answer_json(self, value: Any, status: int = 200, headers: Iterable[Header] = ()) -> None:
        """The whole answer: `value` as compact JSON."""
        await self.answer(status, render_json(value), [*_JSON, *headers])

    async def answer_rendered(self, *parts: bytes) -> None:
        """The whole answer: JSON that is rendered already, sent in pieces as the client reads it."""
        self.has_answered = True
        head = [*_JSON, (b"content-length", b"%d" % sum(map(len, parts))), *self.headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})
        for part in parts:
            for start in range(0, len(part), PIECE_BYTES):
                body = part[start : start + PIECE_BYTES]
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer_error(self, status: int, error: str, error_type: str) -> None:
        await self.answer_json({"error": error, "error_type": error_type}, status)

    async def answer(self, status: int, body: bytes = b"", headers: Iterable[Header] = ()) -> None:
        """The whole answer, as bytes; for HEAD without the body."""
        self.has_answered = True
        head = [*headers, (b"content-length", b"%d" % len(body)), *self.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        sent = b"" if self.method == "HEAD" else body
        await self._send({"type": "http.response.body", "body": sent, "more_body": False})

    def stream(self, headers: Iterable[Header] = ()) -> EventStream:
        """The answer as an event stream."""
        self.has_answered = True
        write_now = self._scope.get("extensions", {}).get(WRITE_NOW, {}).get("write")
        return EventStream(self._send, [*headers, *self.headers], write_now=write_now)

    async def _read_part(self) -> tuple[bytes, bool]:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message.get("body", b""), not message.get("more_body", False)

    async def _drain(self) -> None:
        dropped = 0
        try:
            async with asyncio.timeout(_DRAINED_S):
                while dropped < _DRAINED_BYTES:
                    part, is_last = await self._read_part()
                    dropped += len(part)
                    if is_last:
                        return
        except TimeoutError:
            return


Handler = Callable[[HttpCall, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of `method` on `path`. A POST's body is parsed as the first of `bodies` that accepts it.

    `needs_key` has no effect unless an API key is set.
    """

    method: str
    path: str
    handler: Handler
    bodies: tuple[type[pydantic.BaseModel], ...] = ()
    needs_key: bool = False


def is_json(content_type: bytes | None) -> bool:
    """Whether a content type is `application/json` or `application/*+json`, parameters aside."""
    kind = (content_type or b"").split(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _decode(models: Sequence[type[pydantic.BaseModel]], body: bytes) -> pydantic.BaseModel:
    try:
        return decode_first(models, decode_json(body))
    except MalformedJsonError as error:
        raise HttpError(400, f"{NOT_JSON}{error}", is_decoding=True) from None
    except WrongShapeError as error:
        raise HttpError(422, f"{WRONG_SHAPE}{error}", is_decoding=True) from None

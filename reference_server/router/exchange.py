"""One HTTP request and its answer, straight on ASGI: reading the body by the transport rules, writing JSON or events.

No framework stands between a handler and the server: a token costs one ASGI message (performance-cpu.md section 3).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pydantic

from reference_server.errors import shorten_error
from reference_server.router.decoder import (
    INLINE_BYTES,
    MalformedJsonError,
    WrongShapeError,
    decode_first,
    decode_json,
)
from reference_server.router.sse import JSON_OPTIONS, EventStream, Header

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

WRONG_CONTENT_TYPE = "Expected request with `Content-Type: application/json`"
TOO_LARGE = "Failed to buffer the request body: length limit exceeded"
NOT_JSON = "Failed to parse the request body as JSON: "
WRONG_SHAPE = "Failed to deserialize the JSON body into the target type: "

_JSON: list[Header] = [(b"content-type", b"application/json")]
#: After a body that is too large, this much more is read and dropped so that the client sees the answer.
_DRAINED_BYTES, _DRAINED_S = 4 << 20, 2.0


class Refusal(Exception):
    """Ends a request with a status and an `ErrorResponse` that no `RequestError` stands for."""

    def __init__(self, status: int, error: str, error_type: str = "validation", is_decoding: bool = False) -> None:
        super().__init__(shorten_error(error))
        self.status, self.error_type, self.is_decoding = status, error_type, is_decoding


class ClientGoneError(Exception):
    """The connection closed before the body was complete."""


class Exchange:
    """What a handler is given."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.receive = receive
        self._scope = scope
        self.has_answered = False
        self._send = send
        self._request_headers: list[Header] = scope["headers"]
        self.headers: list[Header] = []

    def add_headers(self, headers: Iterable[Header]) -> None:
        """These go on the answer, whatever it is."""
        self.headers += headers

    @property
    def client(self) -> str:
        """What tells this client from others: a digest of the key it sends, else its address."""
        key = self.header(b"authorization")
        return str(self._scope.get("client") and self._scope["client"][0]) if key is None else f"key {hash(key)}"

    @property
    def path_params(self) -> Mapping[str, str]:
        """What the route's path left open."""
        params: Mapping[str, str] = self._scope["path_params"]
        return params

    def header(self, name: bytes) -> bytes | None:
        """The first value of a request header; `name` in lower case."""
        return next((value for key, value in self._request_headers if key == name), None)

    async def read(self, models: Sequence[type[pydantic.BaseModel]], limit: int) -> pydantic.BaseModel:
        """The body as the first of `models` that takes it: steps 6 to 9 of section 0.1, each with its refusal."""
        if not is_json(self.header(b"content-type")) or self.header(b"content-encoding") not in (None, b"identity"):
            raise Refusal(415, WRONG_CONTENT_TYPE, is_decoding=True)
        body = await self.read_body(limit)
        if len(body) > INLINE_BYTES:
            return await asyncio.to_thread(_decode, models, body)
        return _decode(models, body)

    async def read_body(self, limit: int) -> bytes:
        """All of the body, at most `limit` bytes."""
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
        raise Refusal(413, TOO_LARGE, is_decoding=True)

    async def answer_json(self, value: Any, status: int = 200, headers: Iterable[Header] = ()) -> None:
        """The whole answer: `value` as compact JSON."""
        await self.answer(status, orjson.dumps(value, option=JSON_OPTIONS), [*_JSON, *headers])

    async def answer_error(self, status: int, error: str, error_type: str) -> None:
        await self.answer_json({"error": error, "error_type": error_type}, status)

    async def answer(self, status: int, body: bytes = b"", headers: Iterable[Header] = ()) -> None:
        """The whole answer, as bytes; HEAD keeps the headers and loses the body."""
        self.has_answered = True
        head = [*headers, (b"content-length", b"%d" % len(body)), *self.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        sent = b"" if self.method == "HEAD" else body
        await self._send({"type": "http.response.body", "body": sent, "more_body": False})

    def stream(self, headers: Iterable[Header] = ()) -> EventStream:
        """The answer as an event stream."""
        self.has_answered = True
        return EventStream(self._send, [*headers, *self.headers])

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


Handler = Callable[[Exchange, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """What answers `method` on `path`. A POST's body is the first of `bodies` that takes it.

    `needs_key` only matters when a key is set.
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
        raise Refusal(400, f"{NOT_JSON}{error}", is_decoding=True) from None
    except WrongShapeError as error:
        raise Refusal(422, f"{WRONG_SHAPE}{error}", is_decoding=True) from None

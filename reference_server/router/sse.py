"""Event-stream framing: one `data:` line per event, comments while no event is sent."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from types import TracebackType
from typing import Any

import orjson

KEEP_ALIVE_S = 15.0
DONE = b"data: [DONE]\n\n"
_COMMENT = b":\n\n"

#: Extension of our server in a request's scope; its `write` is a `WriteNow` for the body of a streamed answer.
WRITE_NOW = "reference_server.write_now"

Header = tuple[bytes, bytes]
AsgiMessage = MutableMapping[str, Any]
Send = Callable[[AsgiMessage], Awaitable[None]]
WriteNow = Callable[[bytes], bool]

#: float32 scalars are written in the shortest form that reads back as single precision; NaN is null.
JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


def render_event(value: Any) -> bytes:
    r"""One event.

    >>> render_event({"index": 1})
    b'data: {"index":1}\n\n'
    """
    return b"data: %b\n\n" % render_json(value)


def render_json(value: Any) -> bytes:
    """Compact JSON."""
    return orjson.dumps(value, option=JSON_OPTIONS)


class EventStream:
    """A 200 answer whose body is events: enter it with `async with`, then `send` each frame.

    `write_now` writes a frame without a turn of the event loop, if the server and the client allow it. Use it only
    while no `send` is under way.
    """

    def __init__(
        self,
        send: Send,
        headers: Iterable[Header],
        keep_alive_s: float = KEEP_ALIVE_S,
        write_now: WriteNow | None = None,
    ) -> None:
        self._send = send
        self._write_now = write_now
        self._headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), *headers]
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._last_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Future[None] | None = None

    async def __aenter__(self) -> "EventStream":
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._last_s = self._loop.time()
        self._timer = self._loop.call_later(self._keep_alive_s, self._on_timer)
        return self

    async def send(self, frame: bytes) -> None:
        self._last_s = self._loop.time()
        await self._send({"type": "http.response.body", "body": frame, "more_body": True})

    def write_now(self, frame: bytes) -> bool:
        """Write a frame at once; False if it was not written and needs `send`."""
        if self._write_now is None or not self._write_now(frame):
            return False
        self._last_s = self._loop.time()
        return True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
        if kind is None:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _on_timer(self) -> None:
        """One timer per stream, set again for the remaining time; an event only reads the clock."""
        quiet_s = self._loop.time() - self._last_s
        if quiet_s >= self._keep_alive_s:
            self._comment = asyncio.ensure_future(self.send(_COMMENT))
            quiet_s = 0.0
        self._timer = self._loop.call_later(self._keep_alive_s - quiet_s, self._on_timer)

import asyncio
from typing import Any

import pytest

from reference_server.router.app import RouterApp, TransportOptions, cancelled_with_client
from reference_server.router.http_call import ClientGoneError, HttpCall, Route, is_json


class Asgi:
    """The ASGI messages of one request."""

    def __init__(self, *parts: bytes, disconnects: bool = True) -> None:
        self.sent: list[dict[str, Any]] = []
        self.inbox = [
            {"type": "http.request", "body": part, "more_body": index < len(parts) - 1}
            for index, part in enumerate(parts)
        ]
        self._disconnects = disconnects

    async def receive(self) -> dict[str, Any]:
        if self.inbox:
            return self.inbox.pop(0)
        if not self._disconnects:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status


def scope(method: str, path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": list(headers)}


async def test_a_client_that_disconnects_while_sending_gets_no_answer():
    asgi = Asgi()
    asgi.inbox = [{"type": "http.request", "body": b"{", "more_body": True}]
    exchange = HttpCall(scope("POST", "/"), asgi.receive, asgi.send)

    with pytest.raises(ClientGoneError):
        await exchange.read_body(100)


async def test_a_body_is_measured_while_it_arrives():
    exchange = HttpCall(scope("POST", "/"), Asgi(b"12345", b"67890").receive, Asgi().send)

    assert await exchange.read_body(10) == b"1234567890"


async def test_a_client_disconnect_differs_from_a_server_cancellation():
    asgi = Asgi()
    with pytest.raises(ClientGoneError):
        async with cancelled_with_client(asgi.receive):
            await asyncio.Event().wait()

    async def cancelled_from_outside() -> None:
        async with cancelled_with_client(Asgi(disconnects=False).receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(cancelled_from_outside())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_unexpected_error_is_a_500_in_json():
    async def fail(exchange: HttpCall, _: Any) -> None:
        raise RuntimeError("unforeseen")

    asgi = Asgi(disconnects=False)
    app = RouterApp([Route("GET", "/x", fail)], TransportOptions())
    await app(scope("GET", "/x"), asgi.receive, asgi.send)

    assert asgi.status == 500
    assert asgi.sent[1]["body"] == b'{"error":"Internal error","error_type":"internal"}'


@pytest.mark.parametrize(
    ("content_type", "accepted"),
    [
        (b"application/json", True),
        (b"Application/JSON; charset=utf-8", True),
        (b"application/problem+json", True),
        (b"application/jsonx", False),
        (b"text/json", False),
        (b"", False),
        (None, False),
    ],
)
def test_content_types(content_type: bytes | None, accepted: bool):
    assert is_json(content_type) == accepted

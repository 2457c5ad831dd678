import asyncio
import json
import math
import struct
from typing import Any

import numpy
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.router.sse import JSON_OPTIONS, EventStream, render_event


class Wire:
    """Collects ASGI messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    async def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def test_a_stream_has_a_head_frames_and_an_end():
    wire = Wire()
    async with EventStream(wire.send, [(b"x-a", b"b")]) as stream:
        await stream.send(b"data: 1\n\n")
        await stream.send(b"data: 2\n\n")

    head = wire.messages[0]
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    assert head["headers"] == [
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-cache"),
        (b"x-a", b"b"),
    ]
    assert wire.body == b"data: 1\n\ndata: 2\n\n"
    assert [message["more_body"] for message in wire.messages[1:]] == [True, True, False]


async def test_comments_are_sent_while_no_event_is_and_an_event_restarts_the_timer():
    wire = Wire()
    async with EventStream(wire.send, [], keep_alive_s=0.02) as stream:
        while wire.body.count(b":\n\n") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        quiet = wire.body
        await stream.send(b"data: 1\n\n")

    assert set(quiet.split(b"\n\n")) == {b":", b""}
    after = wire.body
    await asyncio.sleep(0.05)
    assert wire.body == after


async def test_a_failed_block_leaves_the_stream_unfinished():
    wire = Wire()
    try:
        async with EventStream(wire.send, []):
            raise RuntimeError
    except RuntimeError:
        pass

    assert wire.messages[-1]["type"] == "http.response.start"


def test_an_event_is_one_line():
    frame = render_event({"text": "a\r\nb\u2028é"})

    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    assert json.loads(frame.removeprefix(b"data: ")) == {"text": "a\r\nb\u2028é"}
    assert "é".encode() in frame


@given(st.floats(width=32))
@settings(max_examples=200)
def test_single_precision_reads_back(value: float):
    text = orjson.dumps(numpy.float32(value), option=JSON_OPTIONS)

    if not math.isfinite(value):
        assert text == b"null"
        return
    assert struct.pack("f", float(text)) == struct.pack("f", value)


def test_the_logprob_of_the_specification():
    assert orjson.dumps(numpy.float32(-0.3400000035762787), option=JSON_OPTIONS) == b"-0.34"

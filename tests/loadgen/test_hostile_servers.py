"""Broken and malicious servers: each request gets a status, in bounded time and memory."""

import itertools
import json
import time

import pytest

from loadgen import exchange as exchange_module
from loadgen import sse
from loadgen.connection import ConnectionPool, Origin
from loadgen.datasets.prompt import Prompt
from loadgen.exchange import Client, Exchange
from loadgen.protocols.dialect import Sampling
from loadgen.protocols.dialects import DIALECTS
from loadgen.recorder import Times, make_record
from reports.results import Phase, RequestPhase, Status
from tests.support.raw_server import raw_server

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
TOKEN = b'data:{"index":1,"token":{"id":1,"text":"a","logprob":0,"special":false}}\n\n'


def final(**details):
    return json.dumps({"token": {"id": 1, "text": "x"}, "generated_text": "x", "details": details}).encode()


def exchange_with(pieces, api="tgi", timeout_s=5.0, streams=True, **server):
    exchange = Exchange()
    with raw_server(pieces, **server) as url:
        pool = ConnectionPool(Origin.parse(url), time.perf_counter_ns)
        client = Client(pool, DIALECTS[api](Sampling(streams=streams)), {}, timeout_s, time.perf_counter_ns)
        client.run(b"{}", exchange)
        pool.close()
    return exchange


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'data:{"token":{"id":1,"text":"\xff\xfe"}}\n\n', Status.BAD_PAYLOAD),
        (b"data:" + b"[" * 100_000 + b"\n\n", Status.BAD_PAYLOAD),
        (b"data:{" + b'"a":{' * 100_000 + b"\n\n", Status.BAD_PAYLOAD),
        (b"data:" + final(generated_tokens=10**30) + b"\n\n", Status.BAD_PAYLOAD),
        (b"data:" + final(generated_tokens=-1) + b"\n\n", Status.BAD_PAYLOAD),
        (b'data:{"token":7}\n\n', Status.BAD_PAYLOAD),
        (b"data:" + final(generated_tokens=1, finish_reason="r" * 10**6) + b"\n\n", Status.OK),
        (b": keep-alive\r\n\r\n" * 1_000 + TOKEN.replace(b"\n", b"\r\n"), Status.TRUNCATED),
        (b"\x00" * 10_000, Status.TRUNCATED),
        (b'data:{"error":"' + b"e" * 10**6 + b'","error_type":"' + b"t" * 10**6 + b'"}\n\n', Status.STREAM_ERROR),
    ],
)
def test_whatever_a_stream_holds_has_a_status(body, status):
    exchange = exchange_with(lambda: [HEAD, body])

    assert exchange.status == status
    assert len(exchange.error_type or "") < 300


def test_texts_of_a_server_are_kept_short_in_records():
    exchange = exchange_with(lambda: [HEAD, b"data:" + final(generated_tokens=1, finish_reason="r" * 10**6) + b"\n\n"])

    record = make_record("r", "1", 0, Phase.MEASURE, Prompt("p"), Times(0, 0), exchange)

    assert len(record.finish_reason) == 100


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n" + b"1" * 5_000,
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n\r\nxxx",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"HTTP/1.1 301 Moved\r\nlocation: /\r\n\r\n",
    ],
)
def test_what_is_no_answer_of_this_api_is_a_protocol_error(head):
    assert exchange_with(lambda: [head]).status == Status.PROTOCOL_ERROR


def test_headers_without_end_are_given_up():
    exchange = exchange_with(lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"a: b\r\n" * 1_000)))

    assert exchange.status == Status.PROTOCOL_ERROR
    assert exchange.bytes_received < 2 * 2**20


def test_a_line_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 200_000)

    exchange = exchange_with(lambda: itertools.chain([HEAD, b"data:"], itertools.repeat(b"x" * 10_000)))

    assert exchange.status == Status.PROTOCOL_ERROR
    assert exchange.bytes_received < 2**20


@pytest.mark.parametrize("streams", [True, False])
def test_a_response_without_end_is_given_up(monkeypatch, streams):
    monkeypatch.setattr(exchange_module, "MAX_RESPONSE_BYTES", 300_000)
    head = HEAD if streams else JSON_HEAD + b"\r\n"

    exchange = exchange_with(lambda: itertools.chain([head], itertools.repeat(b": x\n" * 2_500)), streams=streams)

    assert exchange.status == Status.PROTOCOL_ERROR
    assert exchange.bytes_received < 2**20


@pytest.mark.parametrize("head", [b"", HEAD])
def test_a_slow_drip_runs_into_the_limit(head):
    exchange = exchange_with(lambda: itertools.chain([head], itertools.repeat(b":")), timeout_s=0.3, pause_s=0.02)

    assert exchange.status in (Status.TIMEOUT, Status.PROTOCOL_ERROR)


@pytest.mark.parametrize(
    ("pieces", "status", "phase"),
    [
        ([], Status.CONNECT_ERROR, RequestPhase.HEADERS),
        ([HEAD], Status.TRUNCATED, RequestPhase.FIRST_EVENT),
        ([HEAD, TOKEN], Status.TRUNCATED, RequestPhase.STREAM),
    ],
)
def test_a_reset_has_the_status_of_its_moment(pieces, status, phase):
    exchange = exchange_with(lambda: pieces, resets=True, pause_s=0.05)

    assert exchange.status == status
    assert exchange.error_type.startswith(f"{phase}/")


def test_an_event_of_a_megabyte_is_an_event():
    text = b"x" * 2**20
    event = b'data:{"token":{"id":1,"text":"%s"},"generated_text":"x"}\n\n' % text

    exchange = exchange_with(lambda: [HEAD, event])

    assert (exchange.status, len(exchange.answer.event_ns)) == (Status.OK, 1)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"generated_text":"x"}', Status.OK),
        (b'{"error":"busy","error_type":"overloaded"}', Status.STREAM_ERROR),
        (b'{"generated_text":', Status.BAD_PAYLOAD),
        (b"[]", Status.PROTOCOL_ERROR),
        (b"{}", Status.PROTOCOL_ERROR),
        (b"", Status.BAD_PAYLOAD),
    ],
)
def test_a_blocking_answer_has_a_status_too(body, status):
    head = JSON_HEAD + b"x-queue-time: " + b"9" * 5_000 + b"\r\nx-inference-time: soon\r\n\r\n"

    exchange = exchange_with(lambda: [head, body], streams=False)

    assert exchange.status == status
    assert exchange.answer.srv_queue_s is None


def test_a_blocking_answer_that_is_cut_is_truncated():
    exchange = exchange_with(lambda: [JSON_HEAD + b"content-length: 50\r\n\r\n", b'{"generated_text"'], streams=False)

    assert (exchange.status, exchange.error_type) == (Status.TRUNCATED, "first_event/closed")

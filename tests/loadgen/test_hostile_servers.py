"""Broken and malicious servers: each request gets a status, in bounded time and memory."""

import itertools
import json
import time

import pytest

from loadgen.connection import ConnectionPool, Origin
from loadgen.datasets.prompt import Prompt
from loadgen.exchange import Client
from loadgen.limits import RequestLimits
from loadgen.protocols.dialect import Sampling
from loadgen.protocols.dialects import DIALECTS
from loadgen.reception import Exchange
from loadgen.recorder import Times, count_output, make_record
from reports.records import Phase, RequestPhase, Status, TokensSource
from tests.support.raw_server import raw_server

LIMITS = RequestLimits(5.0)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
TOKEN = b'data:{"index":1,"token":{"id":1,"text":"a","logprob":0,"special":false}}\n\n'


def final(**details):
    return json.dumps({"token": {"id": 1, "text": "x"}, "generated_text": "x", "details": details}).encode()


def exchange_with(pieces, api="tgi", limits=LIMITS, streams=True, **server):
    exchange = Exchange()
    with raw_server(pieces, **server) as url:
        pool = ConnectionPool(Origin.parse(url), time.perf_counter_ns)
        client = Client(pool, DIALECTS[api](Sampling(streams=streams)), {}, limits, time.perf_counter_ns)
        client.run(b"{}", exchange)
        pool.close()
    return exchange


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'data:{"token":{"id":1,"text":"\xff\xfe"}}\n\n', Status.BAD_PAYLOAD),
        (b"data:" + b"[" * 100_000 + b"\n\n", Status.BAD_PAYLOAD),
        (b"data:{" + b'"a":{' * 100_000 + b"\n\n", Status.BAD_PAYLOAD),
        (b'data:{"token":7}\n\n', Status.BAD_PAYLOAD),
        (b"data:" + final(generated_tokens=1, finish_reason="r" * 10**6) + b"\n\n", Status.OK),
        (b": keep-alive\r\n\r\n" * 1_000 + TOKEN.replace(b"\n", b"\r\n"), Status.TRUNCATED),
        (b"\x00" * 10_000, Status.TRUNCATED),
        (b'data:{"error":"' + b"e" * 400_000 + b'","error_type":"' + b"t" * 400_000 + b'"}\n\n', Status.STREAM_ERROR),
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


def test_a_line_without_end_is_given_up():
    limits = RequestLimits(5.0, line_bytes=200_000)

    exchange = exchange_with(lambda: itertools.chain([HEAD, b"data:"], itertools.repeat(b"x" * 10_000)), limits=limits)

    assert exchange.status == Status.PROTOCOL_ERROR
    assert exchange.bytes_received < 2**20


@pytest.mark.parametrize("streams", [True, False])
def test_a_response_without_end_is_given_up(streams):
    limits = RequestLimits(5.0, response_bytes=300_000)
    pieces = itertools.chain([HEAD if streams else JSON_HEAD + b"\r\n"], itertools.repeat(b": x\n" * 2_500))

    exchange = exchange_with(lambda: pieces, streams=streams, limits=limits)

    assert exchange.status == Status.PROTOCOL_ERROR
    assert exchange.bytes_received < 2**20


@pytest.mark.parametrize("head", [b"", HEAD])
def test_a_slow_drip_runs_into_the_limit(head):
    exchange = exchange_with(
        lambda: itertools.chain([head], itertools.repeat(b":")), limits=RequestLimits(0.3), pause_s=0.02
    )

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


@pytest.mark.parametrize(
    ("limits", "status"),
    [(RequestLimits(5.0), Status.PROTOCOL_ERROR), (RequestLimits(5.0, line_bytes=2**21), Status.OK)],
)
def test_an_event_of_a_megabyte_is_an_event_where_lines_may_be_that_long(limits, status):
    event = b'data:{"token":{"id":1,"text":"%s"},"generated_text":"x"}\n\n' % (b"x" * 2**20)

    assert exchange_with(lambda: [HEAD, event], limits=limits).status == status


@pytest.mark.parametrize("count", [b"-1", b"1" + b"0" * 300, b'"two"', b"NaN", b"1.5", b"true", b"[]"])
def test_reliability_4_10_95_a_token_count_that_is_none_is_null_and_the_next_source_counts(count):
    usage = b'data:{"choices":[{"delta":{"content":"a"},"finish_reason":%s}],"usage":{"completion_tokens":%s}}\n\n'

    exchange = exchange_with(lambda: [HEAD, usage % (b"null", count) + usage % (b'"stop"', count)], "openai-chat")
    tgi = exchange_with(
        lambda: [HEAD, b'data:{"token":{},"generated_text":"","details":{"generated_tokens":%s}}' % count]
    )

    assert (exchange.status, count_output(exchange.answer)) == (Status.OK, (2, TokensSource.EVENTS))
    assert (tgi.status, count_output(tgi.answer)) == (Status.OK, (1, TokensSource.SERVER_STREAM))
    assert tgi.answer.usage_output_tokens is None


def test_reliability_4_10_93_what_follows_the_end_is_ignored_and_noted():
    done = b'data:{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\ndata:[DONE]\n\n'

    for after in (b"data:[DONE]\n\n", b'data:{"choices":[{"delta":{"content":"b"}}]}\n\n', b'data:{"error":{}}\n\n'):
        exchange = exchange_with(lambda after=after: [HEAD, done, after], "openai-chat")

        assert (exchange.status, len(exchange.answer.event_ns)) == (Status.OK, 1)
        assert exchange.error_type == "stream/data after the end"


@pytest.mark.parametrize(
    ("head", "limits", "cause"),
    [
        (b"", RequestLimits(5.0, first_event_s=0.2), "headers/first_event_timeout"),
        (HEAD, RequestLimits(5.0, first_event_s=0.2), "first_event/first_event_timeout"),
        (HEAD + TOKEN, RequestLimits(5.0, stall_s=0.2), "stream/stall_timeout"),
        (HEAD + TOKEN, RequestLimits(0.2, stall_s=5.0), "stream/timeout"),
    ],
)
def test_reliability_T41_comments_are_no_progress_and_the_limit_that_passed_is_named(head, limits, cause):
    drip = itertools.repeat(b": x\n\n" if head else b"")

    exchange = exchange_with(lambda: itertools.chain([head], drip), limits=limits, pause_s=0.02)

    assert (exchange.status, exchange.error_type) == (Status.TIMEOUT, cause)


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (b"429 Too Many Requests", b"retry-after: 5\r\n", (Status.OVERLOADED, "first_event/429")),
        (b"503 Unavailable", b"retry-after: Wed, 21 Oct 2065 07:28:00 GMT\r\n", (Status.HTTP_5XX, "first_event/503")),
        (b"503 Unavailable", b"", (Status.HTTP_5XX, "first_event/503")),
    ],
)
def test_reliability_4_10_94_a_server_that_asks_for_a_retry_gets_none(status, headers, expected):
    connections = []
    body = b'{"error":{"message":"later","type":"overloaded"}}'
    response = b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, headers, len(body), body)

    exchange = exchange_with(lambda: connections.append(1) or [response])

    assert (exchange.status, exchange.error_type) == expected
    assert exchange.error_body == body
    assert len(connections) == 1


def test_reliability_4_10_96_a_cookie_is_ignored():
    head = HEAD.replace(b"\r\n\r\n", b"\r\nset-cookie: a=b; HttpOnly\r\nset-cookie: c=d\r\n\r\n")

    assert exchange_with(lambda: [head, b"data:" + final(generated_tokens=1) + b"\n\n"]).status == Status.OK


def test_reliability_4_10_90_an_event_of_100_megabytes_is_read_no_further_than_the_limit():
    exchange = exchange_with(lambda: itertools.chain([HEAD, b'data:{"'], itertools.repeat(b"x" * 2**20, 100)))

    assert (exchange.status, exchange.error_type) == (
        Status.PROTOCOL_ERROR,
        "first_event/a line of the stream exceeds 1048576 bytes",
    )
    assert exchange.bytes_received < 2**21


def test_interim_responses_without_end_are_given_up():
    exchange = exchange_with(lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n"))

    assert exchange.status == Status.PROTOCOL_ERROR
    assert exchange.bytes_received < 2**20


def test_reliability_4_10_97_a_reset_at_every_byte_is_a_connect_error_before_the_headers_and_truncated_after():
    response = HEAD + TOKEN
    is_over = len(HEAD)

    for cut in range(len(response)):
        exchange = exchange_with(lambda cut=cut: [response[:cut]], resets=True)

        expected = Status.CONNECT_ERROR if cut < is_over else Status.TRUNCATED
        assert exchange.status == expected, cut


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

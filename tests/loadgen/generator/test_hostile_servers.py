"""Broken and malicious servers: each request gets a status, in bounded time and memory."""

import itertools
import json
import time

import pytest

from loadgen.dialects.dialect import Sampling
from loadgen.dialects.registry import DIALECTS
from loadgen.generator.recorder import Times, count_output, make_record
from loadgen.http.call import Client
from loadgen.http.connection import ConnectionPool, Origin
from loadgen.http.response_reader import CallLimits, ClientCall
from loadgen.workloads.prompts.prompt import Prompt
from reports.run_schema import Phase, RequestPhase, Status, TokensSource
from tests.support.servers.raw_server import raw_server

LIMITS = CallLimits(5.0)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
TOKEN = b'data:{"index":1,"token":{"id":1,"text":"a","logprob":0,"special":false}}\n\n'


def final(**details):
    return json.dumps({"token": {"id": 1, "text": "x"}, "generated_text": "x", "details": details}).encode()


def exchange_with(pieces, api="tgi", limits=LIMITS, streams=True, **server):
    call = ClientCall()
    with raw_server(pieces, **server) as url:
        pool = ConnectionPool(Origin.parse(url), time.perf_counter_ns)
        client = Client(pool, DIALECTS[api](Sampling(streams=streams)), {}, limits, time.perf_counter_ns)
        client.run(b"{}", call)
        pool.close()
    return call


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
def test_every_stream_ends_with_a_status(body, status):
    call = exchange_with(lambda: [HEAD, body])

    assert call.status == status
    assert len(call.error_type or "") < 300


def test_long_texts_of_a_server_are_truncated_in_records():
    call = exchange_with(lambda: [HEAD, b"data:" + final(generated_tokens=1, finish_reason="r" * 10**6) + b"\n\n"])

    record = make_record("r", "1", 0, Phase.MEASURE, Prompt("p"), Times(0, 0), call)

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
def test_an_answer_of_another_protocol_is_a_protocol_error(head):
    assert exchange_with(lambda: [head]).status == Status.PROTOCOL_ERROR


def test_headers_over_the_limit_are_refused():
    call = exchange_with(lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"a: b\r\n" * 1_000)))

    assert call.status == Status.PROTOCOL_ERROR
    assert call.bytes_received < 2 * 2**20


def test_a_line_over_the_limit_is_refused():
    limits = CallLimits(5.0, line_bytes=200_000)

    call = exchange_with(lambda: itertools.chain([HEAD, b"data:"], itertools.repeat(b"x" * 10_000)), limits=limits)

    assert call.status == Status.PROTOCOL_ERROR
    assert call.bytes_received < 2**20


@pytest.mark.parametrize("streams", [True, False])
def test_a_response_over_the_limit_is_refused(streams):
    limits = CallLimits(5.0, response_bytes=300_000)
    pieces = itertools.chain([HEAD if streams else JSON_HEAD + b"\r\n"], itertools.repeat(b": x\n" * 2_500))

    call = exchange_with(lambda: pieces, streams=streams, limits=limits)

    assert call.status == Status.PROTOCOL_ERROR
    assert call.bytes_received < 2**20


@pytest.mark.parametrize("head", [b"", HEAD])
def test_a_slowly_sent_response_reaches_the_deadline(head):
    call = exchange_with(lambda: itertools.chain([head], itertools.repeat(b":")), limits=CallLimits(0.3), pause_s=0.02)

    assert call.status in (Status.TIMEOUT, Status.PROTOCOL_ERROR)


@pytest.mark.parametrize(
    ("pieces", "status", "phase"),
    [
        ([], Status.CONNECT_ERROR, RequestPhase.HEADERS),
        ([HEAD], Status.TRUNCATED, RequestPhase.FIRST_EVENT),
        ([HEAD, TOKEN], Status.TRUNCATED, RequestPhase.STREAM),
    ],
)
def test_the_status_of_a_reset_depends_on_its_phase(pieces, status, phase):
    call = exchange_with(lambda: pieces, resets=True, pause_s=0.05)

    assert call.status == status
    assert call.error_type.startswith(f"{phase}/")


@pytest.mark.parametrize(
    ("limits", "status"),
    [(CallLimits(5.0), Status.PROTOCOL_ERROR), (CallLimits(5.0, line_bytes=2**21), Status.OK)],
)
def test_an_event_of_a_megabyte_is_accepted_below_the_line_limit(limits, status):
    event = b'data:{"token":{"id":1,"text":"%s"},"generated_text":"x"}\n\n' % (b"x" * 2**20)

    assert exchange_with(lambda: [HEAD, event], limits=limits).status == status


@pytest.mark.parametrize("count", [b"-1", b"1" + b"0" * 300, b'"two"', b"NaN", b"1.5", b"true", b"[]"])
def test_reliability_4_10_95_a_wrong_token_count_is_null_and_the_next_source_is_used(count):
    usage = b'data:{"choices":[{"delta":{"content":"a"},"finish_reason":%s}],"usage":{"completion_tokens":%s}}\n\n'

    call = exchange_with(lambda: [HEAD, usage % (b"null", count) + usage % (b'"stop"', count)], "openai-chat")
    tgi = exchange_with(
        lambda: [HEAD, b'data:{"token":{},"generated_text":"","details":{"generated_tokens":%s}}' % count]
    )

    assert (call.status, count_output(call.answer)) == (Status.OK, (2, TokensSource.EVENTS))
    assert (tgi.status, count_output(tgi.answer)) == (Status.OK, (1, TokensSource.SERVER_STREAM))
    assert tgi.answer.usage_output_tokens is None


def test_reliability_4_10_93_data_after_the_end_is_ignored_and_noted():
    done = b'data:{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\ndata:[DONE]\n\n'

    for after in (b"data:[DONE]\n\n", b'data:{"choices":[{"delta":{"content":"b"}}]}\n\n', b'data:{"error":{}}\n\n'):
        call = exchange_with(lambda after=after: [HEAD, done, after], "openai-chat")

        assert (call.status, len(call.answer.event_ns)) == (Status.OK, 1)
        # The phase depends on whether the first read already has all of it.
        assert call.error_type in ("stream/data after the end", "first_event/data after the end")


@pytest.mark.parametrize(
    ("head", "limits", "cause"),
    [
        (b"", CallLimits(5.0, first_event_s=0.2), "headers/first_event_timeout"),
        (HEAD, CallLimits(5.0, first_event_s=0.2), "first_event/first_event_timeout"),
        (HEAD + TOKEN, CallLimits(5.0, stall_s=0.2), "stream/stall_timeout"),
        (HEAD + TOKEN, CallLimits(1.0, stall_s=5.0), "stream/timeout"),
    ],
)
def test_reliability_T41_comments_are_not_progress_and_the_passed_limit_is_named(head, limits, cause):
    drip = itertools.repeat(b": x\n\n" if head else b"")

    call = exchange_with(lambda: itertools.chain([head], drip), limits=limits, pause_s=0.02)

    assert (call.status, call.error_type) == (Status.TIMEOUT, cause)


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (b"429 Too Many Requests", b"retry-after: 5\r\n", (Status.OVERLOADED, "first_event/429: later")),
        (
            b"503 Unavailable",
            b"retry-after: Wed, 21 Oct 2065 07:28:00 GMT\r\n",
            (Status.HTTP_5XX, "first_event/503: later"),
        ),
        (b"503 Unavailable", b"", (Status.HTTP_5XX, "first_event/503: later")),
    ],
)
def test_reliability_4_10_94_a_retry_header_causes_no_retry(status, headers, expected):
    connections = []
    body = b'{"error":{"message":"later","type":"overloaded"}}'
    response = b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, headers, len(body), body)

    call = exchange_with(lambda: connections.append(1) or [response])

    assert (call.status, call.error_type) == expected
    assert call.error_body == body
    assert len(connections) == 1


def test_reliability_4_10_96_a_cookie_is_ignored():
    head = HEAD.replace(b"\r\n\r\n", b"\r\nset-cookie: a=b; HttpOnly\r\nset-cookie: c=d\r\n\r\n")

    assert exchange_with(lambda: [head, b"data:" + final(generated_tokens=1) + b"\n\n"]).status == Status.OK


def test_reliability_4_10_90_an_event_of_100_megabytes_is_read_no_further_than_the_limit():
    call = exchange_with(lambda: itertools.chain([HEAD, b'data:{"'], itertools.repeat(b"x" * 2**20, 100)))

    assert (call.status, call.error_type) == (
        Status.PROTOCOL_ERROR,
        "first_event/a line of the stream exceeds 1048576 bytes",
    )
    assert call.bytes_received < 2**21


def test_too_many_interim_responses_are_refused():
    call = exchange_with(lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n"))

    assert call.status == Status.PROTOCOL_ERROR
    assert call.bytes_received < 2**20


def test_reliability_4_10_97_a_reset_at_every_byte_is_a_connect_error_before_the_headers_and_truncated_after():
    response = HEAD + TOKEN
    is_over = len(HEAD)

    for cut in range(len(response)):
        call = exchange_with(lambda cut=cut: [response[:cut]], resets=True)

        expected = Status.CONNECT_ERROR if cut < is_over else Status.TRUNCATED
        assert call.status == expected, cut


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
def test_a_blocking_answer_has_a_status(body, status):
    head = JSON_HEAD + b"x-queue-time: " + b"9" * 5_000 + b"\r\nx-inference-time: soon\r\n\r\n"

    call = exchange_with(lambda: [head, body], streams=False)

    assert call.status == status
    assert call.answer.srv_queue_s is None


def test_a_blocking_answer_that_is_cut_is_truncated():
    call = exchange_with(lambda: [JSON_HEAD + b"content-length: 50\r\n\r\n", b'{"generated_text"'], streams=False)

    assert (call.status, call.error_type) == (Status.TRUNCATED, "first_event/closed")

import time

import pytest

from loadgen.connection import ConnectionPool, Origin
from loadgen.datasets.prompt import Prompt
from loadgen.exchange import Client
from loadgen.limits import RequestLimits
from loadgen.protocols.dialect import Sampling
from loadgen.protocols.dialects import DIALECTS
from loadgen.reception import Exchange
from loadgen.recorder import count_output
from reports.records import Status, TokensSource
from tests.support.stream_server import Script, ServerState, stream_server

PROMPT = Prompt("p", text="one two three", output_tokens=5)


@pytest.fixture
def state():
    return ServerState()


@pytest.fixture
def url(state):
    with stream_server(state) as (url, _):
        yield url


@pytest.fixture
def connect():
    """Makes clients whose connections are closed with the test."""
    pools = []

    def make(url, api="tgi", limits=None, headers=None):
        pools.append(ConnectionPool(Origin.parse(url), time.perf_counter_ns))
        return Client(
            pools[-1], DIALECTS[api](Sampling()), headers or {}, limits or RequestLimits(5.0), time.perf_counter_ns
        )

    yield make
    for pool in pools:
        pool.close()


def exchange_with(client, prompt=PROMPT):
    exchange = Exchange()
    client.run(client.dialect.body(prompt), exchange)
    return exchange


@pytest.mark.parametrize("api", ["tgi", "openai-chat", "openai-completions"])
def test_a_whole_stream_is_ok_and_its_moments_are_in_order(url, api, connect):
    exchange = exchange_with(connect(url, api))

    answer = exchange.answer
    moments = [exchange.sent_ns, exchange.headers_ns, *answer.event_ns, exchange.end_ns]
    assert exchange.status == Status.OK
    assert moments == sorted(moments)
    assert len(answer.event_ns) == 5
    assert answer.finish_reason == "length"


def test_tokens_are_counted_from_the_best_source(url, state, connect):
    tgi = exchange_with(connect(url, "tgi")).answer
    usage = exchange_with(connect(url, "openai-chat")).answer
    state.script = lambda body: Script(include_usage=False)
    bare = exchange_with(connect(url, "openai-chat")).answer

    assert count_output(tgi) == (5, TokensSource.SERVER_STREAM)
    assert count_output(usage) == (5, TokensSource.SERVER_USAGE)
    assert count_output(bare) == (5, TokensSource.EVENTS)


@pytest.mark.parametrize(
    ("script", "status", "error_type"),
    [
        (Script(status=429), Status.OVERLOADED, "first_event/429"),
        (Script(status=422), Status.HTTP_4XX, "first_event/422"),
        (Script(status=500), Status.HTTP_5XX, "first_event/500"),
        (Script(status=302), Status.PROTOCOL_ERROR, "first_event/status 302"),
        (Script(status=204, body=b""), Status.PROTOCOL_ERROR, "first_event/status 204"),
        (Script(body=b"<html>", content_type="text/html"), Status.PROTOCOL_ERROR, None),
        (Script(body=b"[1]", content_type="application/json"), Status.PROTOCOL_ERROR, None),
        (Script(body=b"data: [1]\n\n"), Status.PROTOCOL_ERROR, None),
        (Script(body=b""), Status.TRUNCATED, "first_event/empty stream"),
        (Script(error_after=0), Status.STREAM_ERROR, "first_event/overloaded"),
        (Script(error_after=2), Status.STREAM_ERROR, "stream/overloaded"),
        (Script(cut_after=3), Status.TRUNCATED, None),
        (Script(end_without_final=True), Status.TRUNCATED, "stream/no terminator"),
        (Script(bad_json_after=2), Status.BAD_PAYLOAD, None),
    ],
)
def test_every_end_has_its_status(url, state, script, status, error_type, connect):
    state.script = lambda body: script

    exchange = exchange_with(connect(url))

    assert exchange.status == status
    assert error_type is None or exchange.error_type == error_type


def test_an_error_inside_an_openai_stream_outweighs_its_terminator(url, state, connect):
    state.script = lambda body: Script(error_after=2)

    exchange = exchange_with(connect(url, "openai-chat"))

    assert exchange.status == Status.STREAM_ERROR
    assert len(exchange.answer.event_ns) == 2


def test_tokens_before_a_cut_are_kept(url, state, connect):
    state.script = lambda body: Script(cut_after=3)

    exchange = exchange_with(connect(url))

    assert len(exchange.answer.event_ns) == 3
    assert exchange.error_type is not None
    assert exchange.error_type.startswith("stream/")


def test_nobody_listening_is_a_connect_error(connect):
    exchange = exchange_with(connect("http://127.0.0.1:9"))

    assert exchange.status == Status.CONNECT_ERROR
    assert exchange.error_type == "connect/ConnectionRefusedError"
    assert exchange.sent_ns is None


@pytest.mark.parametrize(("script", "phase"), [(Script(first_s=3), "first_event"), (Script(gap_s=3), "stream")])
def test_a_limit_that_passes_is_a_timeout_and_names_where(url, state, script, phase, connect):
    state.script = lambda body: script

    exchange = exchange_with(connect(url, limits=RequestLimits(0.1)))

    assert exchange.status == Status.TIMEOUT
    assert exchange.error_type == f"{phase}/timeout"


def test_a_connection_serves_many_requests(url, state, connect):
    client = connect(url)

    exchanges = [exchange_with(client) for _ in range(4)]

    assert [exchange.is_reused for exchange in exchanges] == [False, True, True, True]
    assert state.connections == 1


def test_a_connection_that_the_server_closed_is_replaced(url, state, connect):
    state.script = lambda body: Script(closes=True)
    client = connect(url)

    exchanges = [exchange_with(client) for _ in range(3)]

    assert [exchange.status for exchange in exchanges] == [Status.OK] * 3
    assert state.connections == 3


def test_a_connection_that_died_while_idle_costs_no_failure(url, connect):
    client = connect(url)
    exchange_with(client)
    (idle,) = client.pool._idle
    idle.sock.shutdown(2)

    exchange = exchange_with(client)

    assert exchange.status == Status.OK
    assert exchange.is_reused is False


def test_every_event_is_timed_when_it_comes_not_when_a_buffer_is_full(url, state, connect):
    """The server notes when it wrote each event; each must be seen before the next one was written."""
    written_ns = []
    state.script = lambda body: Script(
        first_s=0.02, gap_s=0.02, wrote=lambda: written_ns.append(time.perf_counter_ns())
    )

    exchange = exchange_with(connect(url))

    seen_ns = exchange.answer.event_ns
    assert len(written_ns) == len(seen_ns) == 5
    order = [name for _, name in sorted([(at, "w") for at in written_ns] + [(at, "s") for at in seen_ns])]
    assert order == ["w", "s"] * 5
    assert exchange.coalesced_events == 0


def test_events_of_one_read_share_a_time_and_are_counted(url, state, connect):
    state.script = lambda body: Script(tokens=6, coalesce=3, gap_s=0.005)

    exchange = exchange_with(connect(url))

    events = exchange.answer.event_ns
    assert len(events) == 6
    assert events[0] == events[1] == events[2] < events[3] == events[4] == events[5]
    assert exchange.coalesced_events == 4


def test_headers_of_the_target_go_with_every_request(url, state, connect):
    exchange_with(connect(url, headers={"Authorization": "Bearer k"}))

    assert state.requests[0]["headers"]["Authorization"] == "Bearer k"

import socket
import time

import pytest

from loadgen.dialects.dialect import Sampling
from loadgen.dialects.registry import DIALECTS
from loadgen.generator.recorder import count_output
from loadgen.http.call import Client
from loadgen.http.connection import Connection, ConnectionPool, Origin
from loadgen.http.response_reader import CallLimits, ClientCall
from loadgen.workloads.prompts.prompt import Prompt
from reports.run_schema import Status, TokensSource
from tests.support.servers.stream_server import Script, ServerState

PROMPT = Prompt("p", text="one two three", output_tokens=5)


@pytest.fixture
def state():
    return ServerState()


@pytest.fixture
def connect():
    """Makes clients whose connections are closed with the test."""
    pools = []

    def make(url, api="tgi", limits=None, headers=None):
        pools.append(ConnectionPool(Origin.parse(url), time.perf_counter_ns))
        return Client(
            pools[-1], DIALECTS[api](Sampling()), headers or {}, limits or CallLimits(5.0), time.perf_counter_ns
        )

    yield make
    for pool in pools:
        pool.close()


def exchange_with(client, prompt=PROMPT):
    call = ClientCall()
    client.run(client.dialect.body(prompt), call)
    return call


@pytest.mark.parametrize("api", ["tgi", "openai-chat", "openai-completions"])
def test_a_complete_stream_is_ok_and_its_times_are_in_order(url, api, connect):
    call = exchange_with(connect(url, api))

    answer = call.answer
    moments = [call.sent_ns, call.headers_ns, *answer.event_ns, call.end_ns]
    assert call.status == Status.OK
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
        (Script(status=429), Status.OVERLOADED, "first_event/429: scripted"),
        (Script(status=422), Status.HTTP_4XX, "first_event/422: scripted"),
        (Script(status=500), Status.HTTP_5XX, "first_event/500: scripted"),
        (Script(status=401), Status.HTTP_4XX, "first_event/401"),
        (Script(status=502, body=b"<html>bad"), Status.HTTP_5XX, "first_event/502"),
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

    call = exchange_with(connect(url))

    assert call.status == status
    assert error_type is None or call.error_type == error_type


def test_an_error_inside_an_openai_stream_outweighs_its_terminator(url, state, connect):
    state.script = lambda body: Script(error_after=2)

    call = exchange_with(connect(url, "openai-chat"))

    assert call.status == Status.STREAM_ERROR
    assert len(call.answer.event_ns) == 2


def test_tokens_before_a_cut_are_kept(url, state, connect):
    state.script = lambda body: Script(cut_after=3)

    call = exchange_with(connect(url))

    assert len(call.answer.event_ns) == 3
    assert call.error_type is not None
    assert call.error_type.startswith("stream/")


def test_a_refused_connection_is_a_connect_error(connect):
    call = exchange_with(connect("http://127.0.0.1:9"))

    assert call.status == Status.CONNECT_ERROR
    assert call.error_type == "connect/ConnectionRefusedError"
    assert call.sent_ns is None


@pytest.mark.parametrize(("script", "phase"), [(Script(first_s=3), "first_event"), (Script(gap_s=3), "stream")])
def test_a_passed_limit_is_a_timeout_with_its_phase(url, state, script, phase, connect):
    state.script = lambda body: script

    call = exchange_with(connect(url, limits=CallLimits(0.1)))

    assert call.status == Status.TIMEOUT
    assert call.error_type == f"{phase}/timeout"


def test_a_connection_serves_many_requests(url, state, connect):
    client = connect(url)

    exchanges = [exchange_with(client) for _ in range(4)]

    assert [call.is_reused for call in exchanges] == [False, True, True, True]
    assert state.connections == 1


def test_a_connection_that_the_server_closed_is_replaced(url, state, connect):
    state.script = lambda body: Script(closes=True)
    client = connect(url)

    exchanges = [exchange_with(client) for _ in range(3)]

    assert [call.status for call in exchanges] == [Status.OK] * 3
    assert state.connections == 3


def test_a_connection_that_broke_while_idle_causes_no_failure(url, connect):
    client = connect(url)
    exchange_with(client)
    idle = client.pool.take(timeout_s=5.0)
    idle.sock.shutdown(2)
    client.pool.give_back(idle)

    call = exchange_with(client)

    assert call.status == Status.OK
    assert call.is_reused is False


@pytest.mark.parametrize("is_reused", [False, True])
def test_trust_W2_a_request_dropped_after_the_send_fails_and_is_sent_once(url, state, connect, is_reused):
    client = connect(url)
    if is_reused:
        exchange_with(client)
        state.requests.clear()
    state.script = lambda body: Script(first_s=0.3, drops=len(state.requests) == 1)
    before_ns = time.perf_counter_ns()

    call = exchange_with(client)

    assert len(state.requests) == 1
    assert (call.status, call.error_type) == (Status.CONNECT_ERROR, "headers/ConnectionResetError")
    assert call.is_reused is is_reused
    assert 0 <= call.sent_ns - before_ns < 0.2e9
    assert call.end_ns - call.sent_ns >= 0.25e9


def test_trust_W2_a_connection_idle_for_more_than_two_seconds_is_not_reused(url, state):
    late_ns = 0
    pool = ConnectionPool(Origin.parse(url), lambda: time.perf_counter_ns() + late_ns)
    client = Client(pool, DIALECTS["tgi"](Sampling()), {}, CallLimits(50.0), lambda: time.perf_counter_ns() + late_ns)

    calls = []
    for idle_s in (0.0, 1.5, 2.5):
        late_ns += round(idle_s * 1e9)
        calls.append(exchange_with(client))
    pool.close()

    assert [call.is_reused for call in calls] == [False, True, False]
    assert [call.status for call in calls] == [Status.OK] * 3


def test_trust_W2_a_reused_connection_that_refuses_the_first_byte_is_replaced(url, state, connect, monkeypatch):
    client = connect(url)
    exchange_with(client)
    monkeypatch.setattr(Connection, "is_stale", lambda self: self.sock.shutdown(socket.SHUT_WR))

    call = exchange_with(client)

    assert (call.status, call.is_reused) == (Status.OK, False)
    assert len(state.requests) == 2


def test_every_event_is_timed_when_it_arrives_not_when_a_buffer_is_full(url, state, connect):
    """The server notes when it wrote each event; each must be seen before the next one was written."""
    written_ns = []
    state.script = lambda body: Script(
        first_s=0.02, gap_s=0.02, wrote=lambda: written_ns.append(time.perf_counter_ns())
    )

    call = exchange_with(connect(url))

    seen_ns = call.answer.event_ns
    assert len(written_ns) == len(seen_ns) == 5
    order = [name for _, name in sorted([(at, "w") for at in written_ns] + [(at, "s") for at in seen_ns])]
    assert order == ["w", "s"] * 5
    assert call.coalesced_events == 0


def test_events_of_one_read_share_a_time_and_are_counted(url, state, connect):
    state.script = lambda body: Script(tokens=6, coalesce=3, gap_s=0.005)

    call = exchange_with(connect(url))

    events = call.answer.event_ns
    assert len(events) == 6
    assert events[0] == events[1] == events[2] < events[3] == events[4] == events[5]
    assert call.coalesced_events == 4


def test_headers_of_the_target_go_with_every_request(url, state, connect):
    exchange_with(connect(url, headers={"Authorization": "Bearer k"}))

    assert state.requests[0]["headers"]["Authorization"] == "Bearer k"

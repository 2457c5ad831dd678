"""Arrival times from the kernel: a late reader does not change them."""

import json
import socket
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadgen.dialects.dialect import Sampling
from loadgen.dialects.tgi import Tgi
from loadgen.http.arrival_times import ArrivalTimes, total_arrival_times
from loadgen.http.connection import READ_BYTES
from loadgen.http.response_reader import CallLimits, ClientCall, ResponseReader
from loadgen.selftest.reference_timing_server import HEAD, render_event, timing_server
from loadgen.target.control import ControlClient

ROOT = Path(__file__).resolve().parents[3]
MS = 1_000_000
S = 1_000_000_000


@pytest.fixture
def connection():
    """Both ends of a TCP connection: the server's, and the client's with timestamps."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not ArrivalTimes(time.perf_counter_ns).enable(client):
            pytest.skip("this system has no arrival times")
        client.settimeout(5)
        yield server, client


def new_reader():
    call = ClientCall(sent_ns=time.perf_counter_ns())
    return ResponseReader(Tgi(Sampling()), CallLimits(), call, 2**62), call


def read_all(client, reader, arrivals, size):
    """Read `size` bytes."""
    while size:
        data, at_ns, late_ns = arrivals.receive(client.recvmsg, size)
        size -= len(data)
        reader.take(data, at_ns, late_ns)


def test_trust_3a_a_reader_that_waits_50_ms_before_each_read_has_the_arrival_times(connection):
    server, client = connection
    arrivals, (reader, call) = ArrivalTimes(time.perf_counter_ns), new_reader()
    written_ns = []
    for index in range(1, 9):
        data = HEAD * (index == 1) + render_event(index, 8)
        written_ns.append(time.perf_counter_ns())
        server.sendall(data)
        time.sleep(0.05)
        read_all(client, reader, arrivals, len(data))

    errors_ns = [seen - true for seen, true in zip(call.answer.event_ns, written_ns, strict=True)]
    assert call.read_late_ns >= 45 * MS
    assert call.first_read_ns >= written_ns[0] + 50 * MS
    assert statistics.median(errors_ns) < 50 * MS / 5
    assert arrivals.to_json()["source"] == "kernel"
    assert call.coalesced_events == 0


@pytest.mark.slow
def test_trust_3a_a_busy_hub_has_the_arrival_times():
    """gevent's loop is blocked for 50 ms again and again while a server of known times sends."""
    with timing_server(0.05, 0.06) as url:
        words = [sys.executable, "-m", "tests.support.clients.busy_gevent_reader", url]
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60)
        control = ControlClient(url)
        reference = {row["inputs"]: row["written_ns"] for row in json.loads(control.get("/times")[1])}
        control.close()
    found = json.loads(done.stdout)
    if found["arrival_times"]["source"] != "kernel":
        pytest.skip("this system has no arrival times")

    pairs = [
        pair for name, event_ns in found["event_ns"].items() for pair in zip(event_ns, reference[name], strict=True)
    ]
    errors_ns = [abs(seen - true) for seen, true in pairs]
    assert found["read_late_ns"] > 20 * MS
    assert statistics.median(errors_ns) < found["read_late_ns"] / 10


def test_trust_3a_events_of_one_read_are_marked_and_arrived_within_the_bound(connection):
    """Three events have arrived before the read: the kernel has the time of the last."""
    server, client = connection
    arrivals, (reader, call) = ArrivalTimes(time.perf_counter_ns), new_reader()
    written_ns = []
    for data in (HEAD, render_event(1, 4), render_event(2, 4), render_event(3, 4)):
        time.sleep(0.02)
        written_ns.append(time.perf_counter_ns())
        server.sendall(data)
    time.sleep(0.05)
    reader.take(*arrivals.receive(client.recvmsg, READ_BYTES))

    seen_ns = call.answer.event_ns
    assert seen_ns[0] == seen_ns[1] == seen_ns[2] >= written_ns[3]
    assert seen_ns[2] - written_ns[3] < call.first_read_ns - seen_ns[2]
    assert call.coalesced_events == 2
    assert seen_ns[0] - call.coalesced_within_ns < written_ns[1]


def stamp(at_ns):
    return [(socket.SOL_SOCKET, 37, struct.pack("@6q", *divmod(at_ns, S), 0, 0, 0, 0))]


class Clocks:
    """A monotonic and a wall clock that the test sets, and a socket whose data arrived at `arrived_ns` (wall).

    pauses_ns: of the process before each of the next readings of the wall clock.
    """

    def __init__(self):
        self.now_ns, self.wall_ns = 1_000 * S, 5_000 * S
        self.arrived_ns = 0
        self.pauses_ns = iter(())

    def pass_time(self, ns, step_ns=0):
        self.now_ns += ns
        self.wall_ns += ns + step_ns

    def recvmsg(self, size, room):
        return b"x", stamp(self.arrived_ns), 0, None

    def arrivals(self):
        return ArrivalTimes(lambda: self.now_ns, lambda: self.wall_ns + next(self.pauses_ns, 0))


def test_trust_3a_a_timestamp_is_converted_to_the_monotonic_clock():
    clocks = Clocks()
    arrivals = clocks.arrivals()
    clocks.arrived_ns = clocks.wall_ns
    clocks.pass_time(70 * MS)

    assert arrivals.receive(clocks.recvmsg, 10) == (b"x", 1_000 * S, 70 * MS)
    assert (arrivals.stamped, arrivals.rejected) == (1, 0)


@pytest.mark.parametrize("age_ns", [-1, 10 * S + 1])
def test_trust_3a_an_impossible_age_falls_back_to_the_read_time_and_is_counted(age_ns):
    clocks = Clocks()
    arrivals = clocks.arrivals()
    clocks.pass_time(20 * S)
    clocks.arrived_ns = clocks.wall_ns - age_ns

    assert arrivals.receive(clocks.recvmsg, 10) == (b"x", clocks.now_ns, 0)
    assert arrivals.to_json() == {"source": "read", "stamped": 0, "unstamped": 0, "rejected": 1, "full": 0}


@pytest.mark.parametrize("step_ns", [-5 * S, 5 * S])
def test_trust_3a_a_step_of_the_wall_clock_rejects_only_the_timestamps_before_it(step_ns):
    clocks = Clocks()
    arrivals = clocks.arrivals()
    clocks.arrived_ns = clocks.wall_ns
    clocks.pass_time(30 * MS, step_ns)

    before = arrivals.receive(clocks.recvmsg, 10)
    clocks.pass_time(10 * MS)
    clocks.arrived_ns = clocks.wall_ns
    clocks.pass_time(20 * MS)
    after = arrivals.receive(clocks.recvmsg, 10)

    assert before == (b"x", 1_000 * S + 30 * MS, 0)
    assert after == (b"x", 1_000 * S + 40 * MS, 20 * MS)
    assert (arrivals.stamped, arrivals.rejected) == (1, 1)


def test_trust_3a_a_pause_of_the_process_between_two_clock_readings_changes_no_time():
    clocks = Clocks()
    arrivals = clocks.arrivals()
    clocks.arrived_ns = clocks.wall_ns
    clocks.pass_time(30 * MS)
    clocks.pauses_ns = iter([8 * MS])

    assert arrivals.receive(clocks.recvmsg, 10) == (b"x", 1_000 * S, 30 * MS)


def test_trust_3a_without_the_option_times_are_read_times(monkeypatch):
    class Refusing:
        def setsockopt(self, *_):
            raise OSError(92, "Protocol not available")

    arrivals = Clocks().arrivals()

    assert not arrivals.enable(Refusing())
    assert arrivals.receive(lambda *_: (b"x", [], 0, None), 10) == (b"x", 1_000 * S, 0)
    assert arrivals.receive(lambda *_: (b"", [], 0, None), 10)[0] == b""
    assert arrivals.to_json() == {"source": "read", "stamped": 0, "unstamped": 1, "rejected": 0, "full": 0}


def test_trust_3a_a_read_time_before_an_earlier_arrival_makes_no_negative_gap():
    """The first read has no timestamp and was late; the second arrived before that read."""
    reader, call = new_reader()
    reader.take(HEAD + render_event(1, 3), call.sent_ns + 90, 0)
    reader.take(render_event(2, 3), call.sent_ns + 60, 40)

    assert call.answer.event_ns == [call.sent_ns + 90] * 2


def test_trust_3a_the_counts_of_all_workers_have_one_source():
    workers = [{"arrival_times": {"source": "kernel", "stamped": 995, "unstamped": 0, "rejected": 5}}]

    assert total_arrival_times(workers)["source"] == "kernel"
    workers.append({"arrival_times": {"source": "mixed", "stamped": 90, "unstamped": 10, "rejected": 0}})
    counts = {"stamped": 1085, "unstamped": 10, "rejected": 5, "full": 0}
    assert total_arrival_times(workers) == {"source": "mixed", **counts}
    assert total_arrival_times([{}]) == {}


def test_trust_3a_a_read_that_is_full_is_counted():
    """More data may wait unread, so the server may be held back."""
    arrivals = ArrivalTimes(time.perf_counter_ns)

    for size in (READ_BYTES, 10):
        arrivals.receive(lambda _size, _ancillary, size=size: (b"x" * size, [], 0, None), READ_BYTES)

    assert arrivals.to_json()["full"] == 1
    assert total_arrival_times([{"arrival_times": arrivals.to_json()}] * 2)["full"] == 2

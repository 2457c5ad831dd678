"""Calls over TLS: the same answers, with the kernel's arrival times."""

import contextlib
import json
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from loadgen.dialects.dialect import Sampling
from loadgen.dialects.tgi import Tgi
from loadgen.http.arrival_times import ArrivalTimes
from loadgen.http.call import Client
from loadgen.http.connection import READ_BYTES, ConnectionPool, Origin
from loadgen.http.response_reader import CallLimits, ClientCall
from loadgen.http.tls import TlsSocket
from loadgen.selftest.reference_timing_server import HEAD, render_event
from loadgen.selftest.socket_loop import chunk
from reports.run_schema import Status
from tests.support.servers.certificate import self_signed

ROOT = Path(__file__).resolve().parents[3]
MS = 1_000_000
ANSWER = [HEAD, *(render_event(index, 3) for index in (1, 2, 3)), chunk(b"")]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server_context(certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.path))
    return certificate.server_context()


@pytest.fixture
def port(server_context):
    """The port of a server that answers every request with three events, 10 ms apart."""

    def answer(peer):
        with contextlib.suppress(OSError), server_context.wrap_socket(peer, server_side=True) as stream:
            while stream.recv(65_536):
                for piece in ANSWER:
                    time.sleep(0.01)
                    stream.sendall(piece)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                peer.settimeout(10)
                threading.Thread(target=answer, args=(peer,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_a_tls_connection_serves_many_requests(port):
    pool = ConnectionPool(Origin.parse(f"https://localhost:{port}"), time.perf_counter_ns)
    client = Client(pool, Tgi(Sampling()), {}, CallLimits(10.0), time.perf_counter_ns)
    calls = [ClientCall() for _ in range(3)]

    for call in calls:
        client.run(b"{}", call)
    pool.close()

    assert [call.status for call in calls] == [Status.OK] * 3
    assert [len(call.answer.event_ns) for call in calls] == [3] * 3
    assert [call.is_reused for call in calls] == [False, True, True]


def test_a_certificate_of_another_host_is_a_connect_error(port):
    pool = ConnectionPool(Origin.parse(f"https://127.0.0.1:{port}"), time.perf_counter_ns)
    call = ClientCall()

    Client(pool, Tgi(Sampling()), {}, CallLimits(10.0), time.perf_counter_ns).run(b"{}", call)

    assert (call.status, call.error_type) == (Status.CONNECT_ERROR, "connect/SSLCertVerificationError")


@pytest.mark.slow
def test_tls_is_read_on_the_loop_of_gevent(port):
    words = [sys.executable, "-m", "tests.support.clients.gevent_reader", f"https://localhost:{port}"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60)

    assert json.loads(done.stdout)["rows"] == [["ok", None, 3]] * 2


def test_trust_3a_tls_data_has_the_arrival_time_of_its_record(server_context):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        transport = socket.create_connection(listener.getsockname(), timeout=10)
        peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    arrivals = ArrivalTimes(time.perf_counter_ns)
    if not arrivals.enable(transport):
        pytest.skip("this system has no arrival times")
    streams = []
    shaker = threading.Thread(target=lambda: streams.append(server_context.wrap_socket(peer, server_side=True)))
    shaker.start()
    client = TlsSocket(transport, ssl.create_default_context(), "localhost")
    shaker.join()

    errors_ns = []
    for index in range(8):
        written_ns = time.perf_counter_ns()
        streams[0].sendall(b"event %d" % index)
        time.sleep(0.05)
        data, at_ns, late_ns = arrivals.receive(client.recvmsg, READ_BYTES)
        assert data == b"event %d" % index
        assert late_ns >= 40 * MS
        errors_ns.append(at_ns - written_ns)
    streams[0].close()

    assert statistics.median(errors_ns) < 50 * MS / 5
    assert client.recv(10) == b""
    client.close()

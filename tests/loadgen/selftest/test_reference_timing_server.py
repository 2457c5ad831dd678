import json
import time

from loadgen.selftest.reference_timing_server import timing_server
from loadgen.selftest.socket_loop import Peer, take_request
from loadgen.target.control import ControlClient


def test_every_token_is_written_at_its_time_and_the_time_is_reported_once():
    with timing_server(0.02, 0.01) as url:
        control = ControlClient(url)
        body = json.dumps({"inputs": "hi", "parameters": {"max_new_tokens": 4}}).encode()
        began_ns = time.perf_counter_ns()
        status, stream = control.post("/generate_stream", body)
        ended_ns = time.perf_counter_ns()
        [times] = json.loads(control.get("/times")[1])
        second = json.loads(control.get("/times")[1])
        control.close()

    events = [json.loads(line[5:]) for line in stream.splitlines() if line.startswith(b"data:")]
    assert status == 200
    assert [event["index"] for event in events] == [1, 2, 3, 4]
    assert events[-1]["details"]["generated_tokens"] == 4
    written_ns = times["written_ns"]
    assert began_ns < times["arrived_ns"] < written_ns[0] < written_ns[-1] < ended_ns
    for index, at_ns in enumerate(written_ns):
        assert at_ns >= times["arrived_ns"] + 20_000_000 + index * 10_000_000
    assert second == []


def test_trust_3a_in_bursts_all_streams_send_at_the_same_moments():
    with timing_server(0.02, 0.01, sends_bursts=True) as url:
        control = ControlClient(url)
        for _ in range(3):
            control.post("/generate_stream", json.dumps({"inputs": "", "parameters": {"max_new_tokens": 2}}).encode())
        rows = json.loads(control.get("/times")[1])
        control.close()

    assert all(row["due_ns"] % 10_000_000 == 0 for row in rows)
    assert all(0 <= row["due_ns"] - row["arrived_ns"] - 20_000_000 < 10_000_000 for row in rows)
    assert all(row["written_ns"][1] >= row["due_ns"] + 10_000_000 for row in rows)


def test_trust_3a_times_larger_than_the_socket_buffers_are_sent_whole():
    text = "x" * 2_000_000
    with timing_server(0.0, 0.001) as url:
        control = ControlClient(url)
        for _ in range(5):
            control.post("/generate_stream", json.dumps({"inputs": text, "parameters": {"max_new_tokens": 1}}).encode())
        rows = json.loads(control.get("/times", 60.0)[1])
        control.close()

    assert [row["inputs"] for row in rows] == [text] * 5


def test_requests_are_read_whole_from_reads_of_any_size():
    peer = Peer(sock=None)
    request = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"

    taken = []
    for byte in request + request[:-1]:
        peer.received += bytes([byte])
        taken.append(take_request(peer))

    assert [each for each in taken if each] == [(b"/a", b"abc")]
    assert peer.received == request[:-1]

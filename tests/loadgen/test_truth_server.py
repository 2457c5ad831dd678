import json
import time

from loadgen.control import ControlClient
from loadgen.truth_server import Peer, take_request, truth_server


def test_every_token_leaves_at_its_time_and_the_server_says_when():
    with truth_server(0.02, 0.01) as url:
        control = ControlClient(url)
        body = json.dumps({"inputs": "hi", "parameters": {"max_new_tokens": 4}}).encode()
        began_ns = time.perf_counter_ns()
        status, stream = control.post("/generate_stream", body)
        ended_ns = time.perf_counter_ns()
        [told] = json.loads(control.get("/truth")[1])
        forgotten = json.loads(control.get("/truth")[1])
        control.close()

    events = [json.loads(line[5:]) for line in stream.splitlines() if line.startswith(b"data:")]
    assert status == 200
    assert [event["index"] for event in events] == [1, 2, 3, 4]
    assert events[-1]["details"]["generated_tokens"] == 4
    written_ns = told["written_ns"]
    assert began_ns < told["arrived_ns"] < written_ns[0] < written_ns[-1] < ended_ns
    for index, at_ns in enumerate(written_ns):
        assert at_ns >= told["arrived_ns"] + 20_000_000 + index * 10_000_000
    assert forgotten == []


def test_requests_are_taken_whole_whatever_the_reads():
    peer = Peer(sock=None)
    request = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"

    taken = []
    for byte in request + request[:-1]:
        peer.received += bytes([byte])
        taken.append(take_request(peer))

    assert [each for each in taken if each] == [(b"/a", b"abc")]
    assert peer.received == request[:-1]

"""One trace of a request through the launched router and its shards, received by a local OTLP collector."""

import json
import time
import urllib.request
from collections import Counter

import pytest

pytest.importorskip("opentelemetry.proto")

from benchmarks.operations.trace_collector import TraceCollector, trace_trees
from tests.support.servers.launched_server import Server, serve

pytestmark = pytest.mark.slow

CALLER = f"00-{0xAA:032x}-{0xBB:016x}-01"
#: Spans are exported every 5 s.
EXPORT_LIMIT_S = 30


def generate(server: Server, traceparent: str, tokens: int) -> None:
    body = {"inputs": "The quick brown fox", "parameters": {"max_new_tokens": tokens, "ignore_eos_token": True}}
    headers = {"Content-Type": "application/json", "traceparent": traceparent}
    request = urllib.request.Request(server.url + "/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()


def wait_for_spans(collector: TraceCollector, count: int) -> None:
    deadline_s = time.monotonic() + EXPORT_LIMIT_S
    while len(collector.spans) < count:
        assert time.monotonic() < deadline_s, [span.name for span in collector.spans]
        time.sleep(0.1)


@pytest.mark.parametrize("transport", ["link", "grpc"])
def test_router_and_shards_are_in_the_trace_of_the_caller(transport: str):
    with TraceCollector.listening() as (collector, port):
        flags = ("--num-shard", "2", "--transport", transport, "--otlp-endpoint", f"http://127.0.0.1:{port}")
        with serve(*flags) as server:
            generate(server, CALLER, tokens=20)
            wait_for_spans(collector, 5 + 2 * (1 + 8 + 1))
    spans = [span for span in collector.spans if span.trace_id == f"{0xAA:032x}"]
    (tree,) = trace_trees(spans)
    print("\n".join(tree))

    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.parent_id not in by_id]
    assert (root.name, root.parent_id) == ("POST /generate", f"{0xBB:016x}")
    steps = Counter((span.name, span.attributes["shard.rank"]) for span in spans if "shard.rank" in span.attributes)
    assert steps == {("prefill", 0): 1, ("prefill", 1): 1, ("decode", 0): 9, ("decode", 1): 9}
    (infer,) = [span for span in spans if span.name == "infer"]
    assert {span.parent_id for span in spans if "shard.rank" in span.attributes} == {infer.span_id}
    assert infer.events[0][0] == "first token"
    assert [line.split()[0] for line in tree[1:6]] == ["POST", "generate", "validate", "queued", "infer"]


def test_a_collector_that_cannot_be_reached_delays_neither_an_answer_nor_the_end():
    with serve("--otlp-endpoint", "http://127.0.0.1:9") as server:
        started_s = time.monotonic()
        generate(server, CALLER, tokens=20)
        answered_s = time.monotonic()
        server.process.terminate()
        server.process.wait(timeout=60)
        ended_s = time.monotonic()

    assert answered_s - started_s < 5
    assert ended_s - answered_s < 15

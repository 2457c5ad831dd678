import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from reference_server.errors import ShardError
from reference_server.router.app import TransportOptions
from reference_server.router.telemetry.request_context import StageTimes
from reference_server.router.telemetry.tracing import Tracing
from reference_server.trace_export import parse_traceparent
from tests.support.servers.serving import serve
from tests.support.wire.scripted_shard import ScriptedShard

PARENT = "00-000000000000000000000000000000aa-00000000000000bb-01"


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"x" * 4000,
        b"ff" + PARENT.encode()[2:],
        PARENT.encode() + b"-",
        b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
    ],
)
def test_a_malformed_parent_is_ignored(value: bytes | None):
    assert parse_traceparent(value) is None


async def test_a_request_has_a_span_for_each_of_its_parts():
    exporter = InMemorySpanExporter()
    tracing = Tracing("a-router", exporter)
    async with serve(transport=TransportOptions(tracing=tracing)) as served:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
        response = await served.client.post("/generate", json=body, headers={"traceparent": PARENT})
    tracing.close()

    spans: dict[str, ReadableSpan] = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /generate", "generate", "validate", "queued", "infer"}
    server, handler = spans["POST /generate"], spans["generate"]
    assert server.parent is not None
    assert (server.context.trace_id, server.parent.span_id) == (0xAA, 0xBB)
    assert handler.parent == server.context
    assert [spans[name].parent for name in ("validate", "queued", "infer")] == [handler.context] * 3
    assert spans["validate"].end_time == spans["queued"].start_time
    assert server.resource.attributes["service.name"] == "a-router"
    assert "traceparent" not in response.headers


async def test_the_shard_receives_the_span_of_its_generation_as_parent():
    exporter = InMemorySpanExporter()
    tracing = Tracing("a-router", exporter)
    async with serve(transport=TransportOptions(tracing=tracing)) as served:
        body = {"prompt": ["one", "two"], "max_tokens": 2}
        await served.client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
    tracing.close()

    parents = {request.traceparent for request in served.requests}
    infer = [span.context for span in exporter.get_finished_spans() if span.name == "infer"]
    assert parents == {f"00-{0xAA:032x}-{context.span_id:016x}-01" for context in infer}
    assert len(parents) == 2


async def test_a_trace_that_its_caller_does_not_record_is_not_recorded_here():
    exporter = InMemorySpanExporter()
    tracing = Tracing("a-router", exporter)
    async with serve(transport=TransportOptions(tracing=tracing)) as served:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
        await served.client.post("/generate", json=body, headers={"traceparent": PARENT[:-1] + "0"})
    tracing.close()

    assert exporter.get_finished_spans() == ()
    assert [request.traceparent for request in served.requests] == [None]


async def test_a_generation_that_fails_has_its_span_with_an_error():
    exporter = InMemorySpanExporter()
    tracing = Tracing("a-router", exporter)
    shard = ScriptedShard()
    shard.failures["prefill"] = ShardError("no device")
    async with serve(transport=TransportOptions(tracing=tracing), shard=shard) as served:
        await served.generate(max_new_tokens=2)
    tracing.close()

    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /generate", "generate", "validate", "infer"}
    assert spans["infer"].status.description == "cancelled or failed"


async def test_spans_end_with_streams_and_without_a_parent():
    exporter = InMemorySpanExporter()
    tracing = Tracing("a-router", exporter)
    async with serve(transport=TransportOptions(tracing=tracing)) as served:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        await served.client.post("/v1/chat/completions", json=body, headers={"traceparent": "nonsense"})
    tracing.close()

    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["validate", "queued", "infer", "chat_completions", "POST /v1/chat/completions"]


async def test_hardening_R27_a_request_writes_no_line_by_default(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "reference_server")
    async with serve() as served:
        await served.generate(max_new_tokens=2)

    assert not [record for record in caplog.records if record.name.startswith("reference_server")]


async def test_a_success_is_logged_in_the_span_of_its_handler(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "reference_server")
    async with serve() as served:
        await served.generate(max_new_tokens=2, seed=3)

    (record,) = [record for record in caplog.records if record.getMessage() == "Success"]
    span = record.span  # type: ignore[attr-defined]
    assert span["name"] == "generate"
    assert span["parameters"] == {"max_new_tokens": 2, "seed": 3}
    assert {"total_time", "validation_time", "queue_time", "inference_time", "time_per_token", "seed"} < set(span)
    assert json.dumps(record.spans)  # type: ignore[attr-defined]


def test_spans_reach_a_collector_over_grpc():
    names: list[str] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            names.extend(span.name for of in request.resource_spans for scope in of.scope_spans for span in scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        tracing = Tracing.to(f"http://127.0.0.1:{port}", "a-router")
        with tracing.request("POST", "/generate", "generate", None) as trace:
            generation = trace.generation()
            assert generation is not None
            generation.end(StageTimes(1, 2, 3, 4, 5))
        tracing.close()
        server.stop(None).wait()

    assert names == ["validate", "queued", "infer", "generate", "POST /generate"]

"""OpenTelemetry spans over OTLP, for the router and for shards. Only processes with `--otlp-endpoint` import it."""

import re

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class ChosenIds(RandomIdGenerator):
    """Random ids, except that the next span gets `next_span_id` if it is set.

    A shard's spans name their parent, a span that the router creates when the generation has ended.
    """

    def __init__(self) -> None:
        self.next_span_id: int | None = None

    def generate_span_id(self) -> int:
        chosen, self.next_span_id = self.next_span_id, None
        return super().generate_span_id() if chosen is None else chosen


def make_provider(exporter: SpanExporter, service_name: str, ids: ChosenIds | None = None) -> TracerProvider:
    """Spans of one process. A trace whose parent is not sampled is not recorded; all others are."""
    resource = Resource({"service.name": service_name})
    provider = TracerProvider(ParentBased(ALWAYS_ON), resource, shutdown_on_exit=False, id_generator=ids)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Exports to an OTLP collector over gRPC. Raises ImportError if the package is missing."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))


def parse_traceparent(value: bytes | None) -> tuple[int, int, int] | None:
    """(trace id, span id, flags); None if the value is not a W3C `traceparent`.

    >>> parse_traceparent(b"00-0000000000000000000000000000000a-000000000000000b-01")
    (10, 11, 1)
    """
    match = _TRACEPARENT.fullmatch(value or b"")
    if match is None or match[1] == b"ff":
        return None
    trace_id, span_id, flags = (int(match[index], 16) for index in (2, 3, 4))
    return (trace_id, span_id, flags) if trace_id and span_id else None


def parent_context(traceparent: bytes | None) -> Context:
    """The context of a `traceparent`; empty if it is missing or malformed."""
    ids = parse_traceparent(traceparent)
    if ids is None:
        return Context()
    trace_id, span_id, flags = ids
    parent = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())

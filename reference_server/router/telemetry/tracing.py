"""OpenTelemetry spans of requests, exported over OTLP to `--otlp-endpoint`.

The server span contains the handler's span, which contains the stages `validate`, `queued` and `infer` of each
generation. Stages are added when a generation has ended, so a token costs nothing. `traceparent` sets the parent.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reference_server.errors import UnsupportedError
from reference_server.router.telemetry.request_context import RequestSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class Tracing:
    """Creates the spans. `close` exports those that are still buffered."""

    def __init__(self, service_name: str, exporter: "SpanExporter") -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self._trace = trace
        self._provider = TracerProvider(resource=Resource({"service.name": service_name}), sampler=ALWAYS_ON)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("reference_server.router")

    @classmethod
    def to(cls, endpoint: str, service_name: str) -> "Tracing":
        """Export to an OTLP collector over gRPC. Raises `UnsupportedError` if the packages are missing."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise UnsupportedError(
                f"`--otlp-endpoint` needs packages that are not installed ({error.name}): pip install 'tgi-bench[otlp]'"
            ) from error
        return cls(service_name, OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https")))

    @contextmanager
    def request(self, method: str, path: str, handler: str, traceparent: bytes | None) -> Iterator[RequestSpan]:
        """Open a request's span and in it the handler's span, which is yielded."""
        kind = self._trace.SpanKind.SERVER
        attributes = {"http.request.method": method, "url.path": path}
        with (
            self._tracer.start_as_current_span(
                f"{method} {path}", self._parent(traceparent), kind=kind, attributes=attributes
            ),
            self._tracer.start_as_current_span(handler) as span,
        ):
            yield _HandlerSpan(self._tracer, self._trace.set_span_in_context(span))

    def close(self) -> None:
        self._provider.shutdown()

    def _parent(self, traceparent: bytes | None) -> Any:
        """The context of a `traceparent` header; empty if the header is missing or malformed."""
        from opentelemetry.context import Context

        ids = parse_traceparent(traceparent)
        if ids is None:
            return Context()
        trace_id, span_id, flags = ids
        parent = self._trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=self._trace.TraceFlags(flags))
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(parent), Context())


class _HandlerSpan:
    def __init__(self, tracer: Any, context: Any) -> None:
        self._tracer = tracer
        self._context = context

    def add_stage(self, name: str, start_ns: int, end_ns: int) -> None:
        self._tracer.start_span(name, self._context, start_time=start_ns).end(end_ns)


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

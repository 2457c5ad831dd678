"""OpenTelemetry spans of requests, exported over OTLP to `--otlp-endpoint`.

The server span contains the handler's span, which contains the stages `validate`, `queued` and `infer` of each
generation. Stages are added when a generation has ended, so a token costs nothing. Spans of the shards are inside
`infer`, whose id is chosen before the request is sent. `traceparent` sets the parent, and whether to record.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reference_server.errors import UnsupportedError
from reference_server.router.telemetry.request_context import RequestSpan, StageTimes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from reference_server.trace_export import ChosenIds


class Tracing:
    """Creates the spans. `close` exports those that are still buffered."""

    def __init__(self, service_name: str, exporter: "SpanExporter") -> None:
        from opentelemetry import trace

        from reference_server.trace_export import ChosenIds, make_provider, parent_context

        self._trace = trace
        self._ids = ChosenIds()
        self._provider = make_provider(exporter, service_name, self._ids)
        self._tracer = self._provider.get_tracer("reference_server.router")
        self._parent = parent_context

    @classmethod
    def to(cls, endpoint: str, service_name: str) -> "Tracing":
        """Export to an OTLP collector over gRPC. Raises `UnsupportedError` if the packages are missing."""
        try:
            from reference_server.trace_export import otlp_exporter

            return cls(service_name, otlp_exporter(endpoint))
        except ImportError as error:
            raise UnsupportedError(
                f"`--otlp-endpoint` needs packages that are not installed ({error.name}): pip install 'tgi-bench[otlp]'"
            ) from error

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
            yield _HandlerSpan(self._tracer, self._ids, span)

    def close(self) -> None:
        self._provider.shutdown()


class _HandlerSpan:
    def __init__(self, tracer: Any, ids: "ChosenIds", span: Any) -> None:
        self._tracer = tracer
        self._ids = ids
        self._span = span

    def generation(self) -> "_GenerationSpan | None":
        if not self._span.get_span_context().trace_flags.sampled:
            return None
        return _GenerationSpan(self._tracer, self._ids, self._span)


class _GenerationSpan:
    """The stages of one generation, below the handler's span."""

    def __init__(self, tracer: Any, ids: "ChosenIds", parent: Any) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._ids = ids
        self._context = trace.set_span_in_context(parent)
        self._infer_id = ids.generate_span_id()
        self.traceparent = f"00-{parent.get_span_context().trace_id:032x}-{self._infer_id:016x}-01"

    def end(self, times: StageTimes) -> None:
        from opentelemetry.trace import Status, StatusCode

        offset_ns = time.time_ns() - times.finished_ns
        started_ns = times.queued_ns if times.started_ns is None else times.started_ns
        self._add("validate", times.arrived_ns + offset_ns, times.queued_ns + offset_ns)
        if times.started_ns is not None:
            self._add("queued", times.queued_ns + offset_ns, started_ns + offset_ns)
        self._ids.next_span_id = self._infer_id
        infer = self._tracer.start_span("infer", self._context, start_time=started_ns + offset_ns)
        if times.first_token_ns is not None:
            infer.add_event("first token", timestamp=times.first_token_ns + offset_ns)
        if times.started_ns is None:
            infer.set_status(Status(StatusCode.ERROR, "cancelled or failed"))
        infer.end(times.finished_ns + offset_ns)

    def _add(self, name: str, start_ns: int, end_ns: int) -> None:
        self._tracer.start_span(name, self._context, start_time=start_ns).end(end_ns)

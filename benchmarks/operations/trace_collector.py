"""A local OTLP collector that prints each trace as a tree.

    python -m benchmarks.operations.trace_collector --port 4317

Start the server with `--otlp-endpoint http://127.0.0.1:4317` and send a request. A trace is printed once no span has
arrived for `--quiet` seconds; Ctrl-C ends the collector.
"""

import argparse
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """A span as the collector received it. Times are Unix nanoseconds; `parent_id` is empty for a root."""

    service: str
    scope: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[tuple[str, int], ...] = ()


class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it receives."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.last_arrival_s = time.monotonic()

    def Export(self, request: Any, context: object) -> Any:  # noqa: ARG002  # the name of the service's method
        self.last_arrival_s = time.monotonic()
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [_received(str(service), scope.scope.name, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @classmethod
    @contextlib.contextmanager
    def listening(cls, port: int = 0) -> Iterator[tuple["TraceCollector", int]]:
        """A collector on loopback, and its port."""
        collector = cls()
        with ThreadPoolExecutor(4) as threads:
            server = grpc.server(threads)
            trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
            bound = server.add_insecure_port(f"127.0.0.1:{port}")
            server.start()
            try:
                yield collector, bound
            finally:
                server.stop(None).wait()


def trace_trees(spans: Sequence[Span]) -> Iterator[list[str]]:
    """The lines of each trace: every span below its parent, with its time from the start of the trace."""
    traces: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda each: (each.start_ns, each.end_ns)):
        traces.setdefault(span.trace_id, []).append(span)
    for trace_id, members in traces.items():
        present = {span.span_id for span in members}
        start_ns = members[0].start_ns
        lines = [f"trace {trace_id}"]
        for root in members:
            if root.parent_id not in present:
                lines += _tree(root, members, start_ns, depth=1)
        yield lines


def _tree(span: Span, members: Sequence[Span], origin_ns: int, depth: int) -> Iterator[str]:
    start_ms, length_ms = (span.start_ns - origin_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
    scope = span.scope.rpartition(".")[2]
    details = [f"{name}={_short(value)}" for name, value in span.attributes.items()]
    details += [f"{name} at {(at_ns - origin_ns) / 1e6:.1f} ms" for name, at_ns in span.events]
    label = f"{'  ' * depth}{span.name}"
    yield f"{label:<34} {start_ms:9.2f} ms +{length_ms:9.2f} ms  {scope:<12}  {' '.join(details)}".rstrip()
    for child in members:
        if child.parent_id == span.span_id:
            yield from _tree(child, members, origin_ns, depth + 1)


def _short(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _received(service: str, scope: str, span: Any) -> Span:
    return Span(
        service,
        scope,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        tuple((event.name, event.time_unix_nano) for event in span.events),
    )


def _values(attributes: Iterable[Any]) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in attributes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=4317, help="port on loopback (%(default)s)")
    parser.add_argument("--quiet", type=float, default=6.0, help="seconds without a span before printing (%(default)s)")
    args = parser.parse_args()
    stop = threading.Event()
    with TraceCollector.listening(args.port) as (collector, port), contextlib.suppress(KeyboardInterrupt):
        print(f"listening at http://127.0.0.1:{port}", flush=True)
        while not stop.wait(0.5):
            if collector.spans and time.monotonic() - collector.last_arrival_s > args.quiet:
                spans, collector.spans = collector.spans, []
                for lines in trace_trees(spans):
                    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()

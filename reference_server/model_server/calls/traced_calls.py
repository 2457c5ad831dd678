"""`TracedCalls`: the spans of one rank's steps, in the traces of the requests that the step computes.

A traced request has a `traceparent`: the router's span, which is the parent of its spans. Only a shard with
`--otlp-endpoint` has this wrapper around its calls.
"""

import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import TraceFlags, Tracer, get_current_span

from reference_server.messages import Batch, CachedBatch, StepResult, WarmupReply, WarmupRequest
from reference_server.trace_export import make_provider, otlp_exporter, parent_context
from reference_server.transport.shard import BlockingShard

FIRST_DECODES = 8
"""The first decode steps of a request, each with a span; after them every `DECODE_EVERY`th has one."""
DECODE_EVERY = 16
FLUSH_MS = 2000


class StepTracing:
    """Exports the spans of one rank."""

    def __init__(self, service_name: str, exporter: SpanExporter) -> None:
        self._provider = make_provider(exporter, service_name)
        self._tracer = self._provider.get_tracer("reference_server.model_server")

    @classmethod
    def to(cls, endpoint: str, service_name: str) -> "StepTracing":
        """Export to an OTLP collector over gRPC. Raises ImportError if the package is missing."""
        return cls(service_name, otlp_exporter(endpoint))

    def traced(self, rank: int, world_size: int, shard: BlockingShard) -> "TracedCalls":
        """`shard` with spans of its steps."""
        return TracedCalls(shard, self._tracer, rank, world_size)

    def flush(self) -> None:
        """Export what is buffered, before the process ends."""
        self._provider.force_flush(FLUSH_MS)


class _TracedRequest:
    """A running request of a recorded trace."""

    __slots__ = ("context", "is_in_prompt", "num_decodes")

    def __init__(self, context: Context) -> None:
        self.context = context
        self.is_in_prompt = True
        self.num_decodes = 0

    def step_name(self) -> str | None:
        """The name of the next step's span; None if it has none."""
        if self.is_in_prompt:
            return "prefill"
        self.num_decodes += 1
        is_sampled = self.num_decodes <= FIRST_DECODES or self.num_decodes % DECODE_EVERY == 0
        return "decode" if is_sampled else None


class TracedCalls:
    """`BlockingShard` around another one."""

    def __init__(self, shard: BlockingShard, tracer: Tracer, rank: int, world_size: int) -> None:
        self._shard = shard
        self._tracer = tracer
        self._rank = rank
        self._world_size = world_size
        # The traced requests of each cached batch, by their ids.
        self._batches: dict[int, dict[int, _TracedRequest]] = {}
        self.computing = shard.computing
        self.after_reply = shard.after_reply
        self.after_error = shard.after_error
        self.info = shard.info
        self.health = shard.health
        self.load_adapter = shard.load_adapter
        self.unload_adapter = shard.unload_adapter

    def warmup(self, request: WarmupRequest) -> WarmupReply:
        self._batches.clear()
        return self._shard.warmup(request)

    def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        traced = {} if cached is None else self._batches.pop(cached.id, {})
        for request in batch.requests:
            if request.traceparent is not None:
                context = parent_context(request.traceparent.encode())
                if get_current_span(context).get_span_context().trace_flags & TraceFlags.SAMPLED:
                    traced[request.id] = _TracedRequest(context)
        size = batch.size + (0 if cached is None else cached.size)
        return self._record(traced, self._shard.prefill(batch, cached), size)

    def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        traced: dict[int, _TracedRequest] = {}
        for batch in batches:
            traced |= self._batches.pop(batch.id, {})
        return self._record(traced, self._shard.decode(batches), sum(batch.size for batch in batches))

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        traced = self._batches.pop(batch_id, {})
        receipt = self._shard.filter_batch(batch_id, request_ids)
        self._keep(traced, receipt)
        return receipt

    def clear_cache(self, batch_id: int | None = None) -> None:
        if batch_id is None:
            self._batches.clear()
        else:
            self._batches.pop(batch_id, None)
        self._shard.clear_cache(batch_id)

    def _record(self, traced: dict[int, _TracedRequest], result: StepResult, batch_size: int) -> StepResult:
        """Spans of a step that ends now. They are as long as the step, of which a part was computed ahead."""
        if not traced:
            return result
        end_ns = time.time_ns()
        tokens = {generation.request_id: len(generation.tokens) for generation in result.generations}
        timings = result.timings
        step = {
            "shard.rank": self._rank,
            "batch.size": batch_size,
            "forward_ms": timings.forward_ns / 1e6,
            "decode_ms": timings.decode_ns / 1e6,
        }
        for request_id, request in traced.items():
            name = request.step_name()
            if name is not None:
                attributes = step | {"tokens": tokens.get(request_id, 0)}
                if name == "decode":
                    attributes["step"] = request.num_decodes
                start_ns = end_ns - timings.total_ns
                self._tracer.start_span(name, request.context, attributes=attributes, start_time=start_ns).end(end_ns)
            # Each rank returns the tokens of its own requests: it cannot see when the prompt of another one ends.
            is_own = request_id % self._world_size == self._rank
            request.is_in_prompt = request.is_in_prompt and is_own and request_id not in tokens
        if result.batch is not None:
            self._keep(traced, result.batch)
        return result

    def _keep(self, traced: dict[int, _TracedRequest], receipt: CachedBatch) -> None:
        kept = {id_: traced[id_] for id_ in receipt.request_ids if id_ in traced}
        if kept:
            self._batches[receipt.id] = kept

"""Runs generations: permit, validation, the event stream across segments, best-of."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy

from reference_server.errors import IncompleteGenerationError, OverloadedError, RequestError, ValidationError
from reference_server.messages import GeneratedText, Tokens
from reference_server.router.batching import Batcher
from reference_server.router.generation_stream import (
    Event,
    Finished,
    GeneratedToken,
    GenerationStream,
    PrefillDone,
    TokenArrived,
    Writer,
)
from reference_server.router.scheduling.request import ValidGenerateRequest
from reference_server.router.scheduling.segments import SegmentProgress
from reference_server.router.served_adapters import Adapters
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.telemetry.request_context import GenerationSpan, StageTimes
from reference_server.router.telemetry.token_clock import TokenClock
from reference_server.router.validation.request_rules import check_best_of
from reference_server.router.validation.validator import Continuation, GenerateCall, Validator

T = TypeVar("T")


class Permits:
    """Limits concurrent generations, in all and per client. A permit is granted or refused at once."""

    def __init__(self, limit: int, per_client: int | None = None) -> None:
        self.free = limit
        self.held: Counter[str] = Counter()
        self._per_client = limit if per_client is None else per_client

    @contextmanager
    def take(self, client: str = "") -> Iterator[None]:
        """Hold a permit. Raises `OverloadedError` if none is free."""
        if self.free <= 0 or self.held[client] >= self._per_client:
            raise OverloadedError
        self.free -= 1
        self.held[client] += 1
        try:
            yield
        finally:
            self.free += 1
            self.held[client] -= 1
            if not self.held[client]:
                del self.held[client]


@dataclass(slots=True)
class CompletedGeneration:
    """A whole generation. Times are from the batcher's clock."""

    input_len: int
    tokens: list[GeneratedToken] = field(default_factory=list)
    top_tokens: list[Sequence[GeneratedToken]] = field(default_factory=list)
    prefill: Tokens | None = None
    end: Finished | None = None

    @property
    def finished(self) -> Finished:
        assert self.end is not None, "the generation has not finished"
        return self.end

    @property
    def generated(self) -> GeneratedText:
        return self.finished.generated_text

    @property
    def mean_logprob(self) -> float:
        """Best-of compares this value, in single precision."""
        total = numpy.float32(0)
        for token in self.tokens:
            total += numpy.float32(token.logprob)
        return float(total / numpy.float32(len(self.tokens)))


class RunningGeneration:
    """A generation in progress: an async iterable of its events. `input_len` is the first segment's.

    `release` is called when the last token has been generated, even if the client has not read it.
    """

    def __init__(
        self,
        infer: "Infer",
        call: GenerateCall,
        first: ValidGenerateRequest,
        times: TokenClock,
        release: Callable[[], None],
    ) -> None:
        self.input_len = first.input_len
        self._infer = infer
        self._call = call
        self._span: GenerationSpan | None = None
        if call.context.span is not None:
            self._span = call.context.span.generation()
        self._first = first = self._traced(first)
        self._times = times
        self._queued_ns = infer.batcher.now_ns
        self._release = release
        self._writer: Writer | None = None
        self._progress = SegmentProgress(first.requested_tokens)
        self._stream = self._submit(first, infer.max_queue_s)

    def write_with(self, writer: Writer) -> None:
        """Hand tokens to `writer` while this iterator's reader waits; see `GenerationStream`."""
        self._writer = self._stream.writer = writer

    def close(self) -> None:
        """Cancel the generation if it has not ended; frees its blocks."""
        self._stream.close()
        self._end_span(started_ns=None)

    async def __aiter__(self) -> AsyncIterator[Event]:
        start: Finished | None = None
        while True:
            end: Finished | None = None
            async for event in self._stream:
                if isinstance(event, Finished):
                    end = event
                    break
                yield event
            if end is None:
                raise IncompleteGenerationError
            start = start or end
            self._progress = progress = self._progress.add(end.generated_text)
            if not progress.wants_more or not await self._continue(progress):
                self._end_span(start.started_ns)
                yield _joined(start, end, progress)
                return
            yield TokenArrived(end.token, end.top_tokens)

    async def _continue(self, progress: SegmentProgress) -> bool:
        """Queue the next segment; returns False if its longer prompt exceeds a limit, which ends the generation."""
        try:
            following = await self._infer.validate(self._call, Continuation(self._first, progress))
            stream = self._submit(self._traced(following))
        except ValidationError:
            return False
        self._stream.close()
        self._stream = stream
        return True

    def _submit(self, request: ValidGenerateRequest, max_queue_s: float | None = None) -> GenerationStream:
        """Queue a segment. Only the first has a limit: the client has already read the tokens of the others."""
        stream = self._infer.batcher.submit(request, max_queue_s)
        stream.on_last = self._on_last
        stream.on_tokens = self._times.on_tokens
        stream.writer = self._writer
        return stream

    def _traced(self, request: ValidGenerateRequest) -> ValidGenerateRequest:
        """A segment with the parent of the shards' spans, if its trace is recorded."""
        if self._span is None:
            return request
        return replace(request, wire=replace(request.wire, traceparent=self._span.traceparent))

    def _end_span(self, started_ns: int | None) -> None:
        """Add the stages to the trace, once."""
        span, self._span = self._span, None
        if span is not None:
            times, now_ns = self._times, self._infer.batcher.now_ns
            span.end(StageTimes(times.arrived_ns, self._queued_ns, started_ns, times.first_token_ns, now_ns))

    def _on_last(self, event: Event | RequestError) -> None:
        if not isinstance(event, Finished) or not self._progress.add(event.generated_text).wants_more:
            self._release()


class Infer:
    """Entry point of the routes. `max_queue_s`: the longest time of a request in the queue."""

    def __init__(
        self,
        batcher: Batcher,
        validator: Validator,
        permits: Permits,
        metrics: Metrics,
        max_queue_s: float | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.adapters = Adapters() if adapters is None else adapters
        self.batcher = batcher
        self.validator = validator
        self.permits = permits
        self.max_queue_s = max_queue_s
        self._metrics = metrics

    @asynccontextmanager
    async def start(self, call: GenerateCall, arrived_ns: int | None = None) -> AsyncIterator[RunningGeneration]:
        """Take a permit, validate and queue a generation. Leaving the block cancels it if it has not ended.

        `arrived_ns`: when its request arrived, by the batcher's clock; by default now.
        Raises `OverloadedError` before the request is validated, then `ValidationError`.
        """
        times = TokenClock(self._metrics, self.batcher.now_ns if arrived_ns is None else arrived_ns)
        with ExitStack() as held:
            permit = held.enter_context(ExitStack())
            try:
                permit.enter_context(self.permits.take(call.context.client))
                call = with_adapter(call, permit.enter_context(self.adapters.use(call.parameters.adapter_id)))
                running = RunningGeneration(self, call, await self.validate(call), times, permit.close)
            except (OverloadedError, ValidationError) as error:
                self._metrics.request_failure.add(label=error.error_type)
                raise
            held.callback(running.close)
            yield running

    async def validate(self, call: GenerateCall, after: Continuation | None = None) -> ValidGenerateRequest:
        """Validate one segment and observe its lengths."""
        request = await self.validator.validate(call, after)
        self._metrics.request_input_length.observe(request.input_len)
        self._metrics.request_max_new_tokens.observe(request.wire.stopping.max_new_tokens)
        return request

    async def generate(self, call: GenerateCall, arrived_ns: int | None = None) -> CompletedGeneration:
        """Run one generation to its end."""
        async with self.start(call, arrived_ns) as running:
            done = CompletedGeneration(running.input_len)
            async for event in running:
                match event:
                    case PrefillDone():
                        done.prefill = event.tokens
                    case TokenArrived() | Finished():
                        done.tokens.append(event.token)
                        if event.top_tokens:
                            done.top_tokens.append(event.top_tokens)
                if isinstance(event, Finished):
                    done.end = event
            return done

    async def generate_best(
        self, call: GenerateCall, arrived_ns: int | None = None
    ) -> tuple[CompletedGeneration, list[CompletedGeneration]]:
        """The most likely of `best_of` generations, and the others in start order."""
        best_of = call.parameters.best_of or 1
        check_best_of(best_of, self.validator.limits)
        generations = await all_or_nothing([self.generate(call, arrived_ns) for _ in range(best_of)])
        best = max(generations, key=lambda each: each.mean_logprob)
        return best, [each for each in generations if each is not best]


def with_adapter(call: GenerateCall, wire_id: str | None) -> GenerateCall:
    """The call with its adapter's id on the wire."""
    if call.parameters.adapter_id == wire_id:
        return call
    return replace(call, parameters=call.parameters.model_copy(update={"adapter_id": wire_id}))


async def all_or_nothing(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run concurrently; the first failure cancels the others and is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return [task.result() for task in tasks]


def _joined(start: Finished, end: Finished, progress: SegmentProgress) -> Finished:
    """The end of a generation: the first segment's times, the last one's token, the text of all."""
    if start is end:
        return end
    assert progress.generated is not None, "a segment has ended"
    return start._replace(token=end.token, top_tokens=end.top_tokens, generated_text=progress.generated)

"""The batching loop: carries the Scheduler's calls to the shard, and each request's tokens to its stream.

It decides nothing. The next call is on its way before readers of the last one's tokens run, so that the shard computes
while the router writes.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from reference_server.errors import (
    GenerationError,
    IncompleteGenerationError,
    RequestError,
    ShardConnectionError,
    ShardError,
    StepTimeoutError,
)
from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    GeneratedText,
    Generation,
    Request,
    StepResult,
    StoppingParameters,
    Timings,
    Tokens,
)
from reference_server.router.observer import BatchObserver, NullObserver
from reference_server.router.queue import Entry
from reference_server.router.request import ValidGenerateRequest
from reference_server.router.scheduler import Call, Clear, Decode, Deliveries, Filter, Idle, Prefill, Scheduler
from reference_server.router.trace import NullTrace, Trace
from reference_server.transport.shard import Shard

logger = logging.getLogger(__name__)

LIVENESS_ID = 2**64 - 1
"""Batch and request id of the liveness probe."""


class GeneratedToken(NamedTuple):
    """One token as clients see it."""

    id: int
    text: str
    logprob: float
    special: bool


class PrefillDone(NamedTuple):
    """The prompt's tokens, where they were asked for."""

    tokens: Tokens


class TokenArrived(NamedTuple):
    """A token that is not the last."""

    token: GeneratedToken
    top_tokens: tuple[GeneratedToken, ...]


class Finished(NamedTuple):
    """The last token, and how the segment ended. Times are of the Batcher's clock."""

    token: GeneratedToken
    top_tokens: tuple[GeneratedToken, ...]
    generated_text: GeneratedText
    queued_ns: int
    started_ns: int
    cached_input_tokens: int


Event = PrefillDone | TokenArrived | Finished


class GenerationStream:
    """What one queued request brings, in order: an async iterator that ends after `Finished` or raises.

    `GenerationError` when its batch failed, `IncompleteGenerationError` when the loop ended. Closing it, at any time,
    frees what the request holds. One reader.
    """

    __slots__ = ("_close", "_events", "_is_over", "_waiter", "queued_ns")

    def __init__(self, queued_ns: int, close: Callable[[], None]) -> None:
        self.queued_ns = queued_ns
        self._close = close
        self._events: deque[Event | RequestError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False

    def __aiter__(self) -> "GenerationStream":
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._events.popleft()
        if isinstance(event, RequestError):
            raise event
        return event

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Nobody reads any more."""
        if not self._is_over:
            self._is_over = True
            self._close()
        self._events.clear()
        self._wake()

    def push(self, events: Iterable[Event | RequestError], *, is_last: bool) -> None:
        """Hand events to the reader and wake it once. For the Batcher."""
        self._events.extend(events)
        self._is_over = is_last
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Batcher:
    """Drives one Scheduler over one Shard. `run` is the loop; everything else may be called beside it."""

    def __init__(
        self,
        shard: Shard,
        scheduler: Scheduler,
        *,
        observer: BatchObserver | None = None,
        trace: Trace | None = None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._shard = shard
        self._scheduler = scheduler
        self._observer: BatchObserver = NullObserver() if observer is None else observer
        self._trace: Trace = NullTrace() if trace is None else trace
        self._now_ns = now_ns
        self._streams: dict[int, GenerationStream] = {}
        self._arrival = asyncio.Event()
        self._shard_turn = asyncio.Lock()  # one call at a time, the health probe included
        self._is_healthy = True
        self._is_over = False
        self._must_clear = False  # the shard may still hold a batch that failed, which could not be cleared
        self._num_discarded = 0
        self._step: _Step | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether the last step or probe went well."""
        return self._is_healthy and not self._is_over

    def submit(self, request: ValidGenerateRequest) -> GenerationStream:
        """Queue a request. Raises `ValidationError` if it could never run."""
        if self._is_over:
            raise IncompleteGenerationError
        entry = self._scheduler.append(request, self._now_ns())
        stream = GenerationStream(entry.queued_ns, lambda: self._abandon(entry))
        self._streams[entry.id] = stream
        self._observer.on_queue(self._scheduler.queue_size)
        self._arrival.set()
        return stream

    async def health(self) -> bool:
        """Ask the shard: whether it can touch its device, or after a failure whether it can run a forward again."""
        if self._is_over:
            return False
        try:
            async with self._shard_turn:
                if self._is_healthy:
                    await self._shard.health()
                else:
                    await self._shard.prefill(liveness_batch())
        except ShardError as error:
            logger.error("health check failed: %s", error)
            self._is_healthy = False
        else:
            self._is_healthy = True
        return self.is_healthy

    async def run(self) -> None:
        """Carry calls until cancelled. Any other way out is fatal to the router: every request has been ended then."""
        deliveries = Deliveries()
        try:
            while True:
                self._arrival.clear()
                call = self._scheduler.next_call(self._now_ns())
                self._observe(call)
                if isinstance(call, Idle):
                    self._deliver(deliveries)
                    deliveries = Deliveries()
                    await self._arrival.wait()
                    continue
                async with self._shard_turn:
                    answer = asyncio.ensure_future(self._carry(call))
                    try:
                        # The call leaves first, then the readers of what the last one brought get to run.
                        await asyncio.sleep(0)
                        self._deliver(deliveries)
                        deliveries = Deliveries()
                        reply = await answer
                    except ShardError as error:
                        await self._on_error(call, error)
                        continue
                    finally:
                        answer.cancel()
                deliveries = self._on_reply(call, reply)
        except Exception:
            logger.exception("the batching loop ends")
            raise
        finally:
            self._end_all(deliveries)

    async def _carry(self, call: Call) -> StepResult | CachedBatch | None:
        match call:
            case Prefill():
                if self._must_clear and self._scheduler.running is None:
                    await self._shard.clear_cache()
                    self._must_clear = False
                return await self._shard.prefill(call.batch, call.cached)
            case Decode():
                return await self._shard.decode(call.batches)
            case Filter():
                return await self._shard.filter_batch(call.batch_id, call.request_ids)
            case Clear():
                await self._shard.clear_cache(call.batch_id)
            case Idle():
                raise AssertionError("nothing to carry")
        return None

    def _on_reply(self, call: Call, reply: StepResult | CachedBatch | None) -> Deliveries:
        if self._step is not None and isinstance(reply, StepResult):
            self._step.answered_ns = self._now_ns()
            self._step.timings = reply.timings
        deliveries = self._scheduler.on_reply(call, reply)
        if isinstance(reply, StepResult):
            self._trace.on_reply(call, deliveries, reply.timings, self._scheduler)
        return deliveries

    async def _on_error(self, call: Call, error: ShardError) -> None:
        if isinstance(call, Clear) and call.after_error:
            logger.warning("could not clear batch %d after an error: %s", call.batch_id, error)
            self._must_clear = True
            return
        logger.error("%s failed: %s", type(call).__name__.lower(), error)
        self._is_healthy = False
        if self._step is not None:
            self._observer.on_call_failed(self._step.method)
            self._step = None
        self._fail(self._scheduler.on_error(call), generation_error(error))
        self._trace.on_error(self._scheduler)
        if isinstance(error, StepTimeoutError):
            # Nothing more can be asked of a shard that hangs.
            self._fail(self._scheduler.fail_all(), generation_error(error))
            raise error
        if isinstance(error, ShardConnectionError):
            # The link may come back, and then everything is cleared before the next batch.
            self._must_clear = True
            return
        if isinstance(call, Filter | Clear):
            with contextlib.suppress(ShardError):
                await self._shard.clear_cache()
            raise error

    def _deliver(self, deliveries: Deliveries) -> None:
        num_single = 0
        for entry, generation in deliveries.generations:
            if len(generation.tokens) == 1:
                num_single += 1
            else:
                self._observer.on_tokens(len(generation.tokens) - 1, 1)
            is_last = generation.generated_text is not None
            stream = self._streams.pop(entry.id, None) if is_last else self._streams.get(entry.id)
            if stream is not None:
                stream.push(events_of(entry, generation), is_last=is_last)
        if num_single:
            self._observer.on_tokens(0, num_single)
        if deliveries.num_dropped:
            self._observer.on_failures("dropped", deliveries.num_dropped)
        if deliveries.lost:
            logger.error("requests %s were dropped by the model server", [entry.id for entry in deliveries.lost])
            self._fail(deliveries.lost, GenerationError("dropped by the model server"))

    def _fail(self, entries: Iterable[Entry], error: RequestError) -> None:
        failed = list(entries)
        for entry in failed:
            stream = self._streams.pop(entry.id, None)
            if stream is not None:
                stream.push((error,), is_last=True)
        if failed:
            self._observer.on_failures("generation", len(failed))

    def _abandon(self, entry: Entry) -> None:
        if self._streams.pop(entry.id, None) is not None:
            self._scheduler.cancel(entry)

    def _end_all(self, deliveries: Deliveries) -> None:
        self._is_over = True
        self._deliver(deliveries)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.push((IncompleteGenerationError(),), is_last=True)
        if streams:
            self._observer.on_failures("incomplete", len(streams))
        self._scheduler.fail_all()
        self._observer.on_running(0, 0)
        self._observer.on_queue(0)

    def _observe(self, call: Call) -> None:
        """Tell the observer what the Scheduler decided. A step is told as done once its batch has been filtered."""
        observer, scheduler, now_ns = self._observer, self._scheduler, self._now_ns()
        self._trace.on_call(call, scheduler, now_ns)
        if isinstance(call, Filter | Clear):
            return
        if self._step is not None:
            observer.on_call_done(*self._step.told_at(now_ns))
            self._step = None
        observer.on_queue(scheduler.queue_size)
        if scheduler.queue.num_discarded > self._num_discarded:
            observer.on_failures("dropped", scheduler.queue.num_discarded - self._num_discarded)
            self._num_discarded = scheduler.queue.num_discarded
        running = scheduler.running
        observer.on_running(*((0, 0) if running is None else (running.size, running.max_tokens)))
        if isinstance(call, Prefill):
            prompt_tokens = sum(entry.request.input_len for entry in call.entries)
            cached_tokens = sum(entry.cached_input_tokens for entry in call.entries)
            observer.on_batch(call.batch.size, call.reason, prompt_tokens, cached_tokens)
        if not isinstance(call, Idle):
            self._step = _Step("prefill" if isinstance(call, Prefill) else "decode", now_ns)
            observer.on_call(self._step.method)


class _Step:
    """When a step was asked for and answered."""

    __slots__ = ("answered_ns", "asked_ns", "method", "timings")

    def __init__(self, method: str, asked_ns: int) -> None:
        self.method = method
        self.asked_ns = self.answered_ns = asked_ns
        self.timings = Timings()

    def told_at(self, now_ns: int) -> tuple[str, Timings, int, int]:
        return self.method, self.timings, now_ns - self.asked_ns, now_ns - self.answered_ns


def events_of(entry: Entry, generation: Generation) -> list[Event]:
    """What one step's output of one request reads as on its stream."""
    events: list[Event] = []
    if generation.prefill_tokens is not None:
        events.append(PrefillDone(generation.prefill_tokens))
    tokens, top_tokens = generation.tokens, generation.top_tokens
    for i, token in enumerate(map(GeneratedToken, tokens.ids, tokens.texts, tokens.logprobs, tokens.is_special)):
        events.append(TokenArrived(token, _tokens(top_tokens[i]) if i < len(top_tokens) else ()))
    if generation.generated_text is not None:
        last = events[-1]
        assert isinstance(last, TokenArrived), f"request {entry.id} ended without a token"
        events[-1] = Finished(
            *last, generation.generated_text, entry.queued_ns, entry.started_ns, entry.cached_input_tokens
        )
    return events


def _tokens(tokens: Tokens) -> tuple[GeneratedToken, ...]:
    return tuple(map(GeneratedToken, tokens.ids, tokens.texts, tokens.logprobs, tokens.is_special))


def generation_error(error: ShardError) -> GenerationError:
    """A shard's failure in TGI's words."""
    if isinstance(error, ShardConnectionError):
        return GenerationError(f"Could not connect to Text Generation server: {error}")
    return GenerationError(f"Server error: {error}")


def liveness_batch() -> Batch:
    """One token of one request, in the block that no other request is given."""
    request = Request(
        id=LIVENESS_ID,
        chunks=("liveness",),
        truncate=1,
        parameters=ChooserParameters(),
        stopping=StoppingParameters(max_new_tokens=1),
        blocks=(0,),
        num_slots=1,
        add_special_tokens=False,
    )
    return Batch(id=LIVENESS_ID, requests=(request,), max_tokens=2, max_blocks=1)

"""The batching loop: sends the Scheduler's calls to the shard, and each request's tokens to its stream.

It makes no decisions. The next call is sent before the previous tokens are delivered, so that the shard computes while
the router writes to its clients.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable

from reference_server.adapter_source import AdapterSource
from reference_server.errors import (
    GenerationError,
    IncompleteGenerationError,
    OverloadedError,
    RequestError,
    ShardConnectionError,
    ShardError,
    StepTimeoutError,
)
from reference_server.messages import (
    CachedBatch,
    StepResult,
    Timings,
)
from reference_server.router.generation_stream import GenerationStream, events_of
from reference_server.router.liveness import liveness_batch
from reference_server.router.scheduling.calls import (
    NO_DELIVERIES,
    Call,
    Clear,
    Decode,
    Deliveries,
    Filter,
    Idle,
    Prefill,
)
from reference_server.router.scheduling.queue import Entry
from reference_server.router.scheduling.reply_check import check_reply
from reference_server.router.scheduling.request import ValidGenerateRequest
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.started_call import StartedCall
from reference_server.router.telemetry.observer import BatchObserver, NullObserver
from reference_server.router.telemetry.step_trace import StepListener
from reference_server.transport.shard import Shard, until_loaded

logger = logging.getLogger(__name__)

_PATH = re.compile(r"(?:\bunix:(?://)?|(?<![\w:/.]))/(?:[\w.@+~-]+/)*[\w.@+~-]+")


HEALTH_TTL_NS = 1_000_000_000
"""For this time the last step or probe answers health checks."""


class Batcher:
    """Drives one Scheduler over one Shard. `run` is the loop; the other methods may be called while it runs.

    warm_up: warms up a shard that was unreachable and may be a new process; it raises `ShardError` if that fails.
    turns_to_send: turns of the event loop from the start of a call until it has been sent. gRPC needs one, a group one
    more; the link needs none.
    """

    def __init__(
        self,
        shard: Shard,
        scheduler: Scheduler,
        *,
        observer: BatchObserver | None = None,
        trace: StepListener | None = None,
        warm_up: Callable[[], Awaitable[None]] | None = None,
        turns_to_send: int = 2,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._shard = shard
        self._scheduler = scheduler
        self._observer: BatchObserver = NullObserver() if observer is None else observer
        self._trace = trace
        self._warm_up = warm_up
        self._turns_to_send = turns_to_send
        self._now_ns = now_ns
        self._streams: dict[int, GenerationStream] = {}
        self._arrival = asyncio.Event()
        self._shard_turn = asyncio.Lock()  # one call at a time, including the health probe
        self._is_healthy = True
        self._proven_ns: int | None = None  # when the last step or probe showed the state
        self._probe: asyncio.Task[None] | None = None
        self._is_over = False
        self._must_clear = False  # the shard may still hold a failed batch that could not be cleared
        self._must_warm_up = False
        self._is_second_try = False  # of a prefill whose connection was lost
        self._num_discarded = 0
        self._step: _Step | None = None
        self._pending = NO_DELIVERIES  # of the last step; delivered while the next one runs

    @property
    def is_healthy(self) -> bool:
        """Whether the last step or probe succeeded."""
        return self._is_healthy and not self._is_over

    @property
    def now_ns(self) -> int:
        """The time of the batcher's clock."""
        return self._now_ns()

    def submit(self, request: ValidGenerateRequest, max_queue_s: float | None = None) -> GenerationStream:
        """Queue a request. Raises `ValidationError` if it can never be admitted.

        After `max_queue_s` in the queue its stream raises `OverloadedError`.
        """
        if self._is_over:
            raise IncompleteGenerationError
        entry = self._scheduler.append(request, self._now_ns())
        stream = GenerationStream(lambda: self._abandon(entry))
        self._streams[entry.id] = stream
        self._observer.on_queue(self._scheduler.queue_size)
        self._arrival.set()
        if max_queue_s is not None:
            asyncio.get_running_loop().call_later(max_queue_s, self._refuse_waiting, entry, max_queue_s)
        return stream

    async def load_adapter(self, source: AdapterSource) -> int:
        """Load an adapter; returns its bytes. Steps run while its files are read. Raises `ShardError`."""

        async def load() -> int | None:
            async with self._shard_turn:
                return await self._shard.load_adapter(source)

        nbytes = await until_loaded(load)
        self._scheduler.add_adapter(source.name)
        return nbytes

    async def unload_adapter(self, adapter_id: str) -> None:
        """Forget an adapter that no request names any more. Raises `ShardError`."""
        async with self._shard_turn:
            await self._shard.unload_adapter(adapter_id)

    async def health(self) -> bool:
        """Whether the shard works: known from the last second, or from the one probe in flight."""
        if self._is_over:
            return False
        if self._proven_ns is None or self._now_ns() - self._proven_ns >= HEALTH_TTL_NS:
            if self._probe is None:
                self._probe = asyncio.create_task(self._check_health())
            # If one caller leaves, the others still wait for the probe.
            await asyncio.shield(self._probe)
        return self.is_healthy

    async def _check_health(self) -> None:
        """Probe the shard: its device, or after a failure a whole forward."""
        try:
            async with self._shard_turn:
                if not self._is_healthy or not await self._passes_health_call():
                    await self._recover()
                    await self._try_forward()
        except ShardError as error:
            logger.error("health check failed: %s", error)
            self._is_healthy = False
            if isinstance(error, ShardConnectionError):
                self._must_clear = self._must_warm_up = True
        else:
            self._is_healthy = True
        finally:
            self._proven_ns = self._now_ns()
            self._probe = None

    async def _passes_health_call(self) -> bool:
        """False if the connection was lost, perhaps long ago."""
        try:
            await self._shard.health()
        except ShardConnectionError:
            self._must_clear = self._must_warm_up = True
            return False
        return True

    async def _try_forward(self) -> None:
        """One forward. No client can cause its failure, so after a failure the shard may be a new process."""
        try:
            await self._shard.prefill(liveness_batch())
        except ShardError:
            self._must_clear = self._must_warm_up = True
            raise

    async def run(self) -> None:
        """Send calls until cancelled. Any other end is fatal to the router; it ends every request first."""
        try:
            while True:
                self._arrival.clear()
                call = self._scheduler.next_call(self._now_ns())
                self._observe(call)
                if isinstance(call, Idle):
                    self._deliver_pending()
                    await self._arrival.wait()
                    continue
                async with self._shard_turn:
                    answer = StartedCall(self._send(call))
                    try:
                        # The call is sent first; then the previous tokens are delivered.
                        for _ in range(self._turns_to_send):
                            await asyncio.sleep(0)
                        self._deliver_pending()
                        reply = await answer
                        if isinstance(reply, StepResult):
                            check_reply(reply, self._scheduler.ids_of(call))
                        elif isinstance(call, Prefill):
                            self._fail_step()
                            continue
                    except ShardError as error:
                        await self._on_error(call, error)
                        continue
                    finally:
                        answer.close()
                self._pending = self._on_reply(call, reply)
        except Exception:
            logger.exception("the batching loop failed")
            raise
        finally:
            self._end_all()

    async def _send(self, call: Call) -> StepResult | CachedBatch | None:
        match call:
            case Prefill():
                return await self._prefill(call)
            case Decode():
                return await self._shard.decode(call.batches)
            case Filter():
                return await self._shard.filter_batch(call.batch_id, call.request_ids)
            case Clear():
                await self._shard.clear_cache(call.batch_id)
            case Idle():
                raise AssertionError("Idle is not sent")
        return None

    async def _prefill(self, call: Prefill) -> StepResult | None:
        """The reply; None if the shard was warmed up since the batch was formed, so that its requests wait again.

        A shard that restarted while it was idle fails no request: after a lost connection the prefill is sent again.
        """
        await self._recover()
        if self._scheduler.is_open(call):
            try:
                return await self._shard.prefill(call.batch, call.cached)
            except ShardConnectionError:
                if self._is_second_try or self._scheduler.running is not None:
                    raise
                self._is_second_try = self._must_clear = self._must_warm_up = True
                await self._recover()
        return None

    async def _recover(self) -> None:
        """After a failure, once no batch runs: clear the shard, and warm it up if it was unreachable."""
        if self._scheduler.running is not None:
            return
        if self._must_clear:
            await self._shard.clear_cache()
            self._must_clear = False
        if self._must_warm_up:
            if self._warm_up is not None:
                logger.info("warming up the model server again")
                await self._warm_up()
            self._scheduler.forget_cache()
            self._must_warm_up = False

    def _on_reply(self, call: Call, reply: StepResult | CachedBatch | None) -> Deliveries:
        answered_ns = self._now_ns()
        if self._step is not None and isinstance(reply, StepResult):
            self._step.answered_ns = answered_ns
            self._step.timings = reply.timings
            self._step.tokens = sum([len(each.tokens.ids) for each in reply.generations])
        deliveries = self._scheduler.on_reply(call, reply)
        if isinstance(reply, StepResult):
            self._is_healthy, self._proven_ns = True, answered_ns
            self._is_second_try = False
            if reply.drafts.proposed or reply.drafts.undrafted:
                self._observer.on_drafts(reply.drafts)
        if isinstance(reply, StepResult) and self._trace is not None:
            self._trace.on_reply(call, deliveries, reply, self._scheduler, answered_ns)
        return deliveries

    async def _on_error(self, call: Call, error: ShardError) -> None:
        if isinstance(call, Clear) and call.after_error:
            logger.warning("could not clear batch %d after an error: %s", call.batch_id, error)
            self._must_clear = True
            return
        logger.error("%s failed: %s", type(call).__name__.lower(), error)
        self._is_healthy, self._proven_ns = False, None
        self._fail(self._scheduler.on_error(call), generation_error(error))
        if isinstance(error, ShardConnectionError):
            self._fail(self._scheduler.lose_batches(), generation_error(error))
        self._fail_step()
        if isinstance(error, StepTimeoutError):
            # No further call can be sent to a shard that hangs.
            self._fail(self._scheduler.fail_all(), generation_error(error))
            raise error
        if isinstance(error, ShardConnectionError):
            # If the connection comes back, everything is cleared before the next batch.
            self._must_clear = self._must_warm_up = True
            return
        if isinstance(call, Filter | Clear):
            with contextlib.suppress(ShardError):
                await self._shard.clear_cache()
            raise error

    def _fail_step(self) -> None:
        """Report the open step as failed."""
        if self._step is not None:
            self._observer.on_call_failed(self._step.method)
            self._step = None
        if self._trace is not None:
            self._trace.on_error(self._scheduler)

    def _deliver_pending(self) -> None:
        """Deliver the results of the last step once, even if a delivery fails."""
        pending, self._pending = self._pending, NO_DELIVERIES
        self._deliver(pending)

    def _deliver(self, deliveries: Deliveries) -> None:
        num_single, now_ns = 0, self._now_ns()
        for entry, generation in deliveries.generations:
            num_tokens = len(generation.tokens.ids)
            if num_tokens == 1:
                num_single += 1
            else:
                self._observer.on_tokens(num_tokens - 1, 1)
            is_last = generation.generated_text is not None
            stream = self._streams.get(entry.id)
            if stream is not None:
                if stream.on_tokens is not None:
                    stream.on_tokens(num_tokens, now_ns)
                if is_last or not stream.write(generation):
                    stream.push(events_of(entry, generation), is_last=is_last)
                if is_last:
                    del self._streams[entry.id]
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
            self._observer.on_queue(self._scheduler.queue_size)

    def _refuse_waiting(self, entry: Entry, waited_s: float) -> None:
        if not self._scheduler.refuse(entry):
            return
        error = OverloadedError(
            f"Model is overloaded: the request waited {waited_s:g} s in the queue, the limit of `max_queue_time`"
        )
        self._streams.pop(entry.id).push((error,), is_last=True)
        self._observer.on_queue(self._scheduler.queue_size)
        self._observer.on_failures("overloaded", 1)

    def _end_all(self) -> None:
        self._is_over = True
        try:
            self._deliver_pending()
        finally:
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.push((IncompleteGenerationError(),), is_last=True)
            self._scheduler.fail_all()
        if streams:
            self._observer.on_failures("incomplete", len(streams))
        self._observer.on_running(0, 0)
        self._observer.on_queue(0)

    def _observe(self, call: Call) -> None:
        """Report the next call to the observer, and the previous step as done: its batch has been filtered by now."""
        observer, scheduler, now_ns = self._observer, self._scheduler, self._now_ns()
        if self._trace is not None:
            self._trace.on_call(call, scheduler, now_ns)
        if isinstance(call, Filter | Clear):
            return
        if self._step is not None:
            step = self._step
            total_ns, filter_ns = now_ns - step.sent_ns, now_ns - step.answered_ns
            observer.on_call_done(step.method, step.timings, total_ns, filter_ns, step.tokens)
            self._step = None
        observer.on_queue(scheduler.queue_size)
        if scheduler.queue.num_discarded > self._num_discarded:
            observer.on_failures("dropped", scheduler.queue.num_discarded - self._num_discarded)
            self._num_discarded = scheduler.queue.num_discarded
        running = scheduler.running
        observer.on_running(*((0, 0) if running is None else (running.size, running.max_tokens)))
        blocks = scheduler.queue.admission.blocks
        if blocks is not None:
            observer.on_blocks(*blocks)
        if isinstance(call, Prefill):
            prompt_tokens = sum(entry.request.input_len for entry in call.entries)
            cached_tokens = sum(entry.cached_input_tokens for entry in call.entries)
            observer.on_batch(call.batch.size, call.reason, prompt_tokens, cached_tokens)
        if not isinstance(call, Idle):
            self._step = _Step("prefill" if isinstance(call, Prefill) else "decode", now_ns)
            observer.on_call(self._step.method)


class _Step:
    """When a step was sent and answered, and the tokens that it generated."""

    __slots__ = ("answered_ns", "method", "sent_ns", "timings", "tokens")

    def __init__(self, method: str, sent_ns: int) -> None:
        self.method = method
        self.sent_ns = self.answered_ns = sent_ns
        self.timings = Timings()
        self.tokens = 0


def generation_error(error: ShardError) -> GenerationError:
    """A shard's failure with TGI's text. Paths of this machine appear only in the log."""
    text = _PATH.sub("(path)", str(error))
    if isinstance(error, ShardConnectionError):
        return GenerationError(f"Could not connect to Text Generation server: {text}")
    return GenerationError(f"Server error: {text}")

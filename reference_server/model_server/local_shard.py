"""`LocalShard`: one rank's model behind the `Shard` protocol. Keeps the cached batches and times each call.

All work on the model runs in one thread of the shard, one call at a time, so that the event loop stays free. The thread
replies to a call first and then launches the next step of its batch, before it starts another call.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from reference_server.errors import ShardError
from reference_server.messages import (
    Batch,
    CachedBatch,
    ModelInfo,
    StepResult,
    Timings,
    WarmupReply,
    WarmupRequest,
)
from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.engine import Engine
from reference_server.model_server.options import EngineOptions

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class LocalShard:
    """A model in this process, made by `load`.

    A bad call raises ShardError. RuntimeError is an error of the forward pass, a collective or the device, after which
    the shard is unusable.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._batches: dict[int, SequenceBatch] = {}
        # The batch whose next step is launched after the reply to the current call.
        self._replied: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shard", initializer=engine.enter_thread)

    @classmethod
    def load(cls, options: EngineOptions, rank: int = 0, world_size: int = 1) -> "LocalShard":
        """Load the model; raises StartupError for what is not served.

        With more than one rank the process group must be open.
        """
        return cls(Engine.load(options, rank, world_size))

    def close(self) -> None:
        """Wait for the step in progress, then end the thread."""
        self._thread.shutdown()

    async def info(self) -> ModelInfo:
        return self.engine.info

    async def health(self) -> None:
        await self._run(self.engine.check_device)

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        return await self._run(self._warmup, request)

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        return await self._run(self._prefill, batch, cached)

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        return await self._run(self._decode, batches)

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        return await self._run(self._filter, batch_id, request_ids)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        await self._run(self._clear, batch_id)

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        reply: Future[T] = Future()
        self._thread.submit(self._serve, reply, functools.partial(call, *args, **kwargs))
        return await asyncio.wrap_future(reply)

    def _serve(self, reply: "Future[T]", call: Callable[[], T]) -> None:
        """Reply to one call, then launch the next step of the batch that it stepped."""
        if not reply.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            self.engine.release_memory()
            reply.set_exception(error)
        else:
            reply.set_result(result)
            self._launch_ahead()

    def _launch_ahead(self) -> None:
        batch_id, self._replied = self._replied, None
        if batch_id is not None:
            self._batches[batch_id] = self.engine.stepper.launch_ahead(self._batches[batch_id])

    def _warmup(self, request: WarmupRequest) -> WarmupReply:
        self._batches.clear()
        return self.engine.warmup(request)

    def _prefill(self, batch: Batch, cached: CachedBatch | None) -> StepResult:
        if self.engine.state.cache is None:
            raise ShardError("Prefill before Warmup: the K/V cache has no size yet")
        started = time.perf_counter_ns()
        concat_ns = None
        # The cached batch is removed first, so that an error leaves nothing under its id.
        merged = [self._pop(cached.id)] if cached is not None and self.engine.info.support_chunking else []
        running = [sequence for kept in (*self._batches.values(), *merged) for sequence in kept.sequences]
        new = self.engine.intake.make_batch(batch, running)
        if merged:
            concat_started = time.perf_counter_ns()
            new = SequenceBatch.concatenate([*merged, new])
            concat_ns = time.perf_counter_ns() - concat_started
        return self._step(new, started, concat_ns)

    def _decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        started = time.perf_counter_ns()
        if not batches:
            raise ShardError("Must provide at least one batch")
        popped = [self._pop(batch.id) for batch in batches]
        if len(popped) == 1:
            return self._step(popped[0], started, None)
        merged = SequenceBatch.concatenate(popped)
        return self._step(merged, started, time.perf_counter_ns() - started)

    def _step(self, batch: SequenceBatch, started: int, concat_ns: int | None) -> StepResult:
        output = self.engine.stepper.step(batch)
        if output.batch is not None:
            self._batches[output.batch.id] = output.batch
            self._replied = output.batch.id
        return StepResult(
            generations=output.generations,
            batch=None if output.batch is None else output.batch.receipt(),
            timings=Timings(output.forward_ns, output.decode_ns, time.perf_counter_ns() - started, concat_ns),
        )

    def _filter(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        batch = self._pop(batch_id)
        kept = batch.filter(request_ids)
        self.engine.stepper.drop(batch, set(batch.sequences).difference(kept.sequences))
        self._batches[batch_id] = kept
        return kept.receipt()

    def _clear(self, batch_id: int | None) -> None:
        for each in list(self._batches) if batch_id is None else [batch_id]:
            batch = self._batches.pop(each, None)
            if batch is not None:
                self.engine.stepper.drop(batch, batch.sequences)
        self.engine.release_memory()

    def _pop(self, batch_id: int) -> SequenceBatch:
        batch = self._batches.pop(batch_id, None)
        if batch is None:
            raise ShardError(f"Batch ID {batch_id} not found in cache.")
        return batch

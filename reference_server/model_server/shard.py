"""`LocalShard`: one rank's model behind the `Shard` protocol. Keeps the cached batches and times each call.

All work on the model runs in one thread of the shard's own, a call at a time, so that an event loop stays free. A step
is answered first; what is computed ahead follows in the same turn, before any other call's.
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
from reference_server.model_server.decoding.peer_schemas import PeerSchemas
from reference_server.model_server.engine import Engine
from reference_server.model_server.generate import StepOutput
from reference_server.model_server.options import EngineOptions

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class LocalShard:
    """A model in this process. Make one with `load`; calls are made one at a time.

    A bad call raises ShardError. A RuntimeError is one of the forward pass, a collective or the device: the shard is
    lost with it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._batches: dict[int, SequenceBatch] = {}
        self._schemas = PeerSchemas()
        # The batch whose next step is launched once the present call has been answered.
        self._answered: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shard", initializer=engine.enter_thread)

    @classmethod
    def load(cls, options: EngineOptions, rank: int = 0, world_size: int = 1) -> "LocalShard":
        """Bring the model into memory; raises StartupError for what is not served.

        With more than one rank the process group is open already.
        """
        return cls(Engine.load(options, rank, world_size))

    def close(self) -> None:
        """Wait for the step in flight, then end the thread."""
        self._thread.shutdown()

    async def info(self) -> ModelInfo:
        return self._engine.info

    async def health(self) -> None:
        await self._run(self._engine.check_device)

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        return await self._run(self._warmup, request)

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        return await self._run(self._prefill, await self._schemas.as_regexes(batch), cached)

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        return await self._run(self._decode, batches)

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        return await self._run(self._filter, batch_id, request_ids)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        await self._run(self._clear, batch_id)

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        answer: Future[T] = Future()
        self._thread.submit(self._serve, answer, functools.partial(call, *args, **kwargs))
        return await asyncio.wrap_future(answer)

    def _serve(self, answer: "Future[T]", call: Callable[[], T]) -> None:
        """Answer one call, then launch what it left to be computed ahead."""
        if not answer.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            self._engine.release_memory()
            answer.set_exception(error)
        else:
            answer.set_result(result)
            self._launch_ahead()

    def _launch_ahead(self) -> None:
        batch_id, self._answered = self._answered, None
        if batch_id is not None:
            self._batches[batch_id] = self._engine.launch(self._batches[batch_id])

    def _warmup(self, request: WarmupRequest) -> WarmupReply:
        self._batches.clear()
        return self._engine.warmup(request)

    def _prefill(self, batch: Batch, cached: CachedBatch | None) -> StepResult:
        started = time.perf_counter_ns()
        concat_ns = None
        # The running batch is popped first, so that an error leaves nothing behind under its id.
        merged = [self._pop(cached.id)] if cached is not None and self._engine.info.support_chunking else []
        held = [sequence for kept in (*self._batches.values(), *merged) for sequence in kept.sequences]
        sequences = self._engine.make_batch(batch, held)
        if merged:
            concat_started = time.perf_counter_ns()
            sequences = SequenceBatch.concatenate([*merged, sequences])
            concat_ns = time.perf_counter_ns() - concat_started
        return self._step(sequences, started, concat_ns)

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
        output: StepOutput = self._engine.step(batch)
        if output.batch is not None:
            self._batches[output.batch.id] = output.batch
            self._answered = output.batch.id
        return StepResult(
            generations=output.generations,
            batch=None if output.batch is None else output.batch.receipt(),
            timings=Timings(output.forward_ns, output.decode_ns, time.perf_counter_ns() - started, concat_ns),
        )

    def _filter(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        batch = self._pop(batch_id)
        kept = batch.filter(request_ids)
        self._engine.forget(batch, set(batch.sequences).difference(kept.sequences))
        self._batches[batch_id] = kept
        return kept.receipt()

    def _clear(self, batch_id: int | None) -> None:
        for each in list(self._batches) if batch_id is None else [batch_id]:
            batch = self._batches.pop(each, None)
            if batch is not None:
                self._engine.forget(batch, batch.sequences)
        self._engine.release_memory()

    def _pop(self, batch_id: int) -> SequenceBatch:
        batch = self._batches.pop(batch_id, None)
        if batch is None:
            raise ShardError(f"Batch ID {batch_id} not found in cache.")
        return batch

"""`RankCalls`: the calls of one rank, for the thread that computes. Keeps the cached batches and times each call."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from reference_server.adapter_source import AdapterSource
from reference_server.errors import NOT_WARMED_UP, ShardError
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


class RankCalls:
    """`BlockingShard` of a model in this process.

    A bad call raises ShardError. RuntimeError is an error of the forward pass, a collective or the device, after which
    the shard is unusable.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._batches: dict[int, SequenceBatch] = {}
        # The batch whose next step is launched after the reply to the current call.
        self._replied: int | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        self._engine.enter_thread()
        with self._engine.stepper.no_gradients():
            yield

    def after_reply(self) -> None:
        """Launch the next step of the batch that the call stepped."""
        batch_id, self._replied = self._replied, None
        if batch_id is not None:
            self._batches[batch_id] = self._engine.stepper.launch_ahead(self._batches[batch_id])

    def after_error(self) -> None:
        self._replied = None
        self._engine.release_memory()

    def info(self) -> ModelInfo:
        return self._engine.info

    def health(self) -> None:
        self._engine.check_device()

    def warmup(self, request: WarmupRequest) -> WarmupReply:
        self._batches.clear()
        return self._engine.warmup(request)

    def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        if self._engine.state.cache is None:
            raise ShardError(f"{NOT_WARMED_UP}: the K/V cache has no size yet")
        started = time.perf_counter_ns()
        concat_ns = None
        # The cached batch is removed first, so that an error leaves nothing under its id.
        merged = [self._pop(cached.id)] if cached is not None and self._engine.info.support_chunking else []
        running = [sequence for kept in (*self._batches.values(), *merged) for sequence in kept.sequences]
        new = self._engine.intake.make_batch(batch, running)
        if merged:
            concat_started = time.perf_counter_ns()
            new = SequenceBatch.concatenate([*merged, new])
            concat_ns = time.perf_counter_ns() - concat_started
        return self._step(new, started, concat_ns)

    def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        started = time.perf_counter_ns()
        if not batches:
            raise ShardError("Must provide at least one batch")
        popped = [self._pop(batch.id) for batch in batches]
        if len(popped) == 1:
            return self._step(popped[0], started, None)
        merged = SequenceBatch.concatenate(popped)
        return self._step(merged, started, time.perf_counter_ns() - started)

    def _step(self, batch: SequenceBatch, started: int, concat_ns: int | None) -> StepResult:
        ahead_ns = sum(step.forward_ns for step in batch.pending)
        output = self._engine.stepper.step(batch)
        if output.batch is not None:
            self._batches[output.batch.id] = output.batch
            self._replied = output.batch.id
        else:
            self._sweep_adapters()
        return StepResult(
            generations=output.generations,
            batch=None if output.batch is None else output.batch.receipt(),
            timings=Timings(
                output.forward_ns, output.decode_ns, ahead_ns + time.perf_counter_ns() - started, concat_ns
            ),
            drafts=output.drafts,
        )

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        batch = self._pop(batch_id)
        kept = batch.filter(request_ids)
        self._engine.stepper.drop(batch, set(batch.sequences).difference(kept.sequences))
        self._batches[batch_id] = kept
        self._sweep_adapters()
        return kept.receipt()

    def clear_cache(self, batch_id: int | None = None) -> None:
        for each in list(self._batches) if batch_id is None else [batch_id]:
            batch = self._batches.pop(each, None)
            if batch is not None:
                self._engine.stepper.drop(batch, batch.sequences)
        self._sweep_adapters()
        self._engine.release_memory()

    def load_adapter(self, source: AdapterSource) -> int | None:
        return self._engine.adapter_loads.load(source)

    def unload_adapter(self, adapter_id: str) -> None:
        self._engine.adapter_loads.unload(adapter_id, self._used_adapters())

    def _used_adapters(self) -> set[int]:
        return {sequence.adapter for batch in self._batches.values() for sequence in batch.sequences}

    def _sweep_adapters(self) -> None:
        """Free the weights of unloaded adapters whose last sequence has left."""
        adapters = self._engine.model.adapters
        if adapters is not None and adapters.has_retired:
            adapters.sweep(self._used_adapters())

    def _pop(self, batch_id: int) -> SequenceBatch:
        batch = self._batches.pop(batch_id, None)
        if batch is None:
            raise ShardError(f"Batch ID {batch_id} not found in cache.")
        return batch

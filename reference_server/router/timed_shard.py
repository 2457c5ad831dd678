"""`TimedShard`: a shard whose calls have a time limit."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from reference_server.adapter_source import AdapterSource
from reference_server.errors import StepTimeoutError
from reference_server.messages import Batch, CachedBatch, ModelInfo, StepResult, WarmupReply, WarmupRequest
from reference_server.transport.shard import Shard

T = TypeVar("T")


class TimedShard:
    """A `Shard` whose calls raise `StepTimeoutError` after `timeout_s`; warm-up has no limit.

    One timer serves all calls: when it is due it waits on for the call in progress. `asyncio.timeout` would set and
    cancel a timer for each step. turns_to_send: of the shard, for the `Batcher`.
    """

    def __init__(self, shard: Shard, timeout_s: float, turns_to_send: int = 2) -> None:
        self._shard = shard
        self._timeout_s = timeout_s
        self.turns_to_send = turns_to_send
        self._timer: asyncio.TimerHandle | None = None
        self._calling: asyncio.Task[object] | None = None  # the task of the call in progress
        self._deadline_s = 0.0
        self._has_expired = False

    async def info(self) -> ModelInfo:
        return await self._limited(self._shard.info())

    async def health(self) -> None:
        await self._limited(self._shard.health())

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        return await self._shard.warmup(request)

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        return await self._limited(self._shard.prefill(batch, cached))

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        return await self._limited(self._shard.decode(batches))

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        return await self._limited(self._shard.filter_batch(batch_id, request_ids))

    async def clear_cache(self, batch_id: int | None = None) -> None:
        await self._limited(self._shard.clear_cache(batch_id))

    async def load_adapter(self, source: AdapterSource) -> int | None:
        return await self._limited(self._shard.load_adapter(source))

    async def unload_adapter(self, adapter_id: str) -> None:
        await self._limited(self._shard.unload_adapter(adapter_id))

    async def _limited(self, call: Awaitable[T]) -> T:
        assert self._calling is None, "calls of a shard are made one at a time"
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "calls are made in tasks"
        num_cancelled = task.cancelling()
        self._calling, self._has_expired = task, False
        self._deadline_s = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(self._deadline_s, self._on_timer)
        try:
            return await call
        except asyncio.CancelledError:
            # If the caller was cancelled too, the cancellation goes on.
            if self._has_expired and task.uncancel() <= num_cancelled:
                raise StepTimeoutError(self._timeout_s) from None
            raise
        finally:
            self._calling = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._calling is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._deadline_s:
            self._timer = loop.call_at(self._deadline_s, self._on_timer)
        else:
            self._has_expired = True
            self._calling.cancel()

"""A limit on how long one model step may take (reliability.md Q17)."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from reference_server.errors import StepTimeoutError
from reference_server.messages import Batch, CachedBatch, ModelInfo, StepResult, WarmupReply, WarmupRequest
from reference_server.transport.shard import Shard

T = TypeVar("T")

ACCELERATOR_TIMEOUT_S = 120.0
CPU_TIMEOUT_S = 600.0


def step_timeout_s(asked_s: float | None, device_type: str) -> float:
    """The limit in force on a device."""
    if asked_s is not None:
        return asked_s
    return CPU_TIMEOUT_S if device_type == "cpu" else ACCELERATOR_TIMEOUT_S


class TimedShard:
    """A `Shard` whose steps fail after `timeout_s` instead of hanging; warm-up may take as long as it likes."""

    def __init__(self, shard: Shard, timeout_s: float) -> None:
        self._shard = shard
        self._timeout_s = timeout_s

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

    async def _limited(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise StepTimeoutError(self._timeout_s) from None

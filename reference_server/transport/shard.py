"""The seam between router and model: anything that can run a batch.

A local model, a gRPC stub and a group of shards all implement `Shard`; the router never knows which it holds.
"""

from collections.abc import Sequence
from typing import Protocol

from reference_server.messages import Batch, CachedBatch, ModelInfo, StepResult, WarmupReply, WarmupRequest


class Shard(Protocol):
    """Runs batches. Calls are made one at a time; each raises `ShardError` when it fails.

    `prefill`, `decode` and `filter_batch` consume the receipts they are given: after an error nothing is left
    under those ids.
    """

    async def info(self) -> ModelInfo: ...

    async def health(self) -> None: ...

    async def warmup(self, request: WarmupRequest) -> WarmupReply: ...

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        """First forward of new requests; with `cached`, merged into that batch, whose id the result keeps."""
        ...

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        """One more forward over one or more cached batches; merged, they keep the first one's id."""
        ...

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """Keep only `request_ids` of a cached batch."""
        ...

    async def clear_cache(self, batch_id: int | None = None) -> None:
        """Forget one cached batch, or all. Unknown ids are fine."""
        ...

"""`LocalShard`: one rank's model behind the `Shard` protocol, for the event loop of its process.

All work on the model runs in one thread of the shard, one call at a time, so that the event loop stays free.
"""

import functools
import weakref
from collections.abc import Callable, Sequence

from reference_server.adapter_source import AdapterSource
from reference_server.messages import Batch, CachedBatch, ModelInfo, StepResult, WarmupReply, WarmupRequest
from reference_server.model_server.calls.rank_calls import RankCalls
from reference_server.model_server.engine import Engine
from reference_server.model_server.options import EngineOptions
from reference_server.transport.compute_thread import ComputeThread
from reference_server.transport.shard import BlockingShard


class LocalShard:
    """A model in this process, made by `load`. Its thread can serve the link too. Errors as in `RankCalls`.

    traced: wraps the calls of the thread, to record spans.
    """

    def __init__(self, engine: Engine, traced: Callable[[BlockingShard], BlockingShard] | None = None) -> None:
        self.engine = engine
        calls = RankCalls(engine)
        self.thread = ComputeThread(calls if traced is None else traced(calls))
        # A shard that is not closed frees its model with its last reference.
        weakref.finalize(self, self.thread.close, wait=False)

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        rank: int = 0,
        world_size: int = 1,
        traced: Callable[[BlockingShard], BlockingShard] | None = None,
    ) -> "LocalShard":
        """Load the model; raises StartupError for what is not served.

        With more than one rank the process group must be open.
        """
        return cls(Engine.load(options, rank, world_size), traced)

    def close(self) -> None:
        """Wait for the step in progress, then end the thread."""
        self.thread.close()

    async def info(self) -> ModelInfo:
        return self.engine.info

    async def health(self) -> None:
        await self.thread.call(self.thread.shard.health)

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        return await self.thread.call(functools.partial(self.thread.shard.warmup, request))

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        return await self.thread.call(functools.partial(self.thread.shard.prefill, batch, cached))

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        return await self.thread.call(functools.partial(self.thread.shard.decode, batches))

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        return await self.thread.call(functools.partial(self.thread.shard.filter_batch, batch_id, request_ids))

    async def clear_cache(self, batch_id: int | None = None) -> None:
        await self.thread.call(functools.partial(self.thread.shard.clear_cache, batch_id))

    async def load_adapter(self, source: AdapterSource) -> int | None:
        return await self.thread.call(functools.partial(self.thread.shard.load_adapter, source))

    async def unload_adapter(self, adapter_id: str) -> None:
        await self.thread.call(functools.partial(self.thread.shard.unload_adapter, adapter_id))

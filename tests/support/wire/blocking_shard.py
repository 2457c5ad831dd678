"""An asynchronous `Shard` of a test as the `BlockingShard` of a compute thread."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from reference_server.adapter_source import AdapterSource
from reference_server.messages import Batch, CachedBatch, ModelInfo, StepResult, WarmupReply, WarmupRequest
from reference_server.transport.compute_thread import ComputeThread
from reference_server.transport.shard import Shard

T = TypeVar("T")


class BlockingTestShard:
    """Runs each call on the test's event loop and blocks the thread meanwhile. `events` lists what the thread does."""

    def __init__(self, shard: Shard, loop: asyncio.AbstractEventLoop) -> None:
        self.events: list[str] = []
        self._shard = shard
        self._loop = loop

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def after_reply(self) -> None:
        self.events.append("after reply")

    def after_error(self) -> None:
        self.events.append("after error")

    def info(self) -> ModelInfo:
        return self._result(self._shard.info())

    def health(self) -> None:
        self._result(self._shard.health())

    def warmup(self, request: WarmupRequest) -> WarmupReply:
        return self._result(self._shard.warmup(request))

    def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        return self._result(self._shard.prefill(batch, cached))

    def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        return self._result(self._shard.decode(batches))

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        return self._result(self._shard.filter_batch(batch_id, request_ids))

    def clear_cache(self, batch_id: int | None = None) -> None:
        self._result(self._shard.clear_cache(batch_id))

    def load_adapter(self, source: AdapterSource) -> int | None:
        return self._result(self._shard.load_adapter(source))

    def unload_adapter(self, adapter_id: str) -> None:
        self._result(self._shard.unload_adapter(adapter_id))

    def _result(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


@contextmanager
def compute_thread(shard: Shard) -> Iterator[ComputeThread]:
    """The thread of a test's shard; it ends with its last call, which the test's loop may have to finish."""
    thread = ComputeThread(BlockingTestShard(shard, asyncio.get_running_loop()))
    try:
        yield thread
    finally:
        thread.close(wait=False)

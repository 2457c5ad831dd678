"""The seam between router and model: anything that can run a batch.

A local model, a shard behind a wire and a group of shards implement `Shard`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, TypeVar

from reference_server.adapter_source import AdapterSource
from reference_server.errors import ShardError
from reference_server.messages import (
    Batch,
    CachedBatch,
    Generation,
    ModelInfo,
    StepResult,
    WarmupReply,
    WarmupRequest,
)

T = TypeVar("T")

READING_PAUSE_S = 0.02
"""Between two calls that ask whether an adapter's files are read; each call takes the time between two steps."""


class Shard(Protocol):
    """Runs batches. Calls are made one at a time; each raises `ShardError` when it fails.

    `prefill`, `decode` and `filter_batch` consume their cached batches: after an error these ids are gone.
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

    async def load_adapter(self, source: AdapterSource) -> int | None:
        """Load an adapter under its name, in place of one of that name from elsewhere; returns its bytes.

        None while its files are read, during which steps continue: repeat the call, as `until_loaded` does.
        """
        ...

    async def unload_adapter(self, adapter_id: str) -> None:
        """Forget an adapter; the requests that use it keep it until they leave their batch."""
        ...


class BlockingShard(Protocol):
    """A shard of this process whose calls block; one `ComputeThread` makes them all. Calls and errors as in `Shard`."""

    def computing(self) -> AbstractContextManager[object]:
        """Entered once, by the thread that makes the calls."""
        ...

    def after_reply(self) -> None:
        """Called when a reply has been sent: the time for work ahead of the next call."""
        ...

    def after_error(self) -> None:
        """Called when a call has raised, before its error is sent."""
        ...

    def info(self) -> ModelInfo: ...

    def health(self) -> None: ...

    def warmup(self, request: WarmupRequest) -> WarmupReply: ...

    def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult: ...

    def decode(self, batches: Sequence[CachedBatch]) -> StepResult: ...

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch: ...

    def clear_cache(self, batch_id: int | None = None) -> None: ...

    def load_adapter(self, source: AdapterSource) -> int | None: ...

    def unload_adapter(self, adapter_id: str) -> None: ...


async def until_loaded(load: Callable[[], Awaitable[int | None]]) -> int:
    """Repeat a call of `load_adapter` until the adapter is loaded; returns its bytes."""
    while (nbytes := await load()) is None:  # noqa: ASYNC110  # the shard may be another process
        await asyncio.sleep(READING_PAUSE_S)
    return nbytes


def lowest_limits(replies: Sequence[WarmupReply]) -> WarmupReply:
    """The reply with the lowest (supported, input, total), where None is the lowest: the rule of v3."""
    return min(
        replies,
        key=lambda reply: (
            -1 if reply.max_supported_total_tokens is None else reply.max_supported_total_tokens,
            reply.max_input_tokens,
            reply.max_total_tokens,
        ),
    )


def lowest_present_limits(replies: Sequence[WarmupReply]) -> WarmupReply:
    """As `lowest_limits`, without replies of None: the rule of v2."""
    return lowest_limits([reply for reply in replies if reply.max_supported_total_tokens is not None] or replies)


class ShardGroup:
    """All shards of one tensor-parallel model as one `Shard`: calls every rank and combines the replies.

    All ranks compute every token; each returns the text of the requests with `id % world_size == rank`. An error of any
    rank is an error of the group, and so is a disagreement: diverged ranks would hang in their next collective.

    An error ends the call without the replies of the other ranks, which may wait for the failed one in a collective.
    Each of them still finishes its part, and begins its part of the next call only then: no rank misses a call.

    turns_to_send: turns of the event loop from the start of a call until every rank's has been sent.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        lowest: Callable[[Sequence[WarmupReply]], WarmupReply] = lowest_limits,
        close: Callable[[], Awaitable[object]] | None = None,
        turns_to_send: int = 2,
    ) -> None:
        assert shards, "a group has at least one shard"
        self._shards = tuple(shards)
        self._lowest = lowest
        self._close = close
        self.turns_to_send = turns_to_send
        self._turns = tuple(asyncio.Lock() for _ in self._shards)
        self._overtaken: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._shards)

    async def close(self) -> None:
        for part in self._overtaken:
            part.cancel()
        if self._close is not None:
            await self._close()

    async def info(self) -> ModelInfo:
        """With the adapters that all ranks have: a rank may read one for longer than another."""
        infos = await self._call_all(lambda shard: shard.info())
        common = tuple(each for each in infos[0].adapters if all(each in info.adapters for info in infos))
        return _agreed("Info", [replace(info, adapters=common) for info in infos])

    async def health(self) -> None:
        await self._call_all(lambda shard: shard.health())

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        """The lowest limits; of each byte count the largest; rank 0's backends."""
        replies = await self._call_all(lambda shard: shard.warmup(request))
        return replace(
            self._lowest(replies),
            weight_bytes=_largest(reply.weight_bytes for reply in replies),
            prefill_peak_bytes=_largest(reply.prefill_peak_bytes for reply in replies),
            graph_bytes=_largest(reply.graph_bytes for reply in replies),
            backends=replies[0].backends,
        )

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        return _combined("Prefill", await self._call_all(lambda shard: shard.prefill(batch, cached)))

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        return _combined("Decode", await self._call_all(lambda shard: shard.decode(batches)))

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        return _agreed("FilterBatch", await self._call_all(lambda shard: shard.filter_batch(batch_id, request_ids)))

    async def clear_cache(self, batch_id: int | None = None) -> None:
        await self._call_all(lambda shard: shard.clear_cache(batch_id))

    async def load_adapter(self, source: AdapterSource) -> int | None:
        """The largest rank's bytes once all ranks have it. If a rank refuses it, no rank has it."""
        loaded = await asyncio.gather(*self._parts(lambda shard: shard.load_adapter(source)), return_exceptions=True)
        errors = [each for each in loaded if isinstance(each, BaseException)]
        if not errors:
            sizes = [each for each in loaded if isinstance(each, int)]
            return max(sizes) if len(sizes) == len(loaded) else None
        for shard, each in zip(self._shards, loaded, strict=True):
            if not isinstance(each, BaseException):
                with suppress(ShardError):
                    await shard.unload_adapter(source.name)
        raise errors[0]

    async def unload_adapter(self, adapter_id: str) -> None:
        await self._call_all(lambda shard: shard.unload_adapter(adapter_id))

    async def _call_all(self, call: Callable[[Shard], Coroutine[Any, Any, T]]) -> list[T]:
        """The replies in rank order. The first error ends the call."""
        if len(self._shards) == 1:
            return [await call(self._shards[0])]
        parts = [asyncio.ensure_future(part) for part in self._parts(call)]
        try:
            return await asyncio.gather(*parts)
        except Exception:
            for part in parts:
                if not part.done():
                    self._overtaken.add(part)
                    part.add_done_callback(self._overtaken.discard)
            raise

    def _parts(self, call: Callable[[Shard], Coroutine[Any, Any, T]]) -> list[Coroutine[Any, Any, T]]:
        """The call of each rank; it waits until the rank has finished its earlier calls."""

        async def in_turn(shard: Shard, turn: asyncio.Lock) -> T:
            async with turn:
                return await call(shard)

        return [in_turn(shard, turn) for shard, turn in zip(self._shards, self._turns, strict=True)]


def _agreed(call: str, answers: Sequence[T]) -> T:
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise ShardError(f"shards disagree on {call}: rank {rank} has {answer}, rank 0 has {answers[0]}")
    return answers[0]


def _combined(call: str, results: Sequence[StepResult]) -> StepResult:
    """Generations of the last rank, then of the others in order; timings of the slowest rank."""
    if len(results) == 1:
        return results[0]
    generations = tuple(chain(results[-1].generations, *(result.generations for result in results[:-1])))
    _check_once(call, generations)
    slowest = max(results, key=lambda result: result.timings.total_ns)
    batch = _agreed(call, [result.batch for result in results])
    # Every rank verifies every draft.
    return StepResult(generations, batch, slowest.timings, slowest.drafts)


def _check_once(call: str, generations: Sequence[Generation]) -> None:
    ids = [generation.request_id for generation in generations]
    if len(set(ids)) != len(ids):
        raise ShardError(f"shards disagree on {call}: a request was answered by two of them")


def _largest(counts: Iterable[int | None]) -> int | None:
    return max((count for count in counts if count is not None), default=None)

"""Drives any Shard as the router does: assigns blocks, filters ended requests, keeps the outcome of every request."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    GeneratedText,
    Generation,
    Request,
    StepResult,
    StoppingParameters,
    Tokens,
)
from reference_server.transport.shard import Shard
from tests.support.models.tiny_models import text_of

Result = TypeVar("Result")


@dataclass
class Outcome:
    """The output of one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    top_tokens: list[Tokens] = field(default_factory=list)
    prefill_tokens: Tokens | None = None
    generated_text: GeneratedText | None = None
    num_generations: int = 0

    def add(self, generation: Generation) -> None:
        self.num_generations += 1
        self.ids.extend(generation.tokens.ids)
        self.logprobs.extend(generation.tokens.logprobs)
        self.texts.extend(generation.tokens.texts)
        self.top_tokens.extend(generation.top_tokens)
        self.prefill_tokens = generation.prefill_tokens or self.prefill_tokens
        self.generated_text = generation.generated_text


def outside_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine, for a fixture that is no coroutine: the event loop of the test is not changed."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


@dataclass
class ShardDriver:
    """One shard and the requests sent to it. Blocks are handed out in a shuffled order, block 0 never.

    An ended request's blocks are the first to be handed out again.
    """

    shard: Shard
    num_blocks: int = 64
    block_size: int = 16
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    sent: dict[int, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(1, self.num_blocks))
        random.Random(5).shuffle(self._free)
        self._next_batch_id = 1

    def request(
        self,
        id_: int,
        prompt: list[int],
        max_new_tokens: int = 10,
        parameters: ChooserParameters | None = None,
        stopping: StoppingParameters | None = None,
        **fields: object,
    ) -> Request:
        stopping = stopping or StoppingParameters(max_new_tokens, ignore_eos_token=True)
        num_slots = len(prompt) + stopping.max_new_tokens - 1
        blocks = tuple(self._free.pop() for _ in range(-(-num_slots // self.block_size)))
        self.outcomes[id_] = Outcome()
        request = Request(
            id=id_,
            chunks=(text_of(prompt),),
            truncate=4096,
            parameters=parameters or ChooserParameters(),
            stopping=stopping,
            blocks=blocks,
            num_slots=num_slots,
        )
        return replace(request, **fields)  # type: ignore[arg-type]

    async def prefill(self, *requests: Request, cached: CachedBatch | None = None) -> StepResult:
        self.sent |= {request.id: request for request in requests}
        batch = Batch(self._next_batch_id, requests)
        self._next_batch_id += 1
        return self._take(await self.shard.prefill(batch, cached))

    async def decode(self, *batches: CachedBatch | None) -> StepResult:
        return self._take(await self.shard.decode([batch for batch in batches if batch is not None]))

    async def finish(self, result: StepResult) -> None:
        """Decode a batch to its end, filtering as requests stop."""
        while result.batch is not None:
            batch = await self.drop_ended(result.batch)
            if batch is None:
                return
            result = await self.decode(batch)

    async def drop_ended(self, batch: CachedBatch) -> CachedBatch | None:
        running = [id_ for id_ in batch.request_ids if self.outcomes[id_].generated_text is None]
        if not running:
            await self.shard.clear_cache(batch.id)
            return None
        if len(running) == batch.size:
            return batch
        return await self.shard.filter_batch(batch.id, running)

    async def run(self, *requests: Request) -> list[Outcome]:
        """One batch from prefill to its end."""
        await self.finish(await self.prefill(*requests))
        return [self.outcomes[request.id] for request in requests]

    async def run_alone(self, requests: Sequence[Request]) -> list[Outcome]:
        return [(await self.run(request))[0] for request in requests]

    def _take(self, result: StepResult) -> StepResult:
        for generation in result.generations:
            self.outcomes[generation.request_id].add(generation)
            if generation.generated_text is not None:
                self.release(generation.request_id)
        return result

    def release(self, id_: int) -> None:
        """Give a request's blocks to the next ones: it has ended, or was filtered out."""
        self._free.extend(self.sent[id_].blocks)

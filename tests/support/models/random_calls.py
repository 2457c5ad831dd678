"""A seeded sequence of all kinds of calls that a router makes: joins, filters, clears, chunks, merges, stop strings."""

import random
from collections.abc import Sequence

from reference_server.messages import CachedBatch, ChooserParameters, Request, StepResult, StoppingParameters
from reference_server.transport.shard import Shard
from tests.support.models.shard_driver import Outcome, ShardDriver
from tests.support.models.tiny_models import random_prompt

KINDS = (
    ChooserParameters(),
    ChooserParameters(),
    ChooserParameters(temperature=0.7, top_k=15, seed=3),
    ChooserParameters(repetition_penalty=1.2, top_p=0.9, seed=4),
    ChooserParameters(frequency_penalty=0.4, presence_penalty=0.5),
    ChooserParameters(do_sample=True, watermark=True, seed=5),
)
LENGTHS = (1, 3, 9, 17, 33)
CallResult = tuple[str, tuple[tuple[int, tuple[int, ...], bool], ...]]
"""A call by name, and what it gave: request, token ids and whether it ended, for each generation in order."""


class RandomCalls:
    """Makes the calls of one seed to a shard that has been warmed up with a chunk budget of 16 and block size 16."""

    def __init__(self, shard: Shard, seed: int, num_blocks: int = 200) -> None:
        self._driver = ShardDriver(shard, num_blocks=num_blocks)
        self._seed = seed
        self._chance = random.Random(seed)
        self._batches: list[CachedBatch] = []
        self._results: list[CallResult] = []
        self._next_id = 0

    @property
    def outcomes(self) -> dict[int, Outcome]:
        return self._driver.outcomes

    @property
    def sent(self) -> dict[int, Request]:
        return self._driver.sent

    async def make(self, num_calls: int) -> list[CallResult]:
        """Make at least so many calls, then decode all batches to their end. Returns the result of each call."""
        while len(self._results) < num_calls:
            self._chance.shuffle(self._batches)
            if len(self._batches) < 3 and (not self._batches or self._chance.random() < 0.3):
                await self._prefill()
            else:
                await self._decode(self._chance.randint(1, len(self._batches)))
            await self._disturb()
        while self._batches:
            await self._decode(1)
        return self._results

    async def _prefill(self) -> None:
        requests = [self._request() for _ in range(self._chance.randint(1, 3))]
        cached = self._batches.pop() if self._batches and self._chance.random() < 0.6 else None
        result = await self._driver.prefill(*requests, cached=cached)
        await self._keep("prefill", result)

    async def _decode(self, num_batches: int) -> None:
        result = await self._driver.decode(*(self._batches.pop() for _ in range(num_batches)))
        await self._keep("decode", result)

    async def _keep(self, call: str, result: StepResult) -> None:
        generations = (
            (each.request_id, each.tokens.ids, each.generated_text is not None) for each in result.generations
        )
        # Each rank's generations come in a block of their own, whose order is no part of the answer.
        self._results.append((call, tuple(sorted(generations))))
        batch = None if result.batch is None else await self._driver.drop_ended(result.batch)
        if batch is not None:
            self._batches.append(batch)

    async def _disturb(self) -> None:
        """Sometimes a client leaves, a batch is cleared, or the shard's health is checked."""
        event = self._chance.random()
        if event < 0.05:
            await self._driver.shard.health()
        if not self._batches:
            return
        if 0.05 <= event < 0.2 and self._batches[-1].size > 1:
            batch = self._batches.pop()
            gone = self._chance.choice(batch.request_ids)
            kept = await self._driver.shard.filter_batch(batch.id, [id_ for id_ in batch.request_ids if id_ != gone])
            self._driver.release(gone)
            self._batches.append(kept)
        elif 0.2 <= event < 0.23:
            batch = self._batches.pop()
            await self._driver.shard.clear_cache(batch.id)
            for id_ in batch.request_ids:
                self._driver.release(id_)

    def _request(self) -> Request:
        """The next request; it depends on the seed and its id only, not on the calls before it."""
        id_ = self._next_id = self._next_id + 1
        chance = random.Random(1000 * id_ + self._seed)
        prompt = random_prompt(chance.choice(LENGTHS), seed=chance.randrange(20))
        stops: Sequence[str] = (f"w{chance.randrange(20)}",) if chance.random() < 0.5 else ()
        stopping = StoppingParameters(chance.randint(1, 14), tuple(stops), chance.random() < 0.5)
        chunk_len = chance.randint(1, len(prompt)) if chance.random() < 0.3 else None
        return self._driver.request(
            id_,
            prompt,
            parameters=chance.choice(KINDS),
            stopping=stopping,
            chunk_len=chunk_len,
            top_n_tokens=chance.choice((0, 0, 2)),
        )

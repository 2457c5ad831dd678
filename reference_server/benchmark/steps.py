"""Times one batch on a model server: its prefill, then its decode steps until every request has its tokens."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from reference_server.errors import ShardError
from reference_server.messages import Batch, CachedBatch, ChooserParameters, Request, StepResult, StoppingParameters
from reference_server.transport.shard import Shard

BATCH_ID = 2**62
"""Of the benchmark's batch: a router counts from zero."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The prompt and parameters of every request. `prompt_text` has at least `prompt_tokens` tokens."""

    prompt_text: str
    prompt_tokens: int
    decode_length: int
    parameters: ChooserParameters = field(default_factory=ChooserParameters)
    top_n_tokens: int = 0

    def batch(self, size: int) -> Batch:
        """`size` equal requests, which do not end before `decode_length` tokens. The model server chooses blocks."""
        stopping = StoppingParameters(self.decode_length, ignore_eos_token=True)
        requests = (
            Request(
                BATCH_ID + row,
                (self.prompt_text,),
                self.prompt_tokens,
                self.parameters,
                stopping,
                top_n_tokens=self.top_n_tokens,
            )
            for row in range(size)
        )
        return Batch(BATCH_ID, tuple(requests))


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Times of one batch of `size` requests with `prompt_tokens` in total.

    `decode_steps` follow the prefill and generate `decode_tokens` in total.
    """

    size: int
    prompt_tokens: int
    prefill_s: float
    decode_s: float
    decode_steps: int
    decode_tokens: int


async def time_batch(
    shard: Shard, load: StepLoad, size: int, clock: Callable[[], float] = time.perf_counter
) -> BatchTimes:
    """Prefill and decode one batch. Raises ShardError, also if the model server generates another number of tokens.

    A batch that is not finished, because of an error or a cancellation, is removed from the model server.
    """
    cached: CachedBatch | None = None
    try:
        started = clock()
        result = await shard.prefill(load.batch(size))
        prefilled = clock()
        cached, first_tokens = result.batch, _tokens_of(result)
        steps = tokens = 0
        while cached is not None:
            result = await shard.decode([cached])
            cached = result.batch
            steps += 1
            tokens += _tokens_of(result)
        decoded = clock()
    except BaseException:
        # The model server may be gone.
        with contextlib.suppress(ShardError):
            await shard.clear_cache(BATCH_ID)
        raise
    if first_tokens + tokens != size * load.decode_length:
        raise ShardError(
            f"the model server generated {first_tokens + tokens} tokens for {size} requests of {load.decode_length}"
        )
    return BatchTimes(size, size * load.prompt_tokens, prefilled - started, decoded - prefilled, steps, tokens)


def _tokens_of(result: StepResult) -> int:
    return sum(len(generation.tokens) for generation in result.generations)

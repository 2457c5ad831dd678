"""One measurement of a grid point: bursts of requests, in turn with bursts of a reference server that keeps running.

A burst of one second varies by more than 10 % on a small virtual machine, and the machine's speed drifts over minutes.
Several bursts of equal work reduce the variation. The reference shows the drift, because its settings never change.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.http_load import WavePrompt, stream

INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS = (64, 256), 32, 40
FIRST_TOKEN, LAST_TOKEN = 16, 2047
WARM_REQUESTS, WARM_LIMIT_S = 4, 1.0
BURST_LIMIT_S = 4.0
"""A longer burst is stopped; only its complete answers count."""
MIN_BURSTS = 2
"""Bursts of a point, at least; the reference has a burst after the first and then after every second one."""


@dataclass(frozen=True, slots=True)
class RequestBurst:
    """Output tokens of complete answers, and seconds until the last of them."""

    tokens: int
    seconds: float
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class PointRates:
    """Output tokens per second of a point and of the reference, and the bursts of the point."""

    tokens_per_s: float
    reference_tokens_per_s: float
    bursts: int
    is_whole: bool


def measure_rates(url: str, reference_url: str, seconds: float) -> PointRates:
    """Bursts for `seconds` of a server that has just started, in turn with those of the reference.

    Raises FailedRequest, OSError.
    """
    asyncio.run(_burst(url, prompts("warm", WARM_REQUESTS), WARM_LIMIT_S))
    own: list[RequestBurst] = []
    reference: list[RequestBurst] = []
    while len(own) < MIN_BURSTS or sum(each.seconds for each in own) < seconds:
        texts = prompts(f"burst {len(own)}", REQUESTS)
        own.append(asyncio.run(_burst(url, texts, BURST_LIMIT_S)))
        if len(own) % 2:
            # New prompts for each burst, because the reference may have the K/V of earlier prompts.
            texts = prompts(f"reference {time.monotonic_ns()}", REQUESTS)
            reference.append(asyncio.run(_burst(reference_url, texts, BURST_LIMIT_S)))
    return PointRates(rate_of(own), rate_of(reference), len(own), all(each.is_whole for each in own))


def rate_of(bursts: Sequence[RequestBurst]) -> float:
    """Tokens per second of all bursts together."""
    return sum(each.tokens for each in bursts) / sum(each.seconds for each in bursts)


def prompts(key: str, count: int) -> list[WavePrompt]:
    """Prompts of evenly spaced lengths in random order, so that all bursts have equal work; their tokens are random."""
    rng = random.Random(key)
    low, high = INPUT_TOKENS
    lengths = [low + round((high - low) * index / max(1, count - 1)) for index in range(count)]
    rng.shuffle(lengths)
    return [
        WavePrompt("", [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)], OUTPUT_TOKENS)
        for length in lengths
    ]


async def _burst(url: str, texts: Sequence[WavePrompt], limit_s: float) -> RequestBurst:
    """Send all prompts at once."""
    started = time.perf_counter()
    calls = [asyncio.create_task(stream(url, "openai", prompt, started)) for prompt in texts]
    done, late = await asyncio.wait(calls, timeout=limit_s)
    for call in late:
        call.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    answers = [call.result() for call in done]
    seconds = limit_s if late else max(each.last_s for each in answers)
    return RequestBurst(sum(each.num_tokens for each in answers), seconds, not late)

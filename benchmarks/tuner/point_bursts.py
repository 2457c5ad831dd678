"""One measurement of a grid point: bursts of requests, and one burst of a reference server that keeps running.

All bursts of a point have equal work. The elapsed time of a burst of one second varies by more than 10 % on a small
virtual machine. The processor time of the server varies less, because other processes add nothing to it; with one
thread and a queue, the server computes all the time, so both times order the points alike. The reference shows the
drift of the machine's speed, because its settings never change.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.http_load import WavePrompt, stream
from loadgen.target.launched.contention import ProcessorTimes

INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS = (64, 256), 32, 20
REFERENCE_REQUESTS = 12
FIRST_TOKEN, LAST_TOKEN = 16, 2047
WARM_REQUESTS, WARM_LIMIT_S = 4, 1.0
BURST_LIMIT_S = 20.0
"""A longer burst is stopped; only its complete answers count."""
MIN_BURSTS = 2
"""Bursts of a point, at least. The reference has one, after the first of the point."""


@dataclass(frozen=True, slots=True)
class BurstServer:
    """A server that runs. pid: its process, for the processor time."""

    url: str
    pid: int | None


@dataclass(frozen=True, slots=True)
class RequestBurst:
    """Output tokens of complete answers, seconds until the last of them, and the processor time of the server."""

    tokens: int
    wall_s: float
    processor_s: float | None
    is_whole: bool = True

    def seconds(self, clock: str) -> float:
        """Elapsed time if the kernel has no processor time."""
        return self.processor_s if clock == "processor" and self.processor_s is not None else self.wall_s


def measure_bursts(
    server: BurstServer, reference: BurstServer, seconds: float, clock: str = "processor"
) -> tuple[list[RequestBurst], list[RequestBurst]]:
    """Bursts for `seconds` of a clock on a server that has just started, and one burst of the reference.

    Raises FailedRequest, OSError.
    """
    asyncio.run(_burst(server, prompts("warm", WARM_REQUESTS), WARM_LIMIT_S))
    own: list[RequestBurst] = []
    others: list[RequestBurst] = []
    while len(own) < MIN_BURSTS or sum(each.seconds(clock) for each in own) < seconds:
        own.append(asyncio.run(_burst(server, prompts(f"burst {len(own)}", REQUESTS))))
        if not others:
            # New prompts for each burst, because the reference may have the K/V of earlier prompts.
            texts = prompts(f"reference {time.monotonic_ns()}", REFERENCE_REQUESTS)
            others.append(asyncio.run(_burst(reference, texts)))
    return own, others


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


async def _burst(server: BurstServer, texts: Sequence[WavePrompt], limit_s: float = BURST_LIMIT_S) -> RequestBurst:
    """Send all prompts at once."""
    before, started = _processor_s(server), time.perf_counter()
    calls = [asyncio.create_task(stream(server.url, "openai", prompt, started)) for prompt in texts]
    done, late = await asyncio.wait(calls, timeout=limit_s)
    for call in late:
        call.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    answers = [call.result() for call in done]
    wall_s = limit_s if late else max(each.last_s for each in answers)
    after = _processor_s(server)
    spent_s = after - before if before is not None and after is not None else None
    return RequestBurst(sum(each.num_tokens for each in answers), wall_s, spent_s, not late)


def _processor_s(server: BurstServer) -> float | None:
    times = ProcessorTimes.of(server.pid) if server.pid is not None else None
    return times.ran_ns / 1e9 if times is not None else None

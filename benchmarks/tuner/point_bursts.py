"""One measurement of a grid point: bursts of requests, and the speed of the core during each of them.

A burst has the same work at every point and in every pass. Its elapsed time includes other processes on the core, and
the processor time of the server does not. Both change with the speed of the core, which a probe measures during the
burst: benchmarks/tuner/core_speed.py.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.peers.http_load import WavePrompt, stream
from benchmarks.tuner.core_speed import CoreSpeed, SpeedProbe
from loadgen.target.launched.contention import ProcessorTimes

INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS = (64, 256), 32, 20
FIRST_TOKEN, LAST_TOKEN = 16, 2047
WARM_REQUESTS, WARM_LIMIT_S = 4, 1.0
BURST_LIMIT_S = 20.0
"""A longer burst is stopped; only its complete answers count."""


@dataclass(frozen=True, slots=True)
class BurstServer:
    """A server that runs. pid: its process, for the processor time."""

    url: str
    pid: int | None


@dataclass(frozen=True, slots=True)
class RequestBurst:
    """Output tokens of complete answers, seconds until the last of them, and the processor time of the server.

    speed: of the server's core during the burst.
    """

    tokens: int
    wall_s: float
    processor_s: float | None
    is_whole: bool = True
    speed: CoreSpeed | None = None


def measure_bursts(server: BurstServer, probe: SpeedProbe, bursts: int) -> list[RequestBurst]:
    """Bursts on a server that has just started. Raises FailedRequest, OSError."""
    asyncio.run(_burst(server, prompts("warm", WARM_REQUESTS), WARM_LIMIT_S))
    found = []
    for number in range(bursts):
        started_ns = time.monotonic_ns()
        burst = asyncio.run(_burst(server, prompts(f"burst {number}", REQUESTS)))
        found.append(replace(burst, speed=probe.between(started_ns, time.monotonic_ns())))
    return found


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

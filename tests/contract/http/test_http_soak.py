"""Soak over a scripted shard: mixed requests, and a third of the clients disconnect at any moment."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.support.servers.serving import Served, serve_on_socket
from tests.support.wire.scripted_shard import Reply

PERMITS = 16
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "a b", "parameters": {"max_new_tokens": 20}}),
    ("/generate_stream", {"inputs": "a b c", "parameters": {"max_new_tokens": 60}}),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 5, "best_of": 2, "do_sample": True}}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 20}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "stream": True}),
    ("/tokenize", {"inputs": "a b c"}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": 5}),
    ("/generate", {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "("}}}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
]


def endless_words(request: Any) -> Reply:
    return Reply(tuple(f" {i}" for i in range(100)))


async def send(served: Served, path: str, body: dict[str, Any], leave_after: int | None) -> int | None:
    """The status of one request on its own connection; None if the client disconnected first."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.client.base_url.port)
    try:
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        if leave_after is not None:
            await reader.read(leave_after)
            return None
        answer = await reader.read()
        return int(answer.split(b" ", 2)[1])
    finally:
        writer.transport.abort() if leave_after is not None else writer.close()


async def soak(count: int, seed: int) -> None:
    chance = random.Random(seed)
    statuses: Counter[int | None] = Counter()
    async with serve_on_socket(script=endless_words, permits=PERMITS) as served:
        tasks_before = len(asyncio.all_tasks())
        turns = asyncio.Semaphore(PERMITS)

        async def one() -> None:
            async with turns:
                path, body = chance.choice(BAD if chance.random() < 0.15 else GOOD)
                leave_after = chance.randrange(1, 2000) if chance.random() < 0.3 else None
                statuses[await send(served, path, body, leave_after)] += 1

        await asyncio.gather(*(one() for _ in range(count)))
        while served.services.infer.permits.free < PERMITS or served.shard.cached_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        while len(asyncio.all_tasks()) > tasks_before:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert (await served.generate(max_new_tokens=1)).status_code == 200
        gauges = [await served.metric(name) for name in ("tgi_queue_size", "tgi_batch_current_size")]

    assert sum(statuses.values()) == count
    assert set(statuses) <= {200, 422, 429, None}
    assert statuses[200] > count / 3
    assert gauges == ["0", "0"]


async def test_reliability_C1_three_hundred_mixed_requests():
    await soak(300, seed=7)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_reliability_C1_two_thousand_mixed_requests():
    await soak(2000, seed=1)

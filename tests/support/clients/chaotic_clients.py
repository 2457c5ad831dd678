"""Clients on raw sockets. Some of them leave: before all is sent, while they wait, or while they read."""

import asyncio
import json
import random
from dataclasses import dataclass

ROUTES = {
    "/generate": {"inputs": "one two three", "parameters": {}},
    "/generate_stream": {"inputs": "one two three four", "parameters": {}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "five six"}], "stream": True},
    "/v1/completions": {"prompt": ["seven", "eight"], "model": "m"},
}
LIMIT_S = 60.0


@dataclass
class Outcomes:
    """The outcome: HTTP statuses of the clients that stayed, and the number of those that left."""

    statuses: list[int]
    num_left: int = 0
    num_cut_short: int = 0
    """Answers of those who stayed that ended before their end."""


async def run(port: int, count: int, concurrency: int, seed: int, leaving: float = 1 / 3) -> Outcomes:
    """Send `count` requests; a share of `leaving` is given up at a random point."""
    rng = random.Random(seed)
    outcomes, turn = Outcomes([]), asyncio.Semaphore(concurrency)

    async def client() -> None:
        async with turn:
            await _one(port, rng, outcomes, leaves=rng.random() < leaving)

    async with asyncio.timeout(LIMIT_S + count / 10):
        await asyncio.gather(*(client() for _ in range(count)))
    return outcomes


async def _one(port: int, rng: random.Random, outcomes: Outcomes, *, leaves: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        request = _request(rng)
        point = rng.random() if leaves else 1.0
        if point < 0.15:
            writer.write(request[: rng.randrange(len(request))])
            await writer.drain()
            outcomes.num_left += 1
            return
        writer.write(request)
        await writer.drain()
        if point < 0.4:
            await asyncio.sleep(rng.random() * 0.02)
            outcomes.num_left += 1
            return
        if leaves:
            await reader.read(rng.randrange(1, 600))
            outcomes.num_left += 1
            if rng.random() < 0.5:
                writer.transport.abort()  # RST in place of FIN
            return
        answer = await reader.read(-1)
        outcomes.statuses.append(int(answer.split(b" ", 2)[1]))
        outcomes.num_cut_short += not _is_whole(answer)
    finally:
        writer.close()


def _request(rng: random.Random) -> bytes:
    route = rng.choice(sorted(ROUTES))
    body = json.loads(json.dumps(ROUTES[route]))
    new_tokens = rng.choice([1, 5, 20, 60])
    if "parameters" in body:
        body["parameters"] = {"max_new_tokens": new_tokens, "ignore_eos_token": True}
    else:
        body["max_tokens"] = new_tokens
    content = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def _is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return len(body) == int(length.split(b":")[1])

"""Behaviour that needs a real connection: separate events, keep-alive, and clients that disconnect."""

import asyncio

from tests.support.servers.serving import endless, serve_on_socket
from tests.support.wire.scripted_shard import ScriptedShard


async def test_tokens_leave_one_by_one():
    turns = asyncio.Semaphore(0)

    async def take_turn(method: str) -> None:
        if method in ("prefill", "decode"):
            await turns.acquire()

    async with serve_on_socket(shard=ScriptedShard(endless, gate=take_turn)) as served:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
        async with served.client.stream("POST", "/generate_stream", json=body) as response:
            lines = response.aiter_lines()
            for index in (1, 2, 3):
                turns.release()
                assert (await anext(lines)).startswith(f'data: {{"index":{index},')
                assert await anext(lines) == ""


async def test_a_client_that_goes_away_frees_its_permit_and_its_place():
    async with serve_on_socket(script=endless) as served:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 1000}}
        async with served.client.stream("POST", "/generate_stream", json=body) as response:
            await anext(response.aiter_lines())
        while served.services.infer.permits.free < 128 or served.shard.cached_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        dropped = await served.metric('tgi_request_failure{err="dropped"}')

    assert dropped == "1"


async def test_a_client_that_gives_up_waiting_is_cancelled_too():
    held = asyncio.Event()

    async def hold(method: str) -> None:
        if method == "prefill":
            await held.wait()

    async with serve_on_socket(shard=ScriptedShard(endless, gate=hold)) as served:
        waiting = asyncio.create_task(served.generate(max_new_tokens=1000))
        while served.services.infer.permits.free == 128:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        waiting.cancel()
        while served.services.infer.permits.free < 128:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        held.set()
        while served.shard.cached_ids or not served.shard.called("prefill"):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

        assert (await served.client.get("/health")).status_code == 200


async def test_too_large_a_body_gets_its_answer():
    async with serve_on_socket() as served:
        response = await served.client.post(
            "/generate", content=b"x" * 2_000_001, headers={"content-type": "application/json"}
        )

    assert response.status_code == 413

"""Refusals of a busy router: the limit of the time in the queue, over HTTP; readiness while it stops."""

import asyncio

import pytest

from reference_server.errors import ShardConnectionError
from reference_server.router.validation.request_rules import GenerationLimits
from tests.support.servers.serving import Served, events_of, serve
from tests.support.wire.scripted_shard import Reply, ScriptedShard

LIMIT_S = 0.05
TEXT = "Model is overloaded: the request waited 0.05 s in the queue, the limit of `max_queue_time`"
NATIVE = {"inputs": "p", "parameters": {"max_new_tokens": 4}}
OPENAI = {"model": "m", "prompt": "p", "messages": [{"role": "user", "content": "p"}], "max_tokens": 4}


class HeldPrefill:
    """Holds the first prefill, so that every later request waits in the queue."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self, method: str) -> None:
        if method == "prefill":
            self.reached.set()
            await self.opened.wait()


async def refused_behind_a_held_prefill(served: Served, held: HeldPrefill, path: str, body: dict[str, object]):
    served.services.infer.max_queue_s = None
    first = asyncio.create_task(served.generate())
    await held.reached.wait()
    served.services.infer.max_queue_s = LIMIT_S
    answer = await served.client.post(path, json=body)
    held.opened.set()
    assert (await first).status_code == 200
    return answer


@pytest.mark.parametrize(
    ("path", "body"), [("/generate", NATIVE), ("/v1/completions", OPENAI), ("/v1/chat/completions", OPENAI)]
)
async def test_a_request_that_waits_too_long_gets_429(path: str, body: dict[str, object]):
    held = HeldPrefill()
    async with serve(shard=ScriptedShard(gate=held), permits=2) as served:
        answer = await refused_behind_a_held_prefill(served, held, path, body)

        assert (answer.status_code, answer.json()) == (429, {"error": TEXT, "error_type": "overloaded"})
        assert await served.metric('tgi_request_failure{err="overloaded"}') == "1"
        assert served.services.infer.permits.free == 2


async def test_a_native_stream_that_waits_too_long_ends_with_the_refusal():
    held = HeldPrefill()
    async with serve(shard=ScriptedShard(gate=held)) as served:
        answer = await refused_behind_a_held_prefill(served, held, "/generate_stream", NATIVE)

    assert answer.status_code == 200
    assert events_of(answer.text) == [{"error": TEXT, "error_type": "overloaded"}]


async def test_a_later_segment_of_a_generation_has_no_limit():
    """The client has read the tokens of the first segment. Its second waits behind a slow step of another request."""
    num_decodes = 0

    async def slow_steps(method: str) -> None:
        nonlocal num_decodes
        num_decodes += method == "decode"
        if 1022 <= num_decodes <= 1028:
            await asyncio.sleep(2 * LIMIT_S)

    shard = ScriptedShard(lambda _: Reply((" x",) * 5000), gate=slow_steps)
    async with serve(shard=shard, limits=GenerationLimits(2048, 4096)) as served:
        long = asyncio.create_task(served.generate(max_new_tokens=1030))
        while not served.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        other = asyncio.create_task(served.generate(max_new_tokens=1024))
        while len(served.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        served.services.infer.max_queue_s = LIMIT_S

        assert [(await each).status_code for each in (long, other)] == [200, 200]
        assert len(served.requests) == 3


async def test_ready_is_200_and_503_once_the_router_stops_while_requests_are_still_served():
    async with serve() as served:
        before = await served.client.get("/ready")
        served.services.drain.has_begun = True
        after = await served.client.get("/ready")
        health, generated = await served.client.get("/health"), await served.generate()

    assert (before.status_code, before.content) == (200, b"")
    assert (after.status_code, after.json()) == (503, {"error": "draining", "error_type": "draining"})
    assert (health.status_code, generated.status_code) == (200, 200)


async def test_ready_is_503_if_the_model_server_is_unhealthy():
    shard = ScriptedShard()
    async with serve(shard=shard) as served:
        shard.failures |= {"health": ShardConnectionError("gone"), "clear_cache": ShardConnectionError("gone")}
        answer = await served.client.get("/ready")

    assert (answer.status_code, answer.json()["error_type"]) == (503, "healthcheck")

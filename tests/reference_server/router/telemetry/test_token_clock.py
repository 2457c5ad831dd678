import asyncio

import pytest

from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.telemetry.token_clock import TokenClock
from reference_server.router.validation.request_rules import GenerationLimits
from tests.support.servers.serving import Served, serve
from tests.support.wire.scripted_shard import Reply, ScriptedShard

MS = 1_000_000
BETWEEN, FIRST = "tgi_request_inter_token_duration", "tgi_request_first_token_duration"


def value(metrics: Metrics, series: str) -> float:
    lines = metrics.render().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{series} "))


async def counts(served: Served) -> list[str | None]:
    return [await served.metric(name) for name in (f"{FIRST}_count", f"{BETWEEN}_count", "tgi_request_success")]


def test_the_first_token_counts_from_arrival_and_each_later_one_from_the_one_before():
    metrics = Metrics(1024, 2048)
    times = TokenClock(metrics, arrived_ns=100 * MS)

    times.on_tokens(1, 350 * MS)
    times.on_tokens(1, 360 * MS)
    times.on_tokens(1, 390 * MS)

    assert (value(metrics, f"{FIRST}_count"), value(metrics, f"{FIRST}_sum")) == (1, 0.25)
    assert (value(metrics, f"{BETWEEN}_count"), value(metrics, f"{BETWEEN}_sum")) == (2, pytest.approx(0.04))


def test_the_gap_before_a_step_is_divided_by_the_tokens_of_the_step():
    metrics = Metrics(1024, 2048)
    times = TokenClock(metrics, arrived_ns=0)

    times.on_tokens(3, 50 * MS)
    times.on_tokens(4, 90 * MS)

    assert (value(metrics, f"{BETWEEN}_count"), value(metrics, f"{BETWEEN}_sum")) == (4, pytest.approx(0.04))
    assert value(metrics, f'{BETWEEN}_bucket{{le="0.008649755859375"}}') == 0
    assert value(metrics, f'{BETWEEN}_bucket{{le="0.0129746337890625"}}') == 4


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"])
async def test_every_route_observes_a_first_token_and_the_later_ones(path: str):
    native = {"inputs": "p", "parameters": {"max_new_tokens": 4}}
    openai = {"model": "m", "prompt": "p", "messages": [{"role": "user", "content": "p"}], "max_tokens": 4}
    async with serve() as served:
        answer = await served.client.post(path, json=openai if path.startswith("/v1") else native)

        assert answer.status_code == 200
        assert await counts(served) == ["1", "3", "1"]


async def test_a_generation_of_several_segments_has_one_first_token():
    shard = ScriptedShard(lambda _: Reply((" x",) * 5000))
    async with serve(shard=shard, limits=GenerationLimits(2048, 4096)) as served:
        await served.generate(max_new_tokens=1030)

        assert len(served.requests) == 2
        assert await counts(served) == ["1", "1029", "1"]


async def test_a_request_that_is_refused_has_no_first_token():
    async with serve(permits=0) as served:
        assert (await served.generate()).status_code == 429

        assert await counts(served) == [None, None, None]


async def test_the_first_token_of_a_slow_prefill_counts_although_the_request_has_not_finished():
    reached, opened = asyncio.Event(), asyncio.Event()

    async def hold_decode(method: str) -> None:
        if method == "decode":
            reached.set()
            await opened.wait()

    async with serve(shard=ScriptedShard(gate=hold_decode)) as served:
        request = asyncio.create_task(served.generate())
        await reached.wait()
        while await served.metric(f"{FIRST}_count") is None:  # noqa: ASYNC110
            await asyncio.sleep(0)

        assert await counts(served) == ["1", None, None]
        opened.set()
        assert (await request).status_code == 200

"""Faults that the router handles: clients that disconnect, too many clients, and incompatible model servers."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection

from reference_server.configuration.common_config import Transport
from reference_server.errors import GenerationError, ShardConnectionError, ShardError
from reference_server.messages import Batch, CachedBatch, StepResult, WarmupReply, WarmupRequest
from reference_server.router.batching import Batcher
from reference_server.router.liveness import LIVENESS_ID
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.validation.token_limits import ConfiguredLimits, warmup_request
from reference_server.transport.client import connect
from reference_server.transport.service import ShardService
from reference_server.transport.wire_schema import load_pool, load_schema
from tests.support.servers.serving import endless, serve
from tests.support.wire.scripted_shard import ScriptedShard, say
from tests.support.wire.valid_requests import valid_request
from tests.support.wire.wire_shard import served, serving_over, socket_urls

FOREIGN_LIMIT = 4 << 20


@asynccontextmanager
async def foreign_server(shard: ScriptedShard, path: Path, version: str) -> AsyncIterator[str]:
    """A foreign model server: one schema only, and the default message limit of its grpc library."""
    url = f"unix://{path}"
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", FOREIGN_LIMIT)])
    schema = load_schema(version)
    server.add_generic_rpc_handlers([ShardService(shard, [url]).handlers(schema)])
    reflection.enable_server_reflection([schema.service, reflection.SERVICE_NAME], server, load_pool())
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        yield url
    finally:
        await server.stop(None)


@asynccontextmanager
async def batching(
    shard: object,
    now_ns: Callable[[], int] = time.perf_counter_ns,
    warm_up: Callable[[], Awaitable[object]] | None = None,
) -> AsyncIterator[Batcher]:
    options = SchedulerOptions(
        max_batch_prefill_tokens=4096,
        max_batch_total_tokens=1 << 16,
        supports_chunking=True,
        use_prefix_caching=True,
    )
    batcher = Batcher(shard, Scheduler(options), now_ns=now_ns, warm_up=warm_up)  # type: ignore[arg-type]
    loop = asyncio.create_task(batcher.run())
    try:
        yield batcher
    finally:
        loop.cancel()
        await asyncio.wait([loop])


async def test_reliability_F14_a_waiting_request_whose_client_disconnects_never_reaches_the_shard():
    opened = asyncio.Event()

    async def hold(method: str) -> None:
        if method == "decode":
            await opened.wait()

    async with serve(shard=ScriptedShard(endless, gate=hold), permits=3) as served:
        infer = served.services.infer
        running = asyncio.create_task(served.generate(max_new_tokens=4))
        while not served.shard.called("decode"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        waiting = asyncio.create_task(served.generate(max_new_tokens=4))
        while served.scheduler.queue_size == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

        assert infer.permits.free == 2
        opened.set()
        assert (await running).status_code == 200
        assert len(served.requests) == 1
        assert await served.metric('tgi_request_failure{err="dropped"}') == "1"


async def test_reliability_F19_ten_times_the_permitted_requests_are_answered_200_or_429():
    opened = asyncio.Event()

    async def hold(method: str) -> None:
        if method == "prefill":
            await opened.wait()

    async with serve(shard=ScriptedShard(say("a"), gate=hold), permits=20) as served:
        herd = [asyncio.create_task(served.generate()) for _ in range(200)]
        # Refusals arrive before any accepted request is answered.
        while sum(each.done() for each in herd) < 180:  # noqa: ASYNC110
            await asyncio.sleep(0)
        opened.set()
        statuses = Counter([(await each).status_code for each in herd])

        assert statuses == {200: 20, 429: 180}
        assert served.services.infer.permits.free == 20


async def test_reliability_F23_a_queue_of_abandoned_requests_is_skipped_in_one_batch_formation():
    opened = asyncio.Event()

    async def hold(method: str) -> None:
        if method == "prefill":
            await opened.wait()

    shard = ScriptedShard(say("a"), gate=hold)
    async with batching(shard) as batcher:
        first = batcher.submit(valid_request(4, 2))
        while not shard.called("prefill"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        abandoned = [batcher.submit(valid_request(4, 2)) for _ in range(2000)]
        last = batcher.submit(valid_request(4, 2))
        for stream in abandoned:
            stream.close()
        opened.set()
        await asyncio.gather(*(_read(stream) for stream in (first, last)))

    prefilled = [len(batch.requests) for batch, _ in shard.called("prefill")]
    assert sum(prefilled) == 2
    assert len(prefilled) <= 2


@pytest.mark.parametrize("version", ["v3", "v2"])
async def test_reliability_F30_a_message_over_the_shards_limit_fails_its_batch_only(tmp_path: Path, version: str):
    shard = ScriptedShard(say("a"))
    async with foreign_server(shard, tmp_path / "s", version) as url:
        group = await connect(url, version)
        async with batching(group) as batcher:
            big = batcher.submit(valid_request(4, 2, chunks=("x" * (FOREIGN_LIMIT + 1),)))
            with pytest.raises(GenerationError, match=rf"larger than max \(\d+ vs\. {FOREIGN_LIMIT}\)"):
                await _read(big)
            assert await _read(batcher.submit(valid_request(4, 2))) == 2
            assert await batcher.health()
        await group.close()


async def test_reliability_F31_a_wrong_schema_is_refused_with_the_schemas_offered(tmp_path: Path):
    async with foreign_server(ScriptedShard(), tmp_path / "s", "v2") as url:
        wanted, offered = "generate.v3.TextGenerationService", "generate.v2.TextGenerationService"
        with pytest.raises(ShardConnectionError, match=f"lacks the interface {wanted}; it offers {offered}$"):
            await connect(url, "v3")


@pytest.mark.parametrize("transport", ["grpc", "link"])
async def test_hardening_R3_health_is_answered_while_a_step_computes(tmp_path: Path, transport: Transport):
    computing, opened = asyncio.Event(), asyncio.Event()

    async def hold(method: str) -> None:
        if method == "decode":
            computing.set()
            await opened.wait()

    shard = ScriptedShard(say("a", "b"), gate=hold)
    async with (
        served([shard], socket_urls(tmp_path), transport=transport) as group,
        # The clock stands still: the reply to the prefill is a recent proof.
        batching(group, now_ns=lambda: 0) as batcher,
    ):
        reading = asyncio.create_task(_read(batcher.submit(valid_request(4, 2))))
        await computing.wait()
        healthy = await batcher.health()
        opened.set()

        assert await reading == 2

    assert healthy
    assert not shard.called("health")


class ColdShard(ScriptedShard):
    """A shard of a new process: it refuses requests until it is warmed up, and has no K/V of an earlier process."""

    is_warm = False

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        self.is_warm = True
        return await super().warmup(request)

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        if not self.is_warm:
            raise ShardError("Prefill before Warmup")
        return await super().prefill(batch, cached)


@pytest.mark.parametrize("first", ["a request", "a health check"])
@pytest.mark.parametrize("transport", ["grpc", "link"])
async def test_hardening_R21_an_idle_shard_that_restarted_is_warmed_up_before_it_serves(
    tmp_path: Path, transport: Transport, first: str
):
    url, prompt = socket_urls(tmp_path)[0], tuple(range(40))
    warmup, clock = warmup_request(ConfiguredLimits(256, max_total_tokens=512)), iter(range(0, 10**15, 2 * 10**9))
    async with AsyncExitStack() as later:
        old, new = ColdShard(say("a")), ColdShard(say("b"))
        async with serving_over(transport, old, url, [url]):
            group = await connect(url, transport=transport)
            later.push_async_callback(group.close)
            await group.warmup(warmup)
            batcher = await later.enter_async_context(
                batching(group, lambda: next(clock), warm_up=lambda: group.warmup(warmup))
            )
            for _ in range(2):
                await _read(batcher.submit(valid_request(40, 4, ids=prompt)))
        async with serving_over(transport, new, url, [url]):
            if first == "a health check":
                assert await batcher.health()
            served = [await _read(batcher.submit(valid_request(40, 4, ids=prompt))) for _ in range(2)]

    def cached_tokens(shard: ScriptedShard) -> list[int]:
        batches = [batch for batch, _ in shard.called("prefill") if batch.id != LIVENESS_ID]
        return [request.cache_len for batch in batches for request in batch.requests]

    assert served == [2, 2]
    assert len(new.called("warmup")) == 1
    assert cached_tokens(old)[0] == 0 < cached_tokens(old)[1]
    assert cached_tokens(new) == cached_tokens(old)


async def _read(stream: object) -> int:
    return sum([1 async for _ in stream])  # type: ignore[attr-defined]

"""The link between router and model server is cut and restored under load: clear errors, recovery, no hang."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from reference_server.errors import GenerationError, ShardConnectionError
from reference_server.router.batching import Batcher
from reference_server.router.generation_stream import TokenArrived
from reference_server.router.infer import Infer
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.validation.validator import GenerateCall
from reference_server.transport.client import connect
from tests.support.clients.mixed_load import MODEL, mixed_calls, router_over
from tests.support.servers.model_servers import ModelServers, model_servers
from tests.support.servers.relay import relay_to
from tests.support.wire.scripted_shard import Reply, ScriptedShard, say
from tests.support.wire.valid_requests import valid_request

KEEPALIVE_S = 2.0
NUM_REQUESTS = 200
CONCURRENCY = 16
CUT_AFTER = 60
FLAGS = ("--dtype", "float32", "--cpu-memory-gib", "0.06", "--prefix-caching", "true")


@dataclass
class Link:
    """A model server, its address for the router, and functions that cut and restore the link."""

    servers: ModelServers
    address: str
    cut: Callable[[], Awaitable[None]]
    mend: Callable[[], Awaitable[None]]


@asynccontextmanager
async def two_loopback_addresses() -> AsyncIterator[Link]:
    with model_servers(MODEL, *FLAGS, tcp=True, host="127.0.0.2") as servers:
        host, port = servers.addresses[0].removeprefix("tcp://").split(":")
        async with relay_to(host, int(port)) as relay:

            async def cut() -> None:
                relay.cut()

            async def mend() -> None:
                relay.mend()

            yield Link(servers, relay.address, cut, mend)


async def ip(*words: str) -> None:
    await asyncio.to_thread(subprocess.run, ["ip", *words], check=True, capture_output=True)


@asynccontextmanager
async def two_network_namespaces() -> AsyncIterator[Link]:
    """The model server in a namespace of its own, a pair of virtual interfaces between it and the router."""
    name, near, far = (f"tgib{os.getpid() % 100_000}{end}" for end in "nab")
    try:
        await ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    try:
        try:
            await ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no virtual interfaces can be made here: {error}")
        await ip("addr", "add", "198.18.7.1/30", "dev", near)
        await ip("-n", name, "addr", "add", "198.18.7.2/30", "dev", far)
        await ip("link", "set", near, "up")
        await ip("-n", name, "link", "set", far, "up")
        await ip("-n", name, "link", "set", "lo", "up")
        inside = ("ip", "netns", "exec", name)
        with model_servers(MODEL, *FLAGS, tcp=True, host="198.18.7.2", prefix=inside) as servers:
            yield Link(
                servers,
                servers.addresses[0],
                cut=lambda: ip("-n", name, "link", "set", far, "down"),
                mend=lambda: ip("-n", name, "link", "set", far, "up"),
            )
    finally:
        await ip("netns", "del", name)


@dataclass
class Outcomes:
    """Tokens of the answered requests and errors of the failed ones, by request number."""

    answered: dict[int, tuple[int, ...]]
    failed: dict[int, str]

    @property
    def count(self) -> int:
        return len(self.answered) + len(self.failed)


async def load(infer: Infer, calls: list[GenerateCall], link: Link) -> Outcomes:
    """Clients that pause after an error until the router is healthy. The first error restores the link."""
    outcomes, waiting = Outcomes({}, {}), iter(range(NUM_REQUESTS))

    async def client() -> None:
        for number in waiting:
            try:
                answer = await infer.generate(calls[number % len(calls)])
                outcomes.answered[number] = tuple(token.id for token in answer.tokens)
            except GenerationError as error:
                outcomes.failed[number] = str(error)
                if len(outcomes.failed) == 1:
                    await link.mend()
                while not await infer.batcher.health():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            if outcomes.count == CUT_AFTER:
                await link.cut()

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(client())
    return outcomes


@pytest.mark.parametrize("failing", ["prefill", "decode", "filter_batch", "clear_cache"])
async def test_a_lost_call_of_any_kind_ends_its_batch_and_clears_the_cache_before_the_next_prefill(failing):
    shard = ScriptedShard(lambda request: Reply(("a",) * (1 + 8 * request.id)))
    shard.failures[failing] = ShardConnectionError("the link is down")
    if failing == "prefill":
        # Else the router connects again at once, and no request fails.
        shard.failures["clear_cache"] = ShardConnectionError("the link is still down")
    scheduler = Scheduler(SchedulerOptions(max_batch_prefill_tokens=256, max_batch_total_tokens=1024))
    batcher = Batcher(shard, scheduler)
    loop = asyncio.create_task(batcher.run())

    async def read(entry_id: int) -> object:
        stream = batcher.submit(valid_request(4, 9))
        async for event in stream:
            if failing == "clear_cache" and isinstance(event, TokenArrived):
                stream.close()  # the batch becomes empty
        return entry_id

    outcomes = await asyncio.gather(read(0), read(1), return_exceptions=True)
    calls_before = len(shard.calls)
    shard.script = say("b")
    again = [event async for event in batcher.submit(valid_request(4, 2))]
    loop.cancel()
    await asyncio.wait([loop])

    assert failing == "clear_cache" or isinstance(outcomes[1], GenerationError)
    assert len(again) == 2
    later = shard.calls[calls_before:]
    assert ("clear_cache", (None,)) in later[: [name for name, _ in later].index("prefill")]
    assert not shard.cached_ids


@pytest.mark.parametrize(
    ("between", "version"),
    [
        pytest.param(two_loopback_addresses, "v3", marks=pytest.mark.slow),
        pytest.param(two_network_namespaces, "v3", marks=pytest.mark.slow),
        pytest.param(two_loopback_addresses, "v2", marks=pytest.mark.slow),
    ],
)
async def test_a_cut_link_fails_only_the_running_requests(between, version):
    if between is two_network_namespaces and (os.geteuid() != 0 or shutil.which("ip") is None):
        pytest.skip("network namespaces need root and the ip command")
    calls = mixed_calls(50)
    async with between() as link:
        await (await link.servers.connect(version)).close()
        group = await connect(link.address, version, keepalive_s=KEEPALIVE_S)
        async with router_over(group, version) as router:
            outcomes = await load(router.infer, calls, link)
            after = [await router.infer.generate(calls[number]) for number in range(10)]
            allocator = getattr(router.scheduler.queue.admission, "allocator", None)
            while router.scheduler.entries:  # noqa: ASYNC110
                await asyncio.sleep(0)
            series = router.metrics.render().decode().splitlines()
        await group.close()

    # Requests in the batch and those sent while the link was down fail with the same error.
    assert outcomes.count == NUM_REQUESTS
    assert 1 <= len(outcomes.failed) < 60
    text = "Request failed during generation: Could not connect to Text Generation server: "
    assert all(error.startswith(text) for error in outcomes.failed.values())
    # No other request lost, repeated or changed a token.
    first: dict[int, tuple[int, ...]] = {}
    for number, ids in sorted(outcomes.answered.items()):
        assert first.setdefault(number % len(calls), ids) == ids
    assert [tuple(token.id for token in answer.tokens) for answer in after] == [
        first.get(number, tuple(token.id for token in after[number].tokens)) for number in range(10)
    ]
    assert {"tgi_queue_size 0", "tgi_batch_current_size 0"} <= set(series)
    if allocator is not None:
        assert len(allocator.free_blocks) + allocator.trie.num_blocks == allocator.capacity

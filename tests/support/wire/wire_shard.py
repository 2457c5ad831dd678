"""Shards on a real wire, gRPC or the link, for tests of either end."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from reference_server.configuration.common_config import Transport
from reference_server.transport.address import tcp_url, unix_url
from reference_server.transport.client import connect
from reference_server.transport.service import ShardService, serving
from reference_server.transport.shard import Shard, ShardGroup
from tests.support.servers.ports import free_port
from tests.support.wire.blocking_shard import compute_thread


def socket_urls(directory: Path, count: int = 1) -> list[str]:
    return [unix_url(f"{directory}/shard-{rank}") for rank in range(count)]


def tcp_urls(count: int = 1) -> list[str]:
    return [tcp_url(f"127.0.0.1:{free_port()}") for _ in range(count)]


@asynccontextmanager
async def serving_over(
    transport: Transport, shard: Shard, url: str, group: Sequence[str]
) -> AsyncIterator[ShardService]:
    """Serve one shard over gRPC, and with `link` over the link too."""
    async with AsyncExitStack() as stack:
        thread = None
        if transport == "link":
            # A `LocalShard` has a thread; its import would load torch for tests without a model.
            thread = getattr(shard, "thread", None) or stack.enter_context(compute_thread(shard))
        yield await stack.enter_async_context(serving(shard, url, group, thread))


@asynccontextmanager
async def served(
    shards: Sequence[Shard], urls: Sequence[str], version: str = "v3", transport: Transport = "grpc"
) -> AsyncIterator[ShardGroup]:
    """The group of `shards`, each served at its url and reached through the first of them."""
    async with AsyncExitStack() as stack:
        for shard, url in zip(shards, urls, strict=True):
            await stack.enter_async_context(serving_over(transport, shard, url, urls))
        group = await connect(urls[0], version, transport)
        stack.push_async_callback(group.close)
        yield group

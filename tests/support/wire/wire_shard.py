"""Scripted shards on a real wire, for tests of either end."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from reference_server.transport.address import tcp_url, unix_url
from reference_server.transport.client import connect
from reference_server.transport.service import serving
from reference_server.transport.shard import Shard, ShardGroup
from tests.support.servers.ports import free_port


def socket_urls(directory: Path, count: int = 1) -> list[str]:
    return [unix_url(f"{directory}/shard-{rank}") for rank in range(count)]


def tcp_urls(count: int = 1) -> list[str]:
    return [tcp_url(f"127.0.0.1:{free_port()}") for _ in range(count)]


@asynccontextmanager
async def served(shards: Sequence[Shard], urls: Sequence[str], version: str = "v3") -> AsyncIterator[ShardGroup]:
    """The group of `shards`, each served at its url and reached through the first of them."""
    async with AsyncExitStack() as stack:
        for shard, url in zip(shards, urls, strict=True):
            await stack.enter_async_context(serving(shard, url, urls))
        group = await connect(urls[0], version)
        stack.push_async_callback(group.close)
        yield group

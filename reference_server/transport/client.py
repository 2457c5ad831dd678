"""`connect` finds all shards of a model and connects to each: over the link where it is offered, else over gRPC."""

import logging
from collections.abc import Sequence

from reference_server.configuration.common_config import Transport
from reference_server.errors import ShardConnectionError, ShardError
from reference_server.transport.address import is_tcp, socket_path, tcp_url
from reference_server.transport.grpc_channel import KEEPALIVE_S, GrpcChannel
from reference_server.transport.link_channel import LinkChannel
from reference_server.transport.remote_shard import RemoteShard
from reference_server.transport.shard import ShardGroup, lowest_limits, lowest_present_limits

logger = logging.getLogger(__name__)


async def connect(
    addresses: str | Sequence[str],
    version: str = "v3",
    transport: Transport = "auto",
    keepalive_s: float = KEEPALIVE_S,
) -> ShardGroup:
    """Connect to every shard of the model whose rank 0 is at the first address.

    An address is a socket path, `unix://path` or `tcp://host:port`. Several addresses are the whole group in rank order
    and must equal the first shard's ServiceDiscovery, which is a gRPC call. `version` is one of `wire_schema.VERSIONS`.
    A single shard is called at the given address, even if it reports another one.
    Raises `ShardConnectionError`. The caller closes the group.
    """
    requested = [addresses] if isinstance(addresses, str) else list(addresses)
    shards: list[RemoteShard] = []

    async def close() -> None:
        for shard in shards:
            await shard.close()

    try:
        for url in await _discovered(requested, version):
            channel = await _channel(url, version, transport, keepalive_s)
            shards.append(RemoteShard(channel))
            is_lone_link = len(shards) == 1 and isinstance(channel, LinkChannel)
    except ShardError:
        await close()
        raise
    lowest = lowest_present_limits if version == "v2" else lowest_limits
    # A lone link writes a request when it is called. gRPC and the calls of several ranks start tasks.
    return ShardGroup(shards, lowest, close, turns_to_send=0 if is_lone_link else 2)


async def _channel(url: str, version: str, transport: Transport, keepalive_s: float) -> GrpcChannel | LinkChannel:
    if transport == "link" and (is_tcp(url) or version != "v3"):
        raise ShardConnectionError(
            f"no link to the model server at {url}: it needs a unix socket and schema v3; set `--transport auto`"
        )
    if transport == "link":
        return await LinkChannel.open(url)
    if transport == "auto" and not is_tcp(url) and version == "v3" and LinkChannel.is_offered(url):
        try:
            return await LinkChannel.open(url)
        except ShardConnectionError as error:
            logger.warning("using gRPC: %s", error)
    return await GrpcChannel.open(url, version, keepalive_s)


async def _discovered(addresses: list[str], version: str) -> list[str]:
    master = await GrpcChannel.open(addresses[0], version)
    try:
        urls = await master.discover()
    finally:
        await master.close()
    if len(addresses) > 1 and [_canonical(url) for url in urls] != [_canonical(url) for url in addresses]:
        raise ShardConnectionError(f"the model server at {addresses[0]} reports the group {urls}, expected {addresses}")
    return addresses if len(addresses) == len(urls) else urls


def _canonical(address: str) -> str:
    """The same text for spellings of the same address."""
    return tcp_url(address) if is_tcp(address) else socket_path(address)

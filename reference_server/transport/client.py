"""`GrpcShard`: a shard at the other end of a channel, and `connect`, which finds all shards of a model.

Calls have no deadline: a step takes as long as it takes. A shard that is gone closes its end, and where the link itself
can go, over TCP, pings find out. A channel reconnects by itself when the next call is made.
"""

from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection_pb2

from reference_server.errors import ShardConnectionError, ShardError
from reference_server.messages import Batch, CachedBatch, ModelInfo, StepResult, WarmupReply, WarmupRequest
from reference_server.transport.address import UNIX, grpc_target, is_tcp, socket_path, tcp_url
from reference_server.transport.codec import WireCodec
from reference_server.transport.schema import Message, Schema, load_schema
from reference_server.transport.shard import ShardGroup, lowest_limits, lowest_present_limits

MAX_MESSAGE_BYTES = 2**31 - 1
REFLECTION_METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
KEEPALIVE_S = 20.0
"""How long a TCP link may be silent before it is pinged, and then how long the answer may take."""

# The authority is a dummy because a socket path is no host name. A proxy from the environment is not for these calls,
# and a channel of its own keeps one client's reconnection pauses from another.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.min_reconnect_backoff_ms", 5000),  # which is how long an attempt may take, 20 s if not said
)


async def connect(addresses: str | Sequence[str], version: str = "v3", keepalive_s: float = KEEPALIVE_S) -> ShardGroup:
    """Reach every shard of the model whose rank 0 is at the first address.

    An address is a socket path, `unix://path` or `tcp://host:port`. Several are the whole group in rank order and must
    be what the first one's ServiceDiscovery says. `version` is one of `schema.VERSIONS`; nothing is negotiated.
    A single shard over TCP is reached where it was found, whatever name it has for itself.
    Raises `ShardConnectionError`. Close the group when done.
    """
    given = [addresses] if isinstance(addresses, str) else list(addresses)
    shards: list[GrpcShard] = []

    async def close() -> None:
        for shard in shards:
            await shard.close()

    try:
        for url in await _discovered(given, version):
            shards.append(await GrpcShard.open(url, version, keepalive_s))  # noqa: PERF401  # one refused, the earlier ones are closed
    except ShardError:
        await close()
        raise
    return ShardGroup(shards, lowest_present_limits if version == "v2" else lowest_limits, close)


async def _discovered(given: list[str], version: str) -> list[str]:
    master = await GrpcShard.open(given[0], version)
    try:
        urls = await master.discover()
    finally:
        await master.close()
    if len(given) > 1 and [_canonical(url) for url in urls] != [_canonical(url) for url in given]:
        raise ShardConnectionError(f"the model server at {given[0]} names the group {urls}, expected {list(given)}")
    return given if len(given) == len(urls) else urls


def _canonical(address: str) -> str:
    """One spelling for what is the same address."""
    return tcp_url(address) if is_tcp(address) else socket_path(address)


class GrpcShard:
    """`Shard` over a channel of `grpc.aio`."""

    def __init__(self, address: str, channel: grpc.aio.Channel, schema: Schema) -> None:
        self.address = address
        self._channel = channel
        self._messages = schema.messages
        self._service = schema.service
        self._codec = WireCodec(schema)
        self._block_size: int | None = None
        self._stubs = {
            name: channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            for name, method in schema.methods.items()
        }

    @classmethod
    async def open(cls, address: str, version: str = "v3", keepalive_s: float = KEEPALIVE_S) -> "GrpcShard":
        """Dial `address` and wait until the transport stands. Raises `ShardConnectionError` when it is refused."""
        options = CHANNEL_OPTIONS + (_keepalive(keepalive_s) if is_tcp(address) else ())
        channel = grpc.aio.insecure_channel(grpc_target(address), options=options)
        is_connected = False
        try:
            is_connected = await _has_connected(channel)
        finally:
            if not is_connected:
                await channel.close(None)
        if not is_connected:
            raise ShardConnectionError(f"could not connect to the model server at {address}")
        return cls(address, channel, load_schema(version))

    async def close(self) -> None:
        await self._channel.close(None)

    async def discover(self) -> list[str]:
        """Addresses of the whole group, in rank order."""
        reply = await self._call("ServiceDiscovery", self._messages["ServiceDiscoveryRequest"]())
        if not reply.urls:
            raise ShardConnectionError(f"the model server at {self.address} names no shard")
        return [url.removeprefix(UNIX) for url in reply.urls]

    async def info(self) -> ModelInfo:
        info = self._codec.decode_info(await self._call("Info", self._messages["InfoRequest"]()))
        self._block_size = info.block_size
        return info

    async def health(self) -> None:
        await self._call("Health", self._messages["HealthRequest"]())

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        message = self._codec.encode_warmup_request(request, await self._known_block_size())
        return self._codec.decode_warmup_reply(await self._call("Warmup", message), request)

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        block_size = await self._known_block_size()
        try:
            message = self._codec.encode_prefill_request(batch, cached, block_size)
        except ValueError as error:
            raise ShardError(f"a request cannot be sent: {error}") from error
        return self._codec.decode_step(await self._call("Prefill", message))

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        return self._codec.decode_step(await self._call("Decode", self._codec.encode_decode_request(batches)))

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        message = self._messages["FilterBatchRequest"](batch_id=batch_id, request_ids=request_ids)
        return self._codec.decode_cached((await self._call("FilterBatch", message)).batch)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        kind = self._messages["ClearCacheRequest"]
        await self._call("ClearCache", kind() if batch_id is None else kind(id=batch_id))

    async def _known_block_size(self) -> int:
        return self._block_size or (await self.info()).block_size

    async def _call(self, method: str, request: Message) -> Message:
        try:
            return await self._stubs[method](request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                offered = await self._offered()
                raise ShardConnectionError(
                    f"the model server at {self.address} lacks the interface {self._service}; "
                    f"{'it offers ' + offered if offered else 'it does not say what it offers'}"
                ) from error
            raise self._translated(error) from error

    async def _offered(self) -> str:
        """The services that the other end's reflection lists."""
        ask = self._channel.stream_stream(
            REFLECTION_METHOD,
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        try:
            replies = [reply async for reply in ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))]
        except grpc.aio.AioRpcError:
            return ""
        names = [service.name for reply in replies for service in reply.list_services_response.service]
        return ", ".join(name for name in names if not name.startswith("grpc.reflection."))

    def _translated(self, error: grpc.aio.AioRpcError) -> ShardError:
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
                return ShardConnectionError(f"the model server at {self.address} cannot be reached: {details}")
            case _:
                return ShardError(details)


def _keepalive(limit_s: float) -> tuple[tuple[str, int], ...]:
    # The answer's limit has two names; grpc waits for the longer one.
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return tuple((name, round(limit_s * 1000)) for name in names)


async def _has_connected(channel: grpc.aio.Channel) -> bool:
    """Whether the first attempt to connect succeeds."""
    state = channel.get_state(try_to_connect=True)
    while state not in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
    return state is grpc.ChannelConnectivity.READY

"""`GrpcChannel`: the router's end of a shard's gRPC service.

Calls have no deadline: the router limits steps. A shard that ends closes its socket; over TCP, keepalive pings detect a
broken link. If the connection ended between calls, the shard may be a new process: the next call fails, and the one
after it connects again.
"""

import asyncio
from contextlib import suppress

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection_pb2

from reference_server.errors import ShardConnectionError, ShardError
from reference_server.transport.address import UNIX, grpc_target, is_tcp
from reference_server.transport.wire_schema import Message, WireSchema, load_schema

MAX_MESSAGE_BYTES = 2**31 - 1
LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Statuses of calls whose connection has ended or could not be made."""
REFLECTION_METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
CLOSING_S = 1.0
"""Longest time from the end of a connection until the channel has closed it."""
KEEPALIVE_S = 20.0
"""Idle time before a TCP link is pinged, and the time limit of the answer."""

# A socket path is not a host name, so the authority is a dummy. Proxies of the environment are ignored. With its own
# subchannel pool, a client does not share the reconnection backoff of another. This end closes no idle connection, so a
# connection that ended was ended by the shard.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.min_reconnect_backoff_ms", 5000),  # also the limit of an attempt; the default is 20 s
)


class GrpcChannel:
    """`WireChannel` over `grpc.aio`."""

    def __init__(self, address: str, channel: grpc.aio.Channel, schema: WireSchema) -> None:
        self.address = address
        self.schema = schema
        self._channel = channel
        self._is_connected = True
        self._stubs = {
            name: channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            for name, method in schema.methods.items()
        }

    @classmethod
    async def open(cls, address: str, version: str = "v3", keepalive_s: float = KEEPALIVE_S) -> "GrpcChannel":
        """Connect to `address`. Raises `ShardConnectionError` if it is refused."""
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
        reply = await self.call("ServiceDiscovery", self.schema.messages["ServiceDiscoveryRequest"]())
        if not reply.urls:
            raise ShardConnectionError(f"the model server at {self.address} reports no shard")
        return [url.removeprefix(UNIX) for url in reply.urls]

    async def call(self, method: str, request: Message) -> Message:
        if not self._is_connected:
            await self._leave_lost_connection()
        elif self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            self._is_connected = False
            raise ShardConnectionError(
                f"the model server at {self.address} cannot be reached: it closed the connection"
            )
        try:
            metadata = trace_metadata(request) if method == "Prefill" else None
            reply = await self._stubs[method](request, metadata=metadata)
            self._is_connected = True
            return reply
        except grpc.aio.AioRpcError as error:
            self._is_connected = error.code() not in LOST
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                offered = await self._offered()
                raise ShardConnectionError(
                    f"the model server at {self.address} lacks the interface {self.schema.service}; "
                    f"{'it offers ' + offered if offered else 'what it offers is unknown'}"
                ) from error
            raise self._translated(error) from error

    async def _leave_lost_connection(self) -> None:
        """Wait until the channel has closed a connection that failed a call: it may take another call until then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

    async def _offered(self) -> str:
        """The services in the server's reflection, joined; empty if there is none."""
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
        if error.code() in LOST:
            return ShardConnectionError(f"the model server at {self.address} cannot be reached: {details}")
        return ShardError(details)


def trace_metadata(request: Message) -> tuple[tuple[str, str]] | None:
    """The trace parent of a prefill's first traced request. Shards of TGI read it from the metadata of a call."""
    traced = (each.traceparent for each in request.batch.requests if each.HasField("traceparent"))
    first = next(traced, None)
    return None if first is None else (("traceparent", first),)


def _keepalive(limit_s: float) -> tuple[tuple[str, int], ...]:
    # The limit of the answer has two names; gRPC uses the longer one.
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return tuple((name, round(limit_s * 1000)) for name in names)


async def _has_connected(channel: grpc.aio.Channel) -> bool:
    """Whether the first connection attempt succeeds."""
    state = channel.get_state(try_to_connect=True)
    while state not in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
    return state is grpc.ChannelConnectivity.READY

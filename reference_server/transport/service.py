"""Serves a `Shard` over gRPC: both schemas and reflection on one unix socket or TCP endpoint.

Calls run one at a time, in order of arrival; a shard computes in its own thread, so the event loop stays free. An
exception becomes status INTERNAL with its text. A `RuntimeError` of the shard comes from the forward pass, a collective
or the device: its reply is sent, and then the process must end.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from reference_server.errors import StartupError
from reference_server.transport.address import grpc_target, is_loopback, is_tcp, socket_path
from reference_server.transport.codec import WireCodec
from reference_server.transport.compute_thread import ComputeThread
from reference_server.transport.link import link_path
from reference_server.transport.link_service import serving_link
from reference_server.transport.shard import Shard
from reference_server.transport.socket_file import new_socket_file
from reference_server.transport.wire_calls import WIRE_CALLS, error_text
from reference_server.transport.wire_schema import VERSIONS, Message, Method, WireSchema, load_pool, load_schema

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 2**31 - 1
REPLY_GRACE_S = 1.0
"""Time to send the reply of a failed step before the process ends."""

# Without SO_REUSEPORT a port in use is an error. A router may ping often during a long step.
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
)


@asynccontextmanager
async def serving(
    shard: Shard, url: str, group: Sequence[str], link: ComputeThread | None = None
) -> AsyncIterator["ShardService"]:
    """Serve `shard` at `url` inside the context; `group` is the answer of ServiceDiscovery.

    link: the shard's thread, to serve the link too. It listens before gRPC does, so that a router finds both.
    Leave the context when `ShardService.fatal` is done. Raises `StartupError` when `url` cannot be bound.
    """
    service = ShardService(shard, group)
    loop = asyncio.get_running_loop()
    if link is None:
        link_server: AbstractContextManager[object] = nullcontext()
    else:
        link_server = serving_link(link, link_path(url), lambda error: loop.call_soon_threadsafe(service.fail, error))
    server = grpc.aio.server(options=SERVER_OPTIONS)
    schemas = [load_schema(version) for version in VERSIONS]
    server.add_generic_rpc_handlers([service.handlers(schema) for schema in schemas])
    reflection.enable_server_reflection(
        [*(schema.service for schema in schemas), reflection.SERVICE_NAME], server, load_pool()
    )
    with link_server:
        _bind(server, url)
        await server.start()
        try:
            yield service
        finally:
            await server.stop(REPLY_GRACE_S if service.fatal.done() else None)
            _unbind(url)


class ShardService:
    """The eight RPCs of a shard. `fatal` is done once the shard has failed for good."""

    def __init__(self, shard: Shard, group: Sequence[str]) -> None:
        self.fatal: asyncio.Future[RuntimeError] = asyncio.get_running_loop().create_future()
        self._shard = shard
        self._group = tuple(group)
        self._turn = asyncio.Lock()

    def handlers(self, schema: WireSchema) -> "grpc.GenericRpcHandler[Message, Message]":
        """The RPC handlers of one schema."""
        codec = WireCodec(schema)
        return grpc.method_handlers_generic_handler(
            schema.service, {name: self._handler(codec, method) for name, method in schema.methods.items()}
        )

    def _handler(self, codec: WireCodec, method: Method) -> "grpc.RpcMethodHandler[Message, Message]":
        async def handle(request: Message, context: "grpc.aio.ServicerContext[Message, Message]") -> Message:
            # A cancelled call must not interrupt a step: the shard's state would be undefined.
            answer = await asyncio.shield(self._answer(codec, method, request))
            if not isinstance(answer, Exception):
                return answer
            text = error_text(answer)
            await context.abort(grpc.StatusCode.INTERNAL, text, (("grpc-status-details-bin", _rich_status(text)),))
            raise AssertionError("unreachable: abort raises")

        return grpc.unary_unary_rpc_method_handler(handle, method.request.FromString, method.response.SerializeToString)

    async def _answer(self, codec: WireCodec, method: Method, request: Message) -> Message | Exception:
        if method.name == "ServiceDiscovery":
            # It does not use the shard and need not wait for its step.
            return method.response(urls=self._group)
        call = WIRE_CALLS[method.name]
        async with self._turn:
            try:
                result = await getattr(self._shard, call.function)(*call.arguments(codec, request))
                return call.reply(codec, method, result)
            except Exception as error:
                logger.exception("%s failed", method.name)
                if isinstance(error, RuntimeError):
                    self.fail(error)
                return error

    def fail(self, error: RuntimeError) -> None:
        """The shard is unusable."""
        if not self.fatal.done():
            self.fatal.set_result(error)


def _bind(server: grpc.aio.Server, url: str) -> None:
    if is_tcp(url):
        if not is_loopback(url):
            logger.warning("%s is not a loopback address: the wire has no authentication and no encryption", url)
        _add_port(server, url)
        return
    with new_socket_file(socket_path(url)):
        _add_port(server, url)


def _unbind(url: str) -> None:
    if not is_tcp(url):
        Path(socket_path(url)).unlink(missing_ok=True)


def _add_port(server: grpc.aio.Server, url: str) -> None:
    try:
        bound = server.add_insecure_port(grpc_target(url))
    except RuntimeError as error:
        raise StartupError(f"cannot listen at {url}: {error}") from error
    if is_tcp(url) and bound == 0:
        raise StartupError(f"cannot listen at {url}")


def _rich_status(text: str) -> bytes:
    """A serialized `google.rpc.Status` of code INTERNAL (field 1) and message `text` (field 2)."""
    message = text.encode()
    size, prefix = len(message), bytearray()
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return b"\x08\x0d\x12" + bytes(prefix) + message

"""Serves a `Shard` over gRPC: both schemas and reflection on one unix socket or TCP endpoint.

Calls run one at a time, in order of arrival; a shard computes in its own thread, so the event loop stays free. An
exception becomes status INTERNAL with its text. A `RuntimeError` of the shard comes from the forward pass, a collective
or the device: its reply is sent, and then the process must end.
"""

import asyncio
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from reference_server.errors import StartupError
from reference_server.transport.address import grpc_target, is_loopback, is_tcp, socket_path
from reference_server.transport.codec import WireCodec
from reference_server.transport.shard import Shard
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

# gRPC clients refuse more than 8 KiB of metadata, which has an error's text twice, escaped.
MAX_ERROR_BYTES = 1500
MAX_SOCKET_PATH_BYTES = 107


@asynccontextmanager
async def serving(shard: Shard, url: str, group: Sequence[str]) -> AsyncIterator["ShardService"]:
    """Serve `shard` at `url` inside the context; `group` is the answer of ServiceDiscovery.

    Leave the context when `ShardService.fatal` is done. Raises `StartupError` when `url` cannot be bound.
    """
    service = ShardService(shard, group)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    schemas = [load_schema(version) for version in VERSIONS]
    server.add_generic_rpc_handlers([service.handlers(schema) for schema in schemas])
    reflection.enable_server_reflection(
        [*(schema.service for schema in schemas), reflection.SERVICE_NAME], server, load_pool()
    )
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
        self._rpcs: dict[str, Callable[[WireCodec, Method, Message], Awaitable[Message]]] = {
            "Info": self._info,
            "ServiceDiscovery": self._service_discovery,
            "ClearCache": self._clear_cache,
            "FilterBatch": self._filter_batch,
            "Warmup": self._warmup,
            "Prefill": self._prefill,
            "Decode": self._decode,
            "Health": self._health,
        }

    def handlers(self, schema: WireSchema) -> "grpc.GenericRpcHandler[Message, Message]":
        """The RPC handlers of one schema."""
        codec = WireCodec(schema)
        return grpc.method_handlers_generic_handler(
            schema.service, {name: self._handler(codec, method) for name, method in schema.methods.items()}
        )

    def _handler(self, codec: WireCodec, method: Method) -> "grpc.RpcMethodHandler[Message, Message]":
        rpc = self._rpcs[method.name]

        async def handle(request: Message, context: "grpc.aio.ServicerContext[Message, Message]") -> Message:
            # A cancelled call must not interrupt a step: the shard's state would be undefined.
            answer = await asyncio.shield(self._answer(rpc, codec, method, request))
            if not isinstance(answer, Exception):
                return answer
            text = _cut(str(answer) or type(answer).__name__)
            await context.abort(grpc.StatusCode.INTERNAL, text, (("grpc-status-details-bin", _rich_status(text)),))
            raise AssertionError("unreachable: abort raises")

        return grpc.unary_unary_rpc_method_handler(handle, method.request.FromString, method.response.SerializeToString)

    async def _answer(
        self,
        rpc: Callable[[WireCodec, Method, Message], Awaitable[Message]],
        codec: WireCodec,
        method: Method,
        request: Message,
    ) -> Message | Exception:
        # ServiceDiscovery does not use the shard and need not wait for its step.
        async with nullcontext() if method.name == "ServiceDiscovery" else self._turn:
            try:
                return await rpc(codec, method, request)
            except Exception as error:
                logger.exception("%s failed", method.name)
                if isinstance(error, RuntimeError) and not self.fatal.done():
                    self.fatal.set_result(error)
                return error

    async def _info(self, codec: WireCodec, _method: Method, _request: Message) -> Message:
        return codec.encode_info(await self._shard.info())

    async def _service_discovery(self, _codec: WireCodec, method: Method, _request: Message) -> Message:
        return method.response(urls=self._group)

    async def _clear_cache(self, _codec: WireCodec, method: Method, request: Message) -> Message:
        await self._shard.clear_cache(request.id if request.HasField("id") else None)
        return method.response()

    async def _filter_batch(self, codec: WireCodec, method: Method, request: Message) -> Message:
        batch = await self._shard.filter_batch(request.batch_id, tuple(request.request_ids))
        return method.response(batch=codec.encode_cached(batch))

    async def _warmup(self, codec: WireCodec, _method: Method, request: Message) -> Message:
        return codec.encode_warmup_reply(await self._shard.warmup(codec.decode_warmup_request(request)))

    async def _prefill(self, codec: WireCodec, _method: Method, request: Message) -> Message:
        result = await self._shard.prefill(*codec.decode_prefill_request(request))
        return codec.encode_step(result, "PrefillResponse")

    async def _decode(self, codec: WireCodec, _method: Method, request: Message) -> Message:
        result = await self._shard.decode(codec.decode_decode_request(request))
        return codec.encode_step(result, "DecodeResponse")

    async def _health(self, _codec: WireCodec, method: Method, _request: Message) -> Message:
        await self._shard.health()
        return method.response()


def _bind(server: grpc.aio.Server, url: str) -> None:
    if is_tcp(url):
        if not is_loopback(url):
            logger.warning("%s is not a loopback address: the wire has no authentication and no encryption", url)
        _add_port(server, url)
        return
    path = socket_path(url)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise StartupError(f"the socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes")
    _remove_stale_socket(Path(path))
    # The socket is created with mode 0600.
    mask = os.umask(0o177)
    try:
        _add_port(server, url)
    finally:
        os.umask(mask)


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


def _remove_stale_socket(path: Path) -> None:
    """Remove a socket without a server; refuse any other file at `path`."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        raise StartupError(f"{path} exists and is not a socket of this user")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise StartupError(f"another model server is listening at {path}")


def _cut(text: str) -> str:
    """The first line, shortened; the other lines of device errors are advice on debugging."""
    text = next(iter(text.splitlines()), text)
    return text.encode()[:MAX_ERROR_BYTES].decode(errors="ignore")


def _rich_status(text: str) -> bytes:
    """A serialized `google.rpc.Status` of code INTERNAL (field 1) and message `text` (field 2)."""
    message = text.encode()
    size, prefix = len(message), bytearray()
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return b"\x08\x0d\x12" + bytes(prefix) + message

"""`LinkChannel`: the router's end of the link, on the event loop.

A request is written to the socket at once, before the event loop's next turn. The end of the connection fails the calls
in flight. If the connection ended between calls, the shard may be a new process: the next call fails, and the one after
it connects again.
"""

import asyncio
import os
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import cast

from google.protobuf.message import DecodeError

from reference_server.errors import ShardConnectionError, ShardError
from reference_server.transport.address import socket_path
from reference_server.transport.link import (
    ERROR_KIND,
    HELLO,
    HELLO_KIND,
    METHODS,
    FrameBuffer,
    FrameError,
    link_path,
    pack,
    peer_uid,
)
from reference_server.transport.wire_schema import Message, load_schema

HELLO_LIMIT_S = 10.0
"""Time for the shard's hello; a shard answers it between two steps."""

_KINDS = {name: kind for kind, name in METHODS.items()}


class LinkChannel:
    """`WireChannel` over the link's socket of the shard at `address`; connects again after a lost connection."""

    def __init__(self, address: str) -> None:
        self.schema = load_schema("v3")
        self._address = address
        self._connecting = asyncio.Lock()
        self._connection: _Connection | None = None

    @classmethod
    async def open(cls, address: str) -> "LinkChannel":
        """Connect to the shard whose gRPC socket is at `address`. Raises ShardConnectionError if it has no link."""
        channel = cls(address)
        channel._connection = await channel._connect()
        return channel

    @staticmethod
    def is_offered(address: str) -> bool:
        """Whether the shard has made a socket for the link."""
        return Path(link_path(address)).is_socket()

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def call(self, method: str, request: Message) -> Message:
        if self._connection is None:
            async with self._connecting:
                if self._connection is None:
                    self._connection = await self._connect()
        connection = self._connection
        kind = self.schema.methods[method]
        try:
            payload = await connection.call(_KINDS[method], request.SerializeToString())
        except ConnectionError as error:
            if self._connection is connection:
                self._connection = None
            raise ShardConnectionError(f"the model server at {self._name} cannot be reached: {error}") from error
        except ValueError as error:
            raise ShardError(f"a request cannot be sent: {error}") from error
        try:
            return kind.response.FromString(payload)
        except DecodeError as error:
            raise ShardError(f"the reply of the model server to {method} cannot be decoded") from error

    async def _connect(self) -> "_Connection":
        try:
            async with asyncio.timeout(HELLO_LIMIT_S):
                return await _Connection.open(link_path(self._address))
        except TimeoutError:
            reason = f"no hello in {HELLO_LIMIT_S:g} s"
        except (OSError, FrameError) as error:
            reason = str(error)
        raise ShardConnectionError(f"could not connect to the model server at {self._name} over the link: {reason}")

    @property
    def _name(self) -> str:
        return socket_path(self._address)


class _Connection(asyncio.Protocol):
    """One connection: replies arrive in the order of the calls."""

    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport
        self._waiting: deque[tuple[int, asyncio.Future[bytes]]] = deque()
        self._lost: ConnectionError | None = None

    @classmethod
    async def open(cls, path: str) -> "_Connection":
        """Connect and exchange hellos. Raises OSError or FrameError."""
        loop = asyncio.get_running_loop()
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.setblocking(False)
            await loop.sock_connect(connected, path)
            if peer_uid(connected) not in (None, 0, os.getuid()):
                raise PermissionError(f"{path} belongs to another user")
            # The transport reads and closes `connected`; this end writes.
            own = connected.dup()
            own.setblocking(False)
            _, connection = await loop.create_unix_connection(lambda: cls(own), sock=connected)
        except BaseException:
            connected.close()
            raise
        try:
            hello = await connection.call(HELLO_KIND, HELLO)
            connection._frames.accept_hello(HELLO_KIND, hello)
        except BaseException:
            connection.close()
            raise
        return connection

    def call(self, kind: int, payload: bytes) -> "asyncio.Future[bytes]":
        """Send a request; its reply. Raises ConnectionError or ValueError, as the reply does."""
        if self._lost is not None:
            raise self._lost
        frame = pack(kind, payload)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, reply))
        self._send(frame)
        return reply

    def close(self) -> None:
        self._transport.abort()

    def _send(self, frame: bytes) -> None:
        sent = 0
        if not self._transport.get_write_buffer_size():
            # The event loop would write at the end of its turn, after the readers of the previous tokens.
            with suppress(OSError):
                sent = self._socket.send(frame)
        if sent < len(frame):
            # The end of a connection is reported by `connection_lost`.
            self._transport.write(frame[sent:])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        try:
            while (frame := self._frames.next_frame()) is not None:
                self._on_reply(*frame)
        except FrameError as error:
            self._lose(ConnectionAbortedError(f"the shard sent a wrong frame: {error}"))
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._socket.close()
        self._lose(ConnectionResetError("the shard closed the connection" if error is None else str(error)))

    def _on_reply(self, kind: int, payload: bytes) -> None:
        if not self._waiting:
            raise FrameError("a reply without a call")
        expected, reply = self._waiting[0]
        if kind not in (expected, ERROR_KIND):
            raise FrameError(f"a reply of kind {kind} to a call of kind {expected}")
        self._waiting.popleft()
        if reply.done():
            # The caller has left.
            return
        if kind == ERROR_KIND:
            reply.set_exception(ShardError(payload.decode(errors="replace")))
        else:
            reply.set_result(payload)

    def _lose(self, error: ConnectionError) -> None:
        self._lost = self._lost or error
        while self._waiting:
            _, reply = self._waiting.popleft()
            if not reply.done():
                reply.set_exception(self._lost)

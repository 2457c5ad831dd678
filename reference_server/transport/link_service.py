"""Answers the link's connections in the thread that computes: receive, decode, step, send, launch the next step.

Nothing else runs between a request and its reply: no event loop, executor or lock. A connection whose frames are wrong
is closed; the others go on.
"""

import functools
import logging
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from google.protobuf.message import DecodeError

from reference_server.transport.codec import WireCodec
from reference_server.transport.compute_thread import ComputeThread
from reference_server.transport.link import (
    ERROR_KIND,
    HELLO,
    HELLO_KIND,
    METHODS,
    FrameBuffer,
    FrameError,
    listen_at,
    pack,
)
from reference_server.transport.wire_calls import WIRE_CALLS, WireCall, error_text
from reference_server.transport.wire_schema import Message, Method, load_schema

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 16
"""Python allocates as much for every `recv`; 2**18 bytes are mapped anew each time, which costs 15 us a call."""
MAX_CONNECTIONS = 64
"""A group has one router; more connections than this are refused."""


@contextmanager
def serving_link(
    thread: ComputeThread, path: str, on_fatal: Callable[[RuntimeError], object]
) -> Iterator["LinkService"]:
    """Serve the thread's shard at `path` inside the context. Raises StartupError when `path` cannot be bound.

    on_fatal: called in the thread with the error of a step after which the shard is unusable.
    """
    service = LinkService(thread, listen_at(path), on_fatal)
    thread.post(service.start)
    try:
        yield service
    finally:
        Path(path).unlink(missing_ok=True)
        service.stop()


class LinkService:
    """The listening socket and its connections."""

    def __init__(
        self, thread: ComputeThread, listener: socket.socket, on_fatal: Callable[[RuntimeError], object]
    ) -> None:
        self.thread = thread
        self.on_fatal = on_fatal
        schema = load_schema("v3")
        codec = WireCodec(schema)
        self.calls = {
            kind: _BoundCall(name, schema.methods[name], codec, WIRE_CALLS[name], thread)
            for kind, name in METHODS.items()
        }
        self._listener = listener
        self._connections: set[LinkConnection] = set()

    def start(self) -> None:
        """Called in the thread."""
        self.thread.watch(self)

    def stop(self) -> None:
        """End all connections at once, even while the thread computes."""
        for connection in tuple(self._connections):
            connection.shut_down()
        self.thread.post(self._close)

    def fileno(self) -> int:
        return self._listener.fileno()

    def on_ready(self) -> None:
        """Accept a connection."""
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            # The peer may have left, or no file may be free.
            logger.warning("a link connection was not accepted: %s", error)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            logger.warning("a link connection was refused: %d are open", MAX_CONNECTIONS)
            accepted.close()
            return
        accepted.setblocking(False)
        connection = LinkConnection(self, accepted)
        self._connections.add(connection)
        self.thread.watch(connection)

    def discard(self, connection: "LinkConnection") -> None:
        self._connections.discard(connection)

    def _close(self) -> None:
        self.thread.forget(self)
        self._listener.close()
        for connection in tuple(self._connections):
            connection.close()


class _BoundCall:
    """One method: request bytes to reply bytes."""

    def __init__(self, name: str, method: Method, codec: WireCodec, call: WireCall, thread: ComputeThread) -> None:
        self.name = name
        self.parse: Callable[[bytes], Message] = method.request.FromString
        self._method = method
        self._codec = codec
        self._call = call
        self._function = getattr(thread.shard, call.function)

    def __call__(self, request: Message) -> bytes:
        result = self._function(*self._call.arguments(self._codec, request))
        reply: bytes = self._call.reply(self._codec, self._method, result).SerializeToString()
        return reply


class LinkConnection:
    """One router's connection. While a reply is not fully sent, no other request of it is read."""

    def __init__(self, service: LinkService, connection: socket.socket) -> None:
        self._service = service
        self._thread = service.thread
        self._socket = connection
        self._frames = FrameBuffer()
        self._has_hello = False
        self._is_open = True
        self._unsent: bytes | memoryview = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def on_ready(self) -> None:
        """Answer what was received, or go on sending."""
        try:
            if self._unsent:
                self._send(self._unsent)
            else:
                data = self._socket.recv(RECEIVE_BYTES)
                if not data:
                    self.close()
                self._frames.feed(data)
            while self._is_open and not self._unsent and (frame := self._frames.next_frame()) is not None:
                self._on_frame(*frame)
        except FrameError as error:
            logger.warning("a link connection was closed: %s", error)
            self.close()
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def shut_down(self) -> None:
        """From any thread: the peer reads the end at once, and this thread then closes."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._thread.forget(self)
            self._socket.close()
            self._service.discard(self)

    def _on_frame(self, kind: int, payload: bytes) -> None:
        if not self._has_hello:
            # The peer reads this hello even if its own is refused.
            self._send(pack(HELLO_KIND, HELLO))
            self._frames.accept_hello(kind, payload)
            self._has_hello = True
            return
        call = self._service.calls.get(kind)
        if call is None:
            raise FrameError(f"a frame of the unknown kind {kind}")
        try:
            request = call.parse(payload)
        except DecodeError as error:
            raise FrameError(f"a request of {call.name} that cannot be decoded") from error
        self._thread.answer(
            functools.partial(call, request),
            functools.partial(self._reply, kind),
            functools.partial(self._fail, call.name),
        )

    def _reply(self, kind: int, payload: bytes) -> None:
        self._send(pack(kind, payload))

    def _fail(self, name: str, error: BaseException) -> None:
        logger.error("%s failed", name, exc_info=error)
        self._send(pack(ERROR_KIND, error_text(error).encode()))
        if isinstance(error, RuntimeError):
            self._service.on_fatal(error)

    def _send(self, data: bytes | memoryview) -> None:
        """Send what the socket takes; the rest waits until it is writable. A peer that left closes the connection."""
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        was_waiting, self._unsent = bool(self._unsent), memoryview(data)[sent:]
        if bool(self._unsent) != was_waiting:
            self._thread.watch(self, select.POLLOUT if self._unsent else select.POLLIN)

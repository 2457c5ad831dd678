"""The link: frames between a router and a shard on one machine, over a unix socket next to the shard's gRPC socket.

    [u32 payload length, little-endian] [u8 kind] [payload]

Each side first sends a frame of kind HELLO_KIND with payload HELLO; a side that receives another hello closes. Then the
router sends calls, whose kind is the number of a method, with the request of schema v3 as payload. The shard answers
each connection's calls in their order: the same kind with the reply, or ERROR_KIND with the text of an error.
"""

import socket
import struct

from reference_server.errors import StartupError
from reference_server.transport.address import socket_path
from reference_server.transport.socket_file import new_socket_file

HELLO = b"text-generation-link 2"
"""Name and version of the framing. A change of the frames or of METHODS changes the version."""
HELLO_KIND = 0
ERROR_KIND = 255
_NAMES = ("Info", "Health", "Warmup", "Prefill", "Decode", "FilterBatch", "ClearCache", "LoadAdapter", "UnloadAdapter")
METHODS = dict(enumerate(_NAMES, start=1))

HEADER = struct.Struct("<IB")
MAX_PAYLOAD_BYTES = 2**31 - 1
"""The limit of gRPC's messages too."""


class FrameError(Exception):
    """The peer does not keep to the frames; its connection is closed."""


def pack(kind: int, payload: bytes) -> bytes:
    """One frame. Raises ValueError if the payload is too long."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"message larger than max ({len(payload)} vs. {MAX_PAYLOAD_BYTES})")
    return HEADER.pack(len(payload), kind) + payload


class FrameBuffer:
    """Bytes as received, and the whole frames among them. Holds at most one unfinished frame and what follows it.

    >>> buffer = FrameBuffer()
    >>> buffer.feed(pack(5, b"abc") + b"\\x01")
    >>> buffer.next_frame(), buffer.next_frame()
    ((5, b'abc'), None)
    """

    def __init__(self) -> None:
        self.max_payload_bytes = len(HELLO)
        """Raised by the owner once the peer has sent its hello."""
        self._data: bytes | bytearray = b""

    def feed(self, data: bytes) -> None:
        if not self._data:
            # Mostly one whole frame, which is then copied once.
            self._data = data
            return
        if isinstance(self._data, bytes):
            self._data = bytearray(self._data)
        self._data += data

    def next_frame(self) -> tuple[int, bytes] | None:
        """Kind and payload of the first whole frame, or None. Raises FrameError if its length is over the limit."""
        data = self._data
        if len(data) < HEADER.size:
            return None
        size, kind = HEADER.unpack_from(data)
        if size > self.max_payload_bytes:
            raise FrameError(f"a frame of {size} bytes, the limit is {self.max_payload_bytes}")
        end = HEADER.size + size
        if len(data) < end:
            return None
        payload = bytes(memoryview(data)[HEADER.size : end])
        self._data = b"" if len(data) == end else data[end:]
        return kind, payload

    def accept_hello(self, kind: int, payload: bytes) -> None:
        """Check the peer's first frame, then admit frames up to the limit of messages. Raises FrameError."""
        if kind != HELLO_KIND or payload != HELLO:
            raise FrameError(f"the peer sent {payload!r}, expected {HELLO!r}")
        self.max_payload_bytes = MAX_PAYLOAD_BYTES


def link_path(url: str) -> str:
    """The link's socket of a shard whose gRPC socket is at `url`."""
    return f"{socket_path(url)}.link"


def listen_at(path: str) -> socket.socket:
    """A listening socket with mode 0600. Raises StartupError."""
    with new_socket_file(path):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        try:
            listener.bind(path)
            listener.listen()
        except OSError as error:
            listener.close()
            raise StartupError(f"cannot listen at {path}: {error.strerror}") from error
    return listener


def peer_uid(connection: socket.socket) -> int | None:
    """The user of the process that listens at the other end; None where the system does not report it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    size = struct.calcsize("3i")
    uid: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    return uid

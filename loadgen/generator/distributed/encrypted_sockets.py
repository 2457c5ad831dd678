"""The sockets between master and workers: ZeroMQ with CURVE, whose keys are derived from the join key.

A process without the join key cannot derive the master's public key, so its handshake fails before any message is read.
The traffic is encrypted. A frame that is not a worker's message is dropped.
"""

# locust first: it makes the sockets of everything imported after it cooperative.
import locust.rpc.zmqrpc as zmqrpc

# isort: split
import hashlib
import logging
from collections.abc import Sequence

import zmq.green as zmq
from locust.exception import RPCError
from locust.rpc.protocol import Message
from zmq.error import Again, ZMQError
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from loadgen.generator.worker_messages import FROM_WORKER

MAX_MESSAGE_BYTES = 256 * 2**20
# locust's messages of a worker that a master of this product reads.
FROM_LOCUST = (
    "client_ready",
    "client_stopped",
    "heartbeat",
    "stats",
    "spawning",
    "spawning_complete",
    "quit",
    "exception",
)
HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
# Guesses of a weak key cost 16 MiB and some 0.1 s each.
SCRYPT = {"n": 2**14, "r": 8, "p": 1}

logger = logging.getLogger(__name__)


def master_keys(key: str) -> tuple[bytes, bytes]:
    """The master's public and secret CURVE key of a join key, in Z85."""
    drawn = hashlib.scrypt(key.encode(), salt=b"tgi-bench master", dklen=32, **SCRYPT)
    secret = z85.encode(drawn)
    return zmq.curve_public(secret), secret


class EncryptedServer(zmqrpc.Server):  # type: ignore[misc]
    """The master's socket."""

    def __init__(self, host: str, port: int, key: str) -> None:
        """Listen; port 0 is a free one. Raises RPCError as locust's own server does."""
        zmqrpc.BaseSocket.__init__(self, zmq.ROUTER, self.ipv4_only(host, port))
        self.socket.curve_publickey, self.socket.curve_secretkey = master_keys(key)
        self.socket.curve_server = True
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self.port = port or self.socket.bind_to_random_port(f"tcp://{host}")
            if port:
                self.socket.bind(f"tcp://{host}:{port}")
        except ZMQError as error:
            raise RPCError(f"Socket bind failure: {error}") from error

    def recv_from_client(self) -> tuple[str, Message]:
        """The next message of a worker and its identity. Raises RPCError if the socket is closed."""
        while True:
            try:
                frames = self.socket.recv_multipart()
            except ZMQError as error:
                raise RPCError("ZMQ network broken") from error
            message = message_of(frames)
            if message is not None:
                return message.node_id, message
            logger.warning("dropped %d malformed frames", len(frames))


def message_of(frames: Sequence[bytes]) -> Message | None:
    """The message in the frames of one worker; None if they are malformed or in the name of another worker."""
    if len(frames) != 2:
        return None
    try:
        message = Message.unserialize(frames[1])
        sender = frames[0].decode()
    except Exception:
        return None  # msgpack, locust's hook for dates, and wrong numbers of fields raise a dozen types.
    is_known = message.type in (FROM_WORKER, *FROM_LOCUST) if isinstance(message.type, str) else False
    is_own = isinstance(message.data, dict) and isinstance(message.data.get("type"), str)
    if not is_known or message.node_id != sender or (message.type == FROM_WORKER and not is_own):
        return None
    return message


class EncryptedClient(zmqrpc.Client):  # type: ignore[misc]
    """A worker's socket."""

    def __init__(self, host: str, port: int, identity: str, key: str) -> None:
        zmqrpc.BaseSocket.__init__(self, zmq.DEALER, self.ipv4_only(host, port))
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.curve_serverkey = master_keys(key)[0]
        self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
        self._events = self.socket.get_monitor_socket(HANDSHAKE_FAILED)
        self.socket.connect(f"tcp://{host}:{port}")

    def is_refused(self) -> bool:
        """Whether a handshake has failed since the last call: another key, or no master listens there."""
        is_refused = False
        try:
            while True:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
                is_refused = is_refused or bool(event["event"] & HANDSHAKE_FAILED)
        except Again:
            return is_refused

    def close(self, linger: int | None = None) -> None:
        self.socket.disable_monitor()
        super().close(linger)

"""A server that answers every connection with given bytes, in given pieces, whatever the request is."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator

Pieces = Callable[[], Iterable[bytes]]


@contextlib.contextmanager
def raw_server(pieces: Pieces, *, pause_s: float = 0.0, resets: bool = False) -> Iterator[str]:
    """The URL of a server that sends the pieces, a pause before each, and closes; `resets` closes with a RST."""
    listener = socket.create_server(("127.0.0.1", 0))
    is_over = threading.Event()

    def answer(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(5)
            peer.recv(65_536)
            for piece in pieces():
                if is_over.is_set():
                    return
                time.sleep(pause_s)
                peer.sendall(piece)
            if resets:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                threads.append(threading.Thread(target=answer, args=(peer,), daemon=True))
                threads[-1].start()

    threads: list[threading.Thread] = []
    acceptor = threading.Thread(target=serve, daemon=True)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        is_over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        for thread in threads:
            thread.join()

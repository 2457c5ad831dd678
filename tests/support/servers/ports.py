"""Free loopback ports for servers that a test starts."""

import itertools
import os
import socket

#: Below the ports that Linux gives to outgoing connections; each test process takes from a range of its own.
_FIRST, _COUNT = 12_000, 5_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
_OFFSETS = itertools.count(os.getpid() * 7)


def free_port() -> int:
    """A port that nothing listens on; no later call in this process returns it again."""
    for offset in itertools.islice(_OFFSETS, _COUNT):
        port = _FIRST + _WORKER * _COUNT + offset % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port from {_FIRST} to {_FIRST + 4 * _COUNT}")

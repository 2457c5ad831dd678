"""The socket file of a shard: the limit of its path, its mode, and the removal of one without a server."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reference_server.errors import StartupError

MAX_SOCKET_PATH_BYTES = 107


@contextmanager
def new_socket_file(path: str) -> Iterator[None]:
    """Inside, a socket can be created at `path`, with mode 0600. Raises StartupError if the path is unusable."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise StartupError(f"the socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes")
    _remove_stale_socket(Path(path))
    mask = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(mask)


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

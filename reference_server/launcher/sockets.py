"""Ports and sockets of the child processes: the private directory, and checks before any model is loaded."""

import contextlib
import errno
import ipaddress
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from reference_server.errors import ArgumentError
from reference_server.listening import listening_address
from reference_server.transport.address import TCP, is_tcp

MAX_SOCKET_PATH_BYTES = 107


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A fresh directory, mode 0700, for sockets and the rendezvous file; removed at the end."""
    parent = tempfile.gettempdir()
    if len(parent) > MAX_SOCKET_PATH_BYTES - 40:
        parent = "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="text-generation-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def check_address(address: str) -> None:
    """Check that a shard can listen at `address`, a socket's path or a TCP url. Raises `ArgumentError`."""
    if not is_tcp(address):
        check_socket(Path(address))
        return
    host, _, port = address.removeprefix(TCP).rpartition(":")
    check_port(host.strip("[]"), int(port))


def check_port(hostname: str, port: int) -> None:
    """Raise `ArgumentError` if this address is not available."""
    address = ipaddress.ip_address(listening_address(hostname))
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((str(address), port))
            listener.listen(1)
        except PermissionError as error:
            raise ArgumentError(f"port {port} needs privileges: choose one above 1023") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ArgumentError(f"port {port} is already in use") from error
            raise ArgumentError(f"cannot listen on {hostname} port {port}: {error.strerror}") from error


def check_socket(path: Path) -> None:
    """Check that a shard can create `path`; remove a stale socket of this user.

    Raises `ArgumentError` if the path is too long, its directory is unusable, or the socket is in use.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ArgumentError(f"socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes")
    _check_directory(path.parent)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
        raise ArgumentError(f"{path} exists and is not a socket of this user")
    if _is_served(path):
        raise ArgumentError(f"socket {path} is in use by a running server")
    path.unlink()


def _check_directory(directory: Path) -> None:
    try:
        status = directory.stat()
    except OSError as error:
        raise ArgumentError(f"socket directory {directory}: {error.strerror}") from error
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.getuid()) or others_write:
        raise ArgumentError(f"socket directory {directory} is writable by other users: choose a private one")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ArgumentError(f"socket directory {directory} is not writable")


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True

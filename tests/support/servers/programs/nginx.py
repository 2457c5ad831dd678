"""A real nginx on loopback, with the upstream and server blocks of a document."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers.ports import free_port

PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@contextlib.contextmanager
def nginx(folder: Path, blocks: str) -> Iterator[str]:
    """Serve `blocks`, in which `listen 80` is replaced by a free port; yields the URL."""
    assert PROGRAM is not None, "nginx is not on PATH"
    port = free_port()
    paths = "".join(f"{name}_temp_path {folder}/{name};" for name in TEMPORARY)
    served = blocks.replace("listen 80;", f"listen 127.0.0.1:{port};")
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{ worker_connections 256; }}\nhttp {{ access_log off; {paths}\n{served}\n}}\n"
    )
    with subprocess.Popen([PROGRAM, "-p", str(folder), "-c", str(file), "-e", f"{folder}/error.log"]) as process:
        try:
            _wait_for(port, process, folder / "error.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, "nginx does not listen"
        time.sleep(0.05)

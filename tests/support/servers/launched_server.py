"""The real launcher on `preset:tiny-llama`, with shards and router as processes on loopback."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers.ports import free_port

# A busy machine takes minutes to load and quantize a model; a server that ended is seen at once.
READY_LIMIT_S = 600


@dataclass
class Server:
    """A launcher that serves on loopback."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def output(self) -> str:
        """The output of the launcher and its children so far."""
        return self.log.read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.loads(response.read() or b"{}")

    def token_ids(self, prompt: str, max_new_tokens: int = 12) -> list[int]:
        parameters = {"max_new_tokens": max_new_tokens, "details": True, "ignore_eos_token": True}
        answer = self.post("/generate", {"inputs": prompt, "parameters": parameters})
        return [token["id"] for token in answer["details"]["tokens"]]

    def children(self) -> dict[int, dict[str, str]]:
        """The environment of each direct child by its process id."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return {int(pid): environment_of(int(pid)) for pid in listed}


def environment_of(pid: int) -> dict[str, str]:
    content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(line.split("=", 1) for line in content.split("\0") if "=" in line)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def serve(
    *flags: str, program: str = "reference_server.launcher.cli", port: int | None = None, **environ: str
) -> Iterator[Server]:
    """Launch `preset:tiny-llama` and wait until it answers; `environ` is added to this process's."""
    port = port or free_port()
    command = [sys.executable, "-m", program, "--model-id", "preset:tiny-llama"]
    command += ["--hostname", "127.0.0.1", "--port", str(port), "--cpu-memory-gib", "0.5", *flags]
    # A file: a pipe without a reader blocks the router once it is full.
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ) | environ)
        yield from _until_ready(Server(process, port, log))


def _until_ready(server: Server) -> Iterator[Server]:
    process = server.process
    try:
        deadline_s = time.monotonic() + READY_LIMIT_S
        while True:
            with contextlib.suppress(OSError):
                server.get("/health")
                break
            assert process.poll() is None, server.output
            assert time.monotonic() < deadline_s, "the server did not get ready"
            time.sleep(0.1)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=60)

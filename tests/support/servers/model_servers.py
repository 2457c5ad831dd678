"""Model servers as processes of their own, and a connection to them once they answer."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reference_server.configuration.common_config import Transport
from reference_server.errors import ShardConnectionError
from reference_server.transport.address import tcp_url
from reference_server.transport.client import connect
from reference_server.transport.shard import ShardGroup
from tests.support.servers.ports import free_port

START_LIMIT_S = 120.0


@dataclass
class ModelServers:
    """The ranks of one model, and the addresses they listen at in rank order."""

    processes: list[subprocess.Popen[bytes]]
    addresses: list[str]

    async def connect(self, version: str = "v3", transport: Transport = "auto") -> ShardGroup:
        """The group, as soon as every rank has loaded its model."""
        end = time.monotonic() + START_LIMIT_S
        while True:
            try:
                return await connect(self.addresses[:1], version, transport)
            except ShardConnectionError:
                assert time.monotonic() < end, "the model servers did not get ready"
                assert all(process.poll() is None for process in self.processes), "a model server has ended"
            await asyncio.sleep(0.1)


@contextmanager
def model_servers(
    model: str,
    *flags: str,
    num_shards: int = 1,
    tcp: bool = False,
    host: str = "127.0.0.1",
    prefix: Sequence[str] = (),
) -> Iterator[ModelServers]:
    """Start the ranks; `prefix` goes before each command (`ip netns exec NAME`)."""
    with tempfile.TemporaryDirectory(prefix="shards-") as directory:
        addresses = [f"{directory}/s-{rank}" for rank in range(num_shards)]
        if tcp:
            addresses = [tcp_url(f"{host}:{free_port()}") for _ in range(num_shards)]
        processes = [
            _start(
                model, rank, addresses, Path(directory), (*flags, *(["--sharded"] if num_shards > 1 else [])), prefix
            )
            for rank in range(num_shards)
        ]
        try:
            yield ModelServers(processes, addresses)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _start(
    model: str, rank: int, addresses: list[str], directory: Path, flags: Sequence[str], prefix: Sequence[str]
) -> "subprocess.Popen[bytes]":
    where = ["--uds-path", str(directory / "s")]
    if addresses[0].startswith("tcp://"):
        where = ["--listen", addresses[rank].removeprefix("tcp://")]
        if len(addresses) > 1:
            where += ["--shard-addr", ",".join(address.removeprefix("tcp://") for address in addresses)]
    command = [
        *prefix,
        sys.executable,
        "-m",
        "reference_server.model_server.cli",
        "serve",
        model,
        *where,
        "--transport",
        "auto",
        *flags,
    ]
    environ = {
        "PATH": "/usr/sbin:/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "WORLD_SIZE": str(len(addresses)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "RENDEZVOUS_FILE": str(directory / "rendezvous"),
    }
    return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

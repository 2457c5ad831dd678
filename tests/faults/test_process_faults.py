"""Processes that die or hang under load (reliability.md section 3): the real launcher and router, with two real shards
where a collective is at stake and stub model servers, which start at once, where it is not.
"""

import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.launched_server import Server, is_running, serve

SMALL = ("--dtype", "float32", "--max-input-tokens", "256", "--max-total-tokens", "2048", "-g", "5")
LAUNCHES = {"hung shard": ("--step-timeout", "3"), "killed router": (), "killed launcher": ()}
NUM_STREAMS = 6


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One launch for each fault, all of them brought up together."""
    stubs = {
        "program": "tests.support.scripted_launch",
        "STUB_LOG": str(tmp_path_factory.mktemp("stubs") / "events"),
        "STUB_SHARD": "paced",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    contexts = {name: serve(*SMALL, *flags, **stubs) for name, flags in LAUNCHES.items()}
    contexts["two shards"] = serve(*SMALL, "--num-shard", "2")
    with ExitStack() as stack, ThreadPoolExecutor(len(contexts)) as pool:
        started = {name: pool.submit(stack.enter_context, context) for name, context in contexts.items()}
        yield {name: future.result() for name, future in started.items()}


class Streams:
    """Streams in progress: what each has brought, and how its connection ended."""

    def __init__(self, server: Server) -> None:
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._started = [0] * NUM_STREAMS
        self._reading = [self._pool.submit(self._read, server, number) for number in range(NUM_STREAMS)]
        until(lambda: all(count > 3 for count in self._started), "tokens on every stream")

    def _read(self, server: Server, number: int) -> list[dict[str, object]]:
        parameters = {"max_new_tokens": 600, "ignore_eos_token": True}
        body = json.dumps({"inputs": f"Story {number}", "parameters": parameters}).encode()
        request = urllib.request.Request(server.url + "/generate_stream", body, {"Content-Type": "application/json"})
        events = []
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data:"):
                    events.append(json.loads(line[5:]))
                    self._started[number] += 1
        return events

    def ended(self) -> list["Future[list[dict[str, object]]]"]:
        """Every stream, once each has ended."""
        self._pool.shutdown(wait=True)
        return self._reading


def until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.02)


def child(server: Server, word: str, rank: str | None = None) -> int:
    """The process whose command line has `word`."""
    return next(
        pid
        for pid, environ in server.children().items()
        if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0") and environ.get("RANK") == rank
    )


def socket_directory(server: Server) -> Path:
    command = Path(f"/proc/{child(server, 'serve', '0')}/cmdline").read_text().split("\0")
    return Path(command[command.index("--uds-path") + 1]).parent


def end_of(server: Server, pids: list[int], directory: Path, limit_s: float = 20.0) -> tuple[int, str]:
    """Exit status and output; no process and no socket is left."""
    status = server.process.wait(timeout=limit_s)
    until(lambda: not any(map(is_running, pids)), "the end of every child", limit_s)
    until(lambda: not directory.exists(), "removal of the socket directory", limit_s)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", server.port))
    return status, server.output


def listening_addresses(pids: list[int]) -> set[str]:
    """Addresses at which these processes listen over TCP, as the kernel spells them."""
    links = [os.readlink(path) for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()]  # noqa: PTH115
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def test_reliability_T60_T61_shards_listen_where_nobody_else_can_reach_them(servers):
    server = servers["two shards"]
    directory = socket_directory(server)
    shards = [child(server, "serve", rank) for rank in ("0", "1")]

    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.stat().st_uid == os.getuid()
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir() if path.is_socket()} == {0o600}
    assert listening_addresses(shards) <= LOOPBACK


@pytest.mark.parametrize("rank", ["1"])
def test_reliability_F1_F2_a_shard_killed_mid_decode_ends_every_stream_with_an_error(servers, rank):
    server = servers["two shards"]
    pids, directory, streams = list(server.children()), socket_directory(server), Streams(server)

    os.kill(child(server, "serve", rank), signal.SIGKILL)
    ended = [stream.result() for stream in streams.ended()]
    status, output = end_of(server, pids, directory)

    assert [events[-1].get("error_type") for events in ended] == ["generation"] * NUM_STREAMS
    assert all("Could not connect to Text Generation server" in str(events[-1]["error"]) for events in ended)
    assert status == 1
    assert f"Error: ShardFailed: shard {rank} was killed by signal 9 (SIGKILL)" in output


def test_reliability_F3_a_shard_that_hangs_mid_decode_is_timed_out_and_killed(servers):
    server = servers["hung shard"]
    pids, directory, streams = list(server.children()), socket_directory(server), Streams(server)

    os.kill(child(server, "serve", "0"), signal.SIGSTOP)
    ended = [stream.result() for stream in streams.ended()]
    status, output = end_of(server, pids, directory)

    assert [events[-1].get("error_type") for events in ended] == ["generation"] * NUM_STREAMS
    assert all("step timed out after 3 s" in str(events[-1]["error"]) for events in ended)
    assert status == 1
    assert "Error: WebserverFailed" in output


def test_reliability_F10_a_killed_router_ends_the_launch(servers):
    server = servers["killed router"]
    pids, directory, streams = list(server.children()), socket_directory(server), Streams(server)

    os.kill(child(server, "--master-shard-uds-path"), signal.SIGKILL)
    ended = streams.ended()
    status, output = end_of(server, pids, directory)

    # Whoever was reading sees the connection end in the middle.
    assert all(stream.exception() is not None or "generated_text" in stream.result()[-1] for stream in ended)
    assert status == 1
    assert "Error: WebserverFailed: the router was killed by signal 9 (SIGKILL)" in output


def test_reliability_F11_a_killed_launcher_leaves_no_orphans(servers):
    server = servers["killed launcher"]
    pids, directory, streams = list(server.children()), socket_directory(server), Streams(server)

    server.process.kill()
    streams.ended()
    status, _ = end_of(server, pids, directory)

    assert status == -signal.SIGKILL

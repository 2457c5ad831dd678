"""Processes that die or hang under load: the real launcher and router, over a stub model server or two real shards."""

import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.servers.launched_server import Server, is_running, serve

SMALL = ("--dtype", "float32", "--max-input-tokens", "256", "--max-total-tokens", "2048", "-g", "5")
NUM_STREAMS = 6


@pytest.fixture
def stub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """The launcher and router over a stub model server, which starts at once and takes 10 ms a step."""
    stubs = {"STUB_LOG": str(tmp_path / "events"), "STUB_SHARD": "paced", "PYTHONPATH": str(Path(__file__).parents[2])}
    flags = getattr(request, "param", ())
    with serve(*SMALL, *flags, program="tests.support.servers.scripted_launch", **stubs) as server:
        yield server


@pytest.fixture(
    scope="module",
    params=[pytest.param(transport, marks=pytest.mark.slow) for transport in ("auto", "grpc")],
)
def two_shards(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serve(*SMALL, "--num-shard", "2", "--transport", request.param) as server:
        yield server


class Streams:
    """Streams in progress: the events of each, and how its connection ended."""

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


def end_of(server: Server, pids: list[int], directory: Path, limit_s: float = 60.0) -> tuple[int, str]:
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


def assert_private(server: Server, ranks: Sequence[str]) -> None:
    """Sockets and their folder are for this user alone; shards listen on the loopback interface only."""
    directory = socket_directory(server)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.stat().st_uid == os.getuid()
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir() if path.is_socket()} == {0o600}
    assert listening_addresses([child(server, "serve", rank) for rank in ranks]) <= LOOPBACK


def assert_shard_killed(server: Server, rank: str) -> None:
    """Kill a rank while it decodes: every stream ends with an error, and the launcher with its cause."""
    pids, directory, streams = list(server.children()), socket_directory(server), Streams(server)

    os.kill(child(server, "serve", rank), signal.SIGKILL)
    ended = [stream.result() for stream in streams.ended()]
    status, output = end_of(server, pids, directory)

    assert [events[-1].get("error_type") for events in ended] == ["generation"] * NUM_STREAMS
    assert all("Could not connect to Text Generation server" in str(events[-1]["error"]) for events in ended)
    assert status == 1
    assert f"Error: ShardFailed: shard {rank} was killed by signal 9 (SIGKILL)" in output


def test_reliability_T60_F1_a_shard_has_private_sockets_and_its_death_ends_every_stream_with_an_error(stub: Server):
    assert_private(stub, "0")

    assert_shard_killed(stub, "0")


def test_reliability_T60_T61_shards_listen_on_private_sockets_and_loopback_only(two_shards: Server):
    assert_private(two_shards, "01")


def test_reliability_F1_F2_a_shard_killed_mid_decode_ends_every_stream_with_an_error(two_shards: Server):
    assert_shard_killed(two_shards, "1")


@pytest.mark.parametrize(
    "stub",
    [
        pytest.param(("--step-timeout", "3"), id="link"),
        pytest.param(("--step-timeout", "3", "--transport", "grpc"), id="grpc", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_reliability_F3_a_shard_that_hangs_mid_decode_is_timed_out_and_killed(stub: Server):
    pids, directory, streams = list(stub.children()), socket_directory(stub), Streams(stub)

    os.kill(child(stub, "serve", "0"), signal.SIGSTOP)
    ended = [stream.result() for stream in streams.ended()]
    status, output = end_of(stub, pids, directory)

    assert [events[-1].get("error_type") for events in ended] == ["generation"] * NUM_STREAMS
    assert all("step timed out after 3 s" in str(events[-1]["error"]) for events in ended)
    assert status == 1
    assert "Error: WebserverFailed" in output


@pytest.mark.slow
def test_reliability_F10_a_killed_router_ends_the_launch(stub: Server):
    pids, directory, streams = list(stub.children()), socket_directory(stub), Streams(stub)

    os.kill(child(stub, "--master-shard-uds-path"), signal.SIGKILL)
    ended = streams.ended()
    status, output = end_of(stub, pids, directory)

    # Readers see the connection end in the middle.
    assert all(stream.exception() is not None or "generated_text" in stream.result()[-1] for stream in ended)
    assert status == 1
    assert "Error: WebserverFailed: the router was killed by signal 9 (SIGKILL)" in output


@pytest.mark.slow
def test_reliability_F11_a_killed_launcher_leaves_no_orphans(stub: Server):
    pids, directory, streams = list(stub.children()), socket_directory(stub), Streams(stub)

    stub.process.kill()
    streams.ended()
    status, _ = end_of(stub, pids, directory)

    assert status == -signal.SIGKILL

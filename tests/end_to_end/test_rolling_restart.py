"""Two replicas behind nginx, restarted one after the other under load: no request fails."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.servers.launched_server import Server, serve
from tests.support.servers.ports import free_port
from tests.support.servers.programs.nginx import PROGRAM, nginx

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
FLAGS = ("--dtype", "float32", "--max-total-tokens", "1024", "--max-batch-prefill-tokens", "256")
USERS, NEW_TOKENS, LONG = 4, 24, 700

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(560),
    pytest.mark.skipif(PROGRAM is None, reason="nginx is not on PATH (package nginx)"),
]


@dataclass
class Load:
    """Outcomes of the requests so far: complete answers by route, and what failed."""

    complete: dict[str, int] = field(default_factory=lambda: {"/generate": 0, "/generate_stream": 0})
    failed: list[str] = field(default_factory=list)


def tokens_of(client: httpx.Client, path: str, new_tokens: int) -> int:
    """The tokens of one answer. Raises if it is an error."""
    parameters = {"max_new_tokens": new_tokens, "ignore_eos_token": True, "details": True}
    body = {"inputs": "The quick brown fox", "parameters": parameters}
    if path == "/generate":
        answer = client.post(path, json=body).raise_for_status()
        return len(answer.json()["details"]["tokens"])
    with client.stream("POST", path, json=body) as answer:
        lines = [line for line in answer.raise_for_status().iter_lines() if line]
    assert '"details":{' in lines[-1], lines[-1]
    return len(lines)


@contextlib.contextmanager
def load(url: str) -> Iterator[Load]:
    """Users that send one request after the other, until the block ends."""
    over, found = threading.Event(), Load()

    def use(path: str) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not over.is_set():
                try:
                    assert tokens_of(client, path, NEW_TOKENS) == NEW_TOKENS
                    found.complete[path] += 1
                except (httpx.HTTPError, AssertionError) as error:
                    found.failed.append(f"{path}: {error!r}")

    users = [threading.Thread(target=use, args=(list(found.complete)[number % 2],)) for number in range(USERS)]
    for user in users:
        user.start()
    try:
        yield found
    finally:
        over.set()
        for user in users:
            user.join()


def upstream(ports: list[int]) -> str:
    """The nginx configuration of the page, with the replicas' addresses."""
    found = re.search(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, "the page has no nginx configuration"
    blocks = found[1]
    for number, port in enumerate(ports, 1):
        blocks = blocks.replace(f"server-{number}:3000", f"127.0.0.1:{port}")
    return blocks


def served(server: Server) -> int:
    found = re.search(r"^tgi_request_success (\d+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    return int(found[1]) if found else 0


def stop_during_a_stream(server: Server) -> tuple[int, float]:
    """Send SIGTERM while a long stream runs; returns its tokens, and the seconds until the process ended."""
    tokens: list[int] = []

    def read() -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            tokens.append(tokens_of(client, "/generate_stream", LONG))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.3)
    server.process.terminate()
    started_s = time.monotonic()
    assert server.process.wait(timeout=90) == 0, server.output
    reader.join()
    return tokens[0], time.monotonic() - started_s


def test_a_rolling_restart_behind_nginx_fails_no_request(tmp_path: Path):
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as held:
        replicas = [held.enter_context(serve(*FLAGS, port=port)) for port in ports]
        url = held.enter_context(nginx(tmp_path, upstream(ports)))
        drained = []
        with load(url) as found:
            time.sleep(2)
            for number, port in enumerate(ports):
                drained.append(stop_during_a_stream(replicas[number]))
                replicas[number] = held.enter_context(serve(*FLAGS, port=port))
                assert replicas[number].get("/ready") == {}
                time.sleep(3)
        counts = [served(replica) for replica in replicas]

    print(f"complete: {found.complete}, drained in {[f'{seconds:.1f} s' for _, seconds in drained]}")
    assert found.failed == []
    assert min(found.complete.values()) > 10
    assert [tokens for tokens, _ in drained] == [LONG, LONG]
    # Each new process took requests.
    assert min(counts) > 0


def test_ready_is_503_during_the_delay_and_requests_are_still_taken():
    with serve(*FLAGS, "--shutdown-delay", "3") as server:
        before = httpx.get(f"{server.url}/ready").status_code
        server.process.terminate()
        while (ready := httpx.get(f"{server.url}/ready")).status_code == 200:
            time.sleep(0.05)
        health = httpx.get(f"{server.url}/health").status_code
        taken = server.token_ids("The quick brown fox", 4)
        assert server.process.wait(timeout=60) == 0, server.output

    assert (before, ready.status_code, ready.json()["error_type"], health, len(taken)) == (200, 503, "draining", 200, 4)

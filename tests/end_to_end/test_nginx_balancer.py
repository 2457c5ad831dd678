"""The exported balancer's configuration in a real nginx, before two replicas that answer with their own name."""

import contextlib
import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.programs.nginx import PROGRAM, nginx
from tuner.servers.nginx_balancer import LINES, PREFIX_CHARACTERS, nginx_balancer

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="nginx is not on PATH (package nginx-light)")


@contextlib.contextmanager
def replica(name: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(name)))
            self.end_headers()
            self.wfile.write(name.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextlib.contextmanager
def balancer(policy: str, folder: Path) -> Iterator[str]:
    with (
        replica("one") as first,
        replica("two") as second,
        nginx(folder, nginx_balancer(policy, [first, second])) as url,
    ):
        yield url


def replica_of(url: str, body: Any) -> str:
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        name: str = response.read().decode()
    return name


@pytest.mark.parametrize("policy", LINES)
def test_every_policy_uses_both_replicas(policy: str, tmp_path: Path):
    with balancer(policy, tmp_path) as url:
        seen = Counter(replica_of(url, {"inputs": f"{number} prompts"}) for number in range(40))

    assert set(seen) == {"one", "two"}
    assert min(seen.values()) >= 8


def shapes(start: str, number: int) -> list[Any]:
    """Requests of both APIs whose prompts begin with `start` and then differ."""
    text = f"{start} question {number}"
    return [
        {"parameters": {"max_new_tokens": number + 1}, "inputs": text},
        {"model": "tgi", "prompt": text},
        {"model": "tgi", "messages": [{"role": "system", "content": text}, {"role": "user", "content": f"{number}"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
    ]


@pytest.mark.parametrize("form", range(4))
def test_prompts_with_the_same_start_go_to_the_same_replica(form: int, tmp_path: Path):
    # A start has quotes, a backslash, a line feed and a letter beyond ASCII, and is longer than the hashed part.
    starts = [f'{group} "quoted" \\ \n é ' * PREFIX_CHARACTERS for group in range(12)]
    with balancer("prefix_hash", tmp_path) as url:
        replicas = [{replica_of(url, shapes(start, number)[form]) for number in range(5)} for start in starts]

    assert [len(names) for names in replicas] == [1] * len(starts)
    assert set().union(*replicas) == {"one", "two"}


def test_a_prompt_of_a_megabyte_still_has_a_start(tmp_path: Path):
    with balancer("prefix_hash", tmp_path) as url:
        replicas = {replica_of(url, {"inputs": f"{'a start ' * 40}{number}" + "x" * 1_000_000}) for number in range(8)}

    assert len(replicas) == 1

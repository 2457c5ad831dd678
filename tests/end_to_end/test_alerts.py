"""Every alert fires: a real Prometheus scrapes a router that is overloaded, then one whose model server hangs and dies.

The rules are those of `docs/grafana/alerts.yml` with their limits and shorter times.
"""

import asyncio
import contextlib
import json
import math
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pytest
import yaml

from benchmarks.operations.prometheus import Prometheus
from tests.support.servers.launched_server import Server, serve
from tests.support.servers.model_servers import ModelServers, model_servers
from tests.support.servers.programs.prometheus import PROGRAM, prometheus

RULES = Path(__file__).parents[2] / "docs" / "grafana" / "alerts.yml"
#: A range of minutes in the rules has this many seconds for each minute; `for` is one second.
SECONDS_PER_MINUTE = 4
UNREACHABLE = "127.0.0.1:9"
ALERT_LIMIT_S = 120
BLOCK_TOKENS = 16
#: Room for fewer than `PERMITS` requests of `MOST_BLOCKS` blocks.
MEMORY_GIB, MOST_BLOCKS, PERMITS = 0.03, 62, 40

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="prometheus is not on PATH (package prometheus)"),
]


def shortened(text: str) -> str:
    """The rules with shorter ranges, offsets and `for`."""
    text = re.sub(r"\bfor: \d+m", "for: 1s", text)
    return re.sub(r"(\[|offset )(\d+)m", lambda match: f"{match[1]}{int(match[2]) * SECONDS_PER_MINUTE}s", text)


@contextlib.contextmanager
def clients(server: Server, number: int) -> Iterator[None]:
    """Clients whose requests take all K/V blocks, in equal parts; a refused one tries again at once."""
    over = threading.Event()
    blocks = total_blocks(server)
    tokens = blocks // math.ceil(blocks / MOST_BLOCKS) * BLOCK_TOKENS

    def use(number: int) -> None:
        inputs = f"{number} is a number"
        parameters = {"max_new_tokens": tokens - BLOCK_TOKENS, "ignore_eos_token": True}
        while not over.wait(0.2):
            with contextlib.suppress(urllib.error.HTTPError, OSError):
                server.post("/generate", {"inputs": inputs, "parameters": parameters})

    users = [threading.Thread(target=use, args=(each,), daemon=True) for each in range(number)]
    for user in users:
        user.start()
    try:
        yield
    finally:
        over.set()


def total_blocks(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return int(re.findall(r"^tgi_total_blocks (\d+)$", text, re.MULTILINE)[0])


async def wait_until_ready(shards: ModelServers) -> None:
    await (await shards.connect()).close()


class Firing:
    """The alerts that have fired so far."""

    def __init__(self, source: Prometheus) -> None:
        self.seen: set[str] = set()
        self._source = source

    def wait_for(self, expected: Set[str], meanwhile: Callable[[], None] = lambda: time.sleep(0.5)) -> None:
        deadline_s = time.monotonic() + ALERT_LIMIT_S
        while not expected <= self.seen:
            alerts = self._source.api("alerts")["alerts"]
            self.seen |= {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}
            assert time.monotonic() < deadline_s, f"not fired: {expected - self.seen}"
            meanwhile()


def slow_down(process: subprocess.Popen[bytes]) -> Callable[[], None]:
    """Lets the process run for a short time, then stops it for longer than the limit between two tokens."""

    def step() -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.4)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.02)

    return step


def test_every_alert_fires(tmp_path: Path):
    rules = tmp_path / "alerts.yml"
    rules.write_text(shortened(RULES.read_text()))
    names = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    limits = ("--max-input-tokens", "64", "--max-total-tokens", "1024", "--max-batch-prefill-tokens", "64")
    limits += ("--max-concurrent-requests", str(PERMITS))
    with model_servers("preset:tiny-llama", "--cpu-memory-gib", str(MEMORY_GIB), tcp=True) as shards:
        asyncio.run(wait_until_ready(shards))
        (shard,) = shards.processes
        address = shards.addresses[0].removeprefix("tcp://")
        with (
            serve("--no-shards", "--shard-addr", address, *limits) as server,
            prometheus(tmp_path, [f"127.0.0.1:{server.port}", UNREACHABLE], rules) as source,
            clients(server, PERMITS + 8),
        ):
            firing = Firing(source)
            firing.wait_for({"TgiDown", "TgiOverloaded", "TgiQueueNeverEmpty", "TgiCacheFull"})
            # Requests that waited for the blocks of the first ones get their first token.
            firing.wait_for({"TgiSlowFirstToken"})
            firing.wait_for({"TgiSlowTokens"}, meanwhile=slow_down(shard))
            assert "TgiStalled" not in firing.seen
            assert "TgiGenerationFailures" not in firing.seen
            shard.send_signal(signal.SIGSTOP)
            firing.wait_for({"TgiStalled"})
            shard.kill()
            firing.wait_for({"TgiGenerationFailures"})
            print(json.dumps(sorted(firing.seen)))

    assert firing.seen == names
    assert len(names) == 8

"""The Grafana board and the alerts with a real Prometheus that scrapes a launched server under load."""

import contextlib
import json
import math
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.launched_server import Server
from tests.support.servers.prometheus import PROGRAM, prometheus

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana"
#: Prompts share a prefix of several K/V blocks.
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
#: Scrapes that a rate is computed from, one each second.
RATE_S = 10

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="prometheus is not on PATH (package prometheus)"),
]


@contextlib.contextmanager
def load(server: Server) -> Iterator[None]:
    """Three users and one whose requests are refused, until the block ends."""
    over = threading.Event()

    def use(number: int) -> None:
        while not over.is_set():
            server.token_ids(f"{PROMPT} {number}", 24)

    def refused() -> None:
        while not over.wait(0.3):
            with contextlib.suppress(urllib.error.HTTPError):
                server.post("/generate", {"inputs": ""})

    users = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    users.append(threading.Thread(target=refused))
    for user in users:
        user.start()
    try:
        yield
    finally:
        over.set()
        for user in users:
            user.join()


def queries() -> dict[str, str]:
    """Every query of the board by its panel and legend, with the variables filled in as Grafana does."""
    panels = json.loads((GRAFANA / "board.json").read_text())["panels"]
    found = {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", ())
    }
    fill = {"$job": "tgi", "$instance": ".*", "$__rate_interval": f"{RATE_S}s"}
    for variable, text in fill.items():
        found = {name: query.replace(variable, text) for name, query in found.items()}
    return found


def test_every_query_of_the_board_has_data_and_every_alert_is_evaluated(server: Server, tmp_path: Path):
    with prometheus(tmp_path, [f"127.0.0.1:{server.port}"], GRAFANA / "alerts.yml") as found, load(server):
        time.sleep(RATE_S + 5)
        values = {name: found.values(query) for name, query in queries().items()}
        groups = found.api("rules")["groups"]

    assert len(values) >= 30
    assert {name: each for name, each in values.items() if not each or not all(map(math.isfinite, each))} == {}
    assert values["Replicas: replicas"] == [1.0]
    assert 0 < values["K/V blocks in use: {{instance}}"][0] < 1
    assert 0 < values["Prefix cache: hit share"][0] < 1
    assert values["Tokens per decode step: mean"][0] > 1
    assert values["Time to first token: p50"][0] < values["Whole request: p50"][0]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"]: rule["health"] for rule in rules} == {rule["name"]: "ok" for rule in rules}
    assert {rule["name"]: rule["state"] for rule in rules} == {rule["name"]: "inactive" for rule in rules}


def test_a_stopped_replica_is_down_for_prometheus(server: Server, tmp_path: Path):
    unreachable = "127.0.0.1:9"
    with prometheus(tmp_path, [f"127.0.0.1:{server.port}", unreachable], GRAFANA / "alerts.yml") as found:
        deadline_s = time.monotonic() + 30
        while not (alerts := found.api("alerts")["alerts"]):
            assert time.monotonic() < deadline_s, "no alert is pending"
            time.sleep(0.5)

    assert [(each["labels"]["alertname"], each["labels"]["instance"]) for each in alerts] == [("TgiDown", unreachable)]
    assert {each["state"] for each in alerts} == {"pending"}

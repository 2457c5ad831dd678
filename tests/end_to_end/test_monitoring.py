"""The Grafana board and the alerts with a real Prometheus that scrapes a launched server under load."""

import contextlib
import math
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.operations.board import board_queries
from benchmarks.operations.board_values import board_lines
from reference_server.model_files import locate_local
from tests.support.models.adapters import save_adapter
from tests.support.servers.launched_server import Server, serve
from tests.support.servers.programs.prometheus import PROGRAM, prometheus

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
            with contextlib.suppress(urllib.error.HTTPError):
                server.post("/generate", {"inputs": PROMPT, "parameters": {"adapter_id": "clerk", "max_new_tokens": 8}})

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with drafts and a LoRA adapter."""
    files = locate_local("preset:tiny-llama")
    assert files is not None, "the preset is in the package"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(files.directory))
    folder = tmp_path_factory.mktemp("adapters") / "clerk"
    adapter = save_adapter(folder, model, rank=2, base_model_name_or_path=str(files.directory))
    with serve("--speculate", "3", "--speculate-adaptive", "false", "--lora-adapters", f"clerk={adapter}") as launched:
        yield launched


def test_every_query_of_the_board_has_data_and_every_alert_is_evaluated(server: Server, tmp_path: Path):
    queries = board_queries(RATE_S)
    with prometheus(tmp_path, [f"127.0.0.1:{server.port}"], GRAFANA / "alerts.yml") as found, load(server):
        time.sleep(RATE_S + 5)
        values = {query.name: found.values(query.expression) for query in queries}
        print("\n".join(board_lines(queries, found.values)))
        groups = found.api("rules")["groups"]

    assert len(values) >= 35
    assert {name: each for name, each in values.items() if not each or not all(map(math.isfinite, each))} == {}
    assert values["Replicas: replicas"] == [1.0]
    assert 0 < values["K/V blocks in use: {{instance}}"][0] < 1
    assert 0 < values["Prefix cache: hit share"][0] < 1
    assert values["Tokens per decode step: mean"][0] > 1
    assert values["Time to first token: p50"][0] < values["Whole request: p50"][0]
    assert 0 <= values["Accepted drafts: accepted"][0] <= 1
    assert len(values["Accepted drafts by position: {{position}}"]) >= 1
    assert values["Generations by adapter: {{adapter}}"][0] > 0
    assert values["Loaded adapters: {{instance}}"] == [1.0]
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

"""The prefix cache with default settings: on, and visible to clients and in the metrics."""

import json
import urllib.request

import pytest

from tests.support.servers.launched_server import Server

PROMPT_TOKENS = 2000


@pytest.fixture(scope="module")
def system_prompt(server: Server) -> str:
    """A text of about 2,000 tokens."""
    text = "The assistant answers in one line and names the river. "
    tokens = len(server.post("/tokenize", {"inputs": text * 10}))
    return text * (10 * PROMPT_TOKENS // tokens)


def metric(server: Server, name: str) -> int:
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(f"{name} "))


def chat(server: Server, system: str, question: str) -> dict:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0})


def test_an_identical_system_prompt_is_computed_once(server, system_prompt):
    hits, prompts = metric(server, "tgi_prefix_hit_tokens"), metric(server, "tgi_prompt_tokens")

    usages = [chat(server, system_prompt, f"Question {number}?")["usage"] for number in range(4)]

    assert all(usage["prompt_tokens"] > PROMPT_TOKENS * 0.9 for usage in usages)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    # All of it but the last, partly filled block.
    assert all(usages[0]["prompt_tokens"] - tokens < 64 for tokens in cached[1:])
    assert metric(server, "tgi_prefix_hit_tokens") - hits == sum(cached)
    assert metric(server, "tgi_prompt_tokens") - prompts - sum(cached) < usages[0]["prompt_tokens"] + 3 * 64


@pytest.mark.slow
def test_details_and_streams_count_the_cached_tokens(server, system_prompt):
    body = {"inputs": system_prompt + "And then", "parameters": {"max_new_tokens": 3, "details": True}}
    first = server.post("/generate", body)

    second = server.post("/generate", body)
    request = urllib.request.Request(
        server.url + "/generate_stream", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        last = [json.loads(line[5:]) for line in response if line.startswith(b"data:")][-1]

    assert first["details"]["cached_input_tokens"] == 0
    assert second["details"]["cached_input_tokens"] > PROMPT_TOKENS * 0.9
    assert last["details"]["cached_input_tokens"] == second["details"]["cached_input_tokens"]
    assert [token["id"] for token in second["details"]["tokens"]] == [
        token["id"] for token in first["details"]["tokens"]
    ]


def test_config_shows_why_the_prefix_cache_is_on(server):
    setting = server.get("/config")["prefix_caching"]

    assert (setting["value"], setting["source"]) == (True, "derived")
    assert setting["reason"]

"""Launcher, shards, router and clients as processes on loopback."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests.support.servers.launched_server import is_running, serve

PROMPTS = ["Testing API", "One day", "The list: one, two,", "Why do we test the server every day before the release?"]


def test_a_request_is_answered(server):
    answer = server.post("/generate", {"inputs": "Testing API", "parameters": {"max_new_tokens": 9}})

    assert list(answer) == ["generated_text"]
    assert answer["generated_text"]


def test_requests_that_join_and_leave_a_running_batch_get_the_tokens_they_get_alone(server):
    lengths = [6, 20, 12, 30]
    alone = [server.token_ids(prompt, length) for prompt, length in zip(PROMPTS, lengths, strict=True)]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        work = [(prompt, length) for _ in range(4) for prompt, length in zip(PROMPTS, lengths, strict=True)]
        together = list(pool.map(lambda each: server.token_ids(*each), work))

    assert together == alone * 4


def test_different_requests_share_one_forward(server):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: server.token_ids(f"{number} {PROMPTS[1]}", 40), range(8)))

    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        metrics = response.read().decode()
    counted = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    decodes = int(counted['tgi_batch_inference_count{method="decode"}'])
    tokens = float(counted["tgi_request_generated_tokens_sum"])
    assert decodes < tokens / 2


def test_the_answer_of_a_stream_is_the_answer_of_a_call(server):
    parameters = {"max_new_tokens": 10, "details": True}
    request = urllib.request.Request(
        server.url + "/generate_stream",
        json.dumps({"inputs": PROMPTS[0], "parameters": parameters}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [json.loads(line[5:]) for line in response if line.startswith(b"data:")]

    call = server.post("/generate", {"inputs": PROMPTS[0], "parameters": parameters})
    assert events[-1]["generated_text"] == call["generated_text"]
    assert [event["token"]["id"] for event in events] == [token["id"] for token in call["details"]["tokens"]]


def test_the_model_calls_a_tool_and_its_stream_is_the_same_call(server):
    arguments = {"properties": {"a": {"enum": [1, 2, 30]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    body = {
        "messages": [{"role": "user", "content": "Add them."}],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": arguments}}],
        "tool_choice": "required",
        "seed": 7,
    }
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        deltas = [json.loads(line[5:])["choices"][0] for line in response if line.startswith(b"data: {")]

    (choice,) = server.post("/v1/chat/completions", body)["choices"]
    function = choice["message"]["tool_calls"][0]["function"]
    called = json.loads(function["arguments"])
    streamed = "".join(delta["delta"]["tool_calls"][0]["function"]["arguments"] for delta in deltas)
    assert (function["name"], choice["finish_reason"]) == ("add", "tool_calls")
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert (called["a"] in (1, 2, 30), isinstance(called["b"], bool), len(called)) == (True, True, 2)
    assert json.loads(streamed) == called


@pytest.mark.slow
def test_two_shards_answer_as_one_and_the_death_of_one_ends_everything(server):
    alone = [server.token_ids(prompt) for prompt in PROMPTS]

    with serve("--dtype", "float32", "--num-shard", "2", "--max-total-tokens", "512") as sharded:
        assert [sharded.token_ids(prompt) for prompt in PROMPTS] == alone

        children = sharded.children()
        victim = next(pid for pid, environment in children.items() if environment.get("RANK") == "1")
        os.kill(victim, signal.SIGKILL)
        sharded.process.wait(timeout=60)
        output = sharded.output

    assert sharded.process.returncode == 1
    assert "rank=1" in output or "shard 1" in output.lower()
    assert "Error: ShardFailed" in output
    assert not any(is_running(pid) for pid in children)


@pytest.mark.slow
def test_a_bench_run_accounts_for_every_request_and_reports(server, tmp_path):
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "loadgen.cli",
        "run",
        "--url",
        server.url,
        "--requests",
        "60",
        "--concurrency",
        "8",
    ]
    command += ["--input-tokens", "uniform:16,64", "--output-tokens", "16", "--out", str(out), "--json"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode in (0, 4), done.stderr  # 4: this machine may be too busy for a valid measurement
    summary = json.loads(done.stdout)
    assert summary["counts"]["ok"] == sum(summary["counts"].values()) == 60
    assert summary["workload"]["finish_reasons"] == {"length": 60}
    assert {path.name for path in out.iterdir()} >= {"report.html", "report.md", "manifest.json", "requests.parquet"}
    assert json.loads((out / "manifest.json").read_text())["length_control"] == "forced"


@pytest.mark.slow
def test_a_small_study_measures_real_launches_and_its_best_is_served(tmp_path):
    common = [sys.executable, "-m", "tuner.cli"]
    flags = ["run", "--study", "s", "--trials", "2", "--rounds", "0", "--concurrency", "8", "--warmup", "0.5s"]
    flags += ["--duration", "3s", "--input-tokens", "32", "--output-tokens", "8"]

    done = subprocess.run([*common, *flags], capture_output=True, text=True, timeout=900, cwd=tmp_path)

    assert done.returncode in (0, 4), done.stderr
    results = sorted((tmp_path / "studies/s/trials").glob("*/result.json"))
    assert results, done.stderr
    assert (tmp_path / "studies/s/trials/0000/server.log").exists()


@pytest.mark.slow
def test_reliability_Q13_grammars_that_explode_delay_no_other_request(server):
    """Workers refuse them only after long work; another stream continues meanwhile."""
    optional = {f"p{number}": {"type": "string"} for number in range(3000)}
    wide = "x{50}" + "".join(f"[{letter}-z]?" for letter in "abcdefgh" * 500)
    grammars = [{"type": "json", "value": {"properties": optional}}, {"type": "regex", "value": wide}]
    request = urllib.request.Request(
        server.url + "/generate_stream",
        json.dumps({"inputs": PROMPTS[1], "parameters": {"max_new_tokens": 1000, "ignore_eos_token": True}}).encode(),
        {"Content-Type": "application/json"},
    )

    def refused(grammar: dict) -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.post("/generate", {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 9, "grammar": grammar}})
        return caught.value.code, json.loads(caught.value.read())["error"]

    with concurrent.futures.ThreadPoolExecutor(2) as pool, urllib.request.urlopen(request, timeout=60) as mate:
        mate.readline()
        refusals = [pool.submit(refused, grammar) for grammar in grammars]
        meanwhile = 0
        while not all(refusal.done() for refusal in refusals):
            meanwhile += mate.readline().startswith(b"data:")
        rest = mate.read().count(b"data:")

    assert meanwhile >= 1
    assert meanwhile + rest == 999
    for refusal in refusals:
        status, error = refusal.result()
        assert (status, "too complex" in error) == (422, True)

"""Resets of the prefix cache: confirmed by a prompt without cached tokens, or the run ends."""

import itertools

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import TargetError, UsageError
from loadgen.gate.live_runs import LiveMeasure
from loadgen.gate.sides import LiveSide, RunningServer
from loadgen.progress import SilentProgress
from loadgen.runner import measure
from loadgen.target import cache_reset
from loadgen.target.target import Target
from tests.support.servers.stream_server import Script, ServerState, stream_server

LOAD = BenchConfig(requests=2, concurrency=1, input_tokens="8", output_tokens="2", reset_cache=True)


def cleared(state):
    state.known_prompts.clear()
    return 200, {"success": True}


def run(state, folder, config=LOAD):
    with stream_server(state) as (url, _):
        return measure(config, Target(url), folder / "r")


def server(owner, reset=cleared, known=()):
    return ServerState(has_info=False, owner=owner, known_prompts=set(known), reset=reset)


@pytest.mark.parametrize(
    ("owner", "paths"),
    [
        pytest.param("vllm", ["/reset_prefix_cache"], marks=pytest.mark.slow),
        pytest.param("sglang", ["/flush_cache"], marks=pytest.mark.slow),
        ("llamacpp", ["/slots/0?action=erase", "/slots/1?action=erase"]),
    ],
)
def test_a_reset_is_confirmed_by_a_known_prompt_without_cached_tokens(owner, paths, tmp_path):
    state = server(owner)

    result = run(state, tmp_path)

    assert [request["path"] for request in state.requests if request["body"] == {}] == paths
    confirmed = result.manifest.target["cache_reset"]
    assert confirmed.startswith("confirmed: ")
    assert confirmed.endswith(" cached tokens of a known prompt before, 0 after")


@pytest.mark.slow
def test_a_busy_server_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_reset, "POLL_S", 0.0)
    replies = itertools.chain([(200, {"success": False}), (400, {})], itertools.repeat(None))

    def reset(state):
        return next(replies) or cleared(state)

    assert run(server("vllm", reset), tmp_path).manifest.target["cache_reset"].startswith("confirmed")


def test_a_reset_that_empties_nothing_ends_the_run(tmp_path):
    with pytest.raises(TargetError, match=r"after the reset .* still had \d+ cached tokens .*--cache-ram 0"):
        run(server("llamacpp", lambda _: (200, {})), tmp_path)


def test_a_route_that_is_off_is_named_with_its_setting(tmp_path):
    with pytest.raises(TargetError, match=r"/reset_prefix_cache: status 404: .*start vLLM with VLLM_SERVER_DEV_MODE=1"):
        run(server("vllm", lambda _: (404, {})), tmp_path)


def test_without_reported_tokens_a_reset_cannot_be_confirmed(tmp_path):
    state = ServerState(has_info=False, owner="vllm", reset=lambda _: (200, {"success": True}))

    with pytest.raises(TargetError, match="cannot be confirmed; leave out --reset-cache"):
        run(state, tmp_path)


def test_servers_1_cached_tokens_are_counted_where_the_metrics_are(tmp_path):
    """A front has no metrics of its own, and the server behind it counts the tokens of known prompts."""
    behind = ServerState(metrics="vllm:prefix_cache_hits_total 0\n")
    known, hits = set(), itertools.count(240, 240)

    def script(body):
        text = body["messages"][0]["content"]
        if text in known:
            behind.metrics = f"vllm:prefix_cache_hits_total {next(hits)}\n"
        known.add(text)
        return Script()

    def reset(_):
        known.clear()
        return 200, {"success": True}

    state = ServerState(has_info=False, owner="vllm", has_metrics=False, script=script, reset=reset)
    with stream_server(behind) as (metrics_url, _):
        result = run(state, tmp_path, LOAD.model_copy(update={"metrics_url": (f"{metrics_url}/metrics",)}))

    reset = result.manifest.target["cache_reset"]
    assert reset == "confirmed: 240 cached tokens of a known prompt before, 0 after"


def test_a_server_without_a_route_is_refused(tmp_path):
    with pytest.raises(UsageError, match="`reset_cache` is true, but TGI has no route"):
        run(ServerState(), tmp_path, LOAD.model_copy(update={"engine": "tgi"}))


@pytest.mark.slow
@pytest.mark.parametrize("resets", [True, False])
def test_sides_of_a_pair_share_their_texts_after_a_reset(resets, tmp_path):
    salts = []
    load = LOAD.model_copy(update={"reset_cache": resets})
    with stream_server(server("vllm")) as (url, _):
        sides = [LiveSide(letter, letter, RunningServer(url)) for letter in "ab"]
        for side in sides:
            directory = tmp_path / f"1-{side.letter}"
            take = LiveMeasure(load, (), SilentProgress(), base="base")
            take(side, directory)
            salts.append(next(directory.rglob("manifest.json")).read_text().split('"salt": "')[1].split('"')[0])

    assert (salts[0] == salts[1]) is resets

"""Whole runs through APIs other than TGI's and OpenAI's: paths, framing, detection and counts of each."""

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import TargetError, UsageError
from loadgen.preparation.length_control import choose_length_control
from loadgen.runner import measure
from loadgen.target.server_kind import is_messages_error
from loadgen.target.target import Target
from reports.run_schema import Phase, Status
from tests.support.servers.dialect_server import Dialects, dialect_server
from tests.support.servers.stream_server import ServerState, stream_server

LOAD = {"requests": 3, "concurrency": 1, "input_tokens": "16", "output_tokens": "4"}


def run(folder, state, **fields):
    with dialect_server(state) as url:
        return measure(BenchConfig(**LOAD, **fields), Target(url), folder / "r")


def measured(result):
    """The records of the window; a closed loop goes on until its last one has ended."""
    return [each for each in result.records if each.phase == Phase.MEASURE]


def test_ollama_is_recognised_and_measured(tmp_path):
    state = Dialects()
    result = run(tmp_path, state)

    target = result.manifest.target
    assert (target["engine"], target["api"], target["model"]) == ("ollama", "ollama-chat", "tiny:latest")
    assert target["engine_detected_by"] == "/api/version is 0.13.1"
    records = measured(result)
    assert [(each.status, each.output_tokens) for each in records] == [(Status.OK, 4)] * 3
    # The template has five tokens, one of which is the special one that generated lengths include.
    assert {each.input_tokens - each.planned_input_tokens for each in records} == {0}
    assert {request["path"] for request in state.requests} == {"/api/chat"}


def test_anthropics_api_is_measured_where_it_is_named(tmp_path):
    state = Dialects(answers_messages=True)
    result = run(tmp_path, state, api="anthropic", model="claude")

    assert [(each.status, each.output_tokens) for each in measured(result)] == [(Status.OK, 4)] * 3
    assert {(each.finish_reason, each.cached_input_tokens) for each in measured(result)} == {("max_tokens", 4)}
    assert result.manifest.length_control == "capped"


@pytest.mark.slow
def test_servers_1_anthropics_api_is_recognised_by_its_refusal_of_an_empty_request(tmp_path):
    state = Dialects(answers_messages=True)

    target = run(tmp_path, state, model="claude").manifest.target

    assert (target["engine"], target["api"], target["model"]) == ("anthropic", "anthropic", "claude")
    assert target["engine_detected_by"] == "/v1/messages refuses an empty request as Anthropic's API does"
    assert state.requests[0] == {"path": "/v1/messages", "body": {}}


def test_servers_1_anthropics_api_is_recognised_by_its_list_of_models(tmp_path):
    state = Dialects(answers_messages=True, models=("claude", "opus"))

    target = run(tmp_path, state).manifest.target

    assert (target["engine"], target["api"], target["model"]) == ("anthropic", "anthropic", "claude")
    assert all(request["body"] for request in state.requests)


def test_servers_1_anthropics_api_without_a_list_needs_a_model():
    with (
        dialect_server(Dialects(answers_messages=True)) as url,
        pytest.raises(TargetError, match="it has Anthropic's /v1/messages, but lists no models; give --model"),
    ):
        Target(url).facts()


@pytest.mark.parametrize(
    ("reply", "is_error"),
    [
        ({"type": "error", "error": {"type": "authentication_error", "message": "x"}}, True),
        ({"type": "error", "error": {"type": "not_found_error", "message": "/v1/messages"}}, False),
        ({"error": {"type": "invalid_request_error", "message": "OpenAI's form"}}, False),
        ({"type": "error", "error": "x"}, False),
        ({"detail": "Not Found"}, False),
        (["error"], False),
    ],
)
def test_an_error_of_anthropics_api_is_distinguished_from_others(reply, is_error):
    assert is_messages_error(reply) is is_error


def test_a_server_of_no_known_api_lists_the_apis():
    with (
        stream_server(ServerState(has_info=False, has_models=False)) as (url, _),
        pytest.raises(TargetError, match=r"neither /info nor /v1/models answers .*anthropic"),
    ):
        Target(url).facts()


@pytest.mark.parametrize("api", ["anthropic", "ollama-chat"])
def test_an_api_without_forced_lengths_refuses_them(api):
    with dialect_server(Dialects()) as url:
        facts = Target(url).facts(api, "m", "vllm")

    assert choose_length_control(BenchConfig(), facts) == "capped"
    with pytest.raises(UsageError, match=f"vLLM cannot force lengths by API '{api}'"):
        choose_length_control(BenchConfig(length_control="forced"), facts)

"""Workloads and blocking calls through the whole client, against a scripted server."""

import itertools
import json

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.runner import measure
from loadgen.target.target import Target
from loadgen.workloads import arrivals
from reports.metrics.summary import summarize
from tests.support.measured_requests import measured
from tests.support.servers.stream_server import Script, ServerState


@pytest.fixture
def state():
    return ServerState(script=lambda body: Script(first_s=0.01, gap_s=0.002))


def prompts_sent(state):
    return [request["body"]["inputs"] for request in state.requests if request["path"] != "/tokenize"]


def by_session(result):
    key = lambda record: record.session_id  # noqa: E731 - groupby wants the same one twice
    return [list(turns) for _, turns in itertools.groupby(sorted(measured(result), key=key), key)]


def test_sessions_start_on_schedule_and_their_turns_follow_the_answers(url, state, tmp_path):
    # Turns are in flight at the window's end, and the sessions go on in the drain.
    state.script = lambda body: Script(first_s=0.15)
    config = BenchConfig(
        mode="sessions",
        workload="multi_turn",
        rate=20,
        duration=0.5,
        warmup=0,
        turns="3",
        input_tokens="6",
        output_tokens="4",
        think_time=0.02,
    )

    result = measure(config, Target(url), tmp_path / "r")

    sessions = [sorted(turns, key=lambda record: record.turn) for turns in by_session(result)]
    assert len(sessions) == len(arrivals.schedule(arrivals.Gamma(20).times(0), duration_ns=500_000_000).times_ns)
    for turns in sessions:
        for before, after in itertools.pairwise(turns):
            assert before.t_end_ns + 20_000_000 <= after.t_intended_ns <= after.t_sent_ns
    # On a busy machine the window may end before any third turn.
    assert 2 <= max(len(turns) for turns in sessions) <= 3
    assert {record.turn for record in result.records if record.phase == "drain"} >= {1}
    assert {record.input_tokens for turns in sessions for record in turns if record.turn == 1} <= {16}


@pytest.mark.slow
def test_a_closed_loop_user_finishes_a_session_before_the_next(url, state, tmp_path):
    config = BenchConfig(
        workload="multi_turn", concurrency=2, requests=12, turns="3", input_tokens="6", output_tokens="4"
    )

    result = measure(config, Target(url), tmp_path / "r")

    sessions = [[record.turn for record in sorted(turns, key=lambda r: r.t_sent_ns)] for turns in by_session(result)]
    assert all(turns == list(range(len(turns))) for turns in sessions)
    assert sum(map(len, sessions)) == 12
    assert sum(len(turns) < 3 for turns in sessions) <= 2


def test_a_warm_cache_has_seen_every_prefix_before_the_load(url, state, tmp_path):
    config = BenchConfig(
        workload="shared_prefix",
        prefix_groups=3,
        prefix_tokens=12,
        prefix_cache="warm",
        requests=6,
        input_tokens="4",
        output_tokens="2",
    )

    result = measure(config, Target(url), tmp_path / "r")

    prefixes, texts = prompts_sent(state)[:3], prompts_sent(state)[3:]
    assert len(measured(result)) == 6
    assert all(any(text.startswith(prefix) for prefix in prefixes) for text in texts)
    assert result.client["server_requests"] == len(texts) == len(result.records)
    assert result.manifest.prefix_cache == "warm"


@pytest.mark.slow
def test_sharegpt_requests_answers_as_long_as_those_in_the_file(url, state, tmp_path):
    file = tmp_path / "sharegpt.json"
    turns = [[("human", "one two"), ("gpt", "a b c")], [("human", "three"), ("gpt", "d e f g h")]]
    rows = [{"conversations": [{"from": who, "value": what} for who, what in each]} for each in turns]
    file.write_text(json.dumps(rows))
    config = BenchConfig(workload="sharegpt", prompts_file=str(file), requests=2, concurrency=1, salt="off")

    result = measure(config, Target(url), tmp_path / "r")

    assert prompts_sent(state)[:2] == ["one two", "three"]
    assert [record.output_tokens for record in measured(result)] == [3, 5]


@pytest.mark.slow
def test_stages_send_as_many_as_the_area_under_the_rate(url, tmp_path):
    config = BenchConfig(mode="stages", stages="500ms:40,500ms:0", input_tokens="6", output_tokens="2")

    result = measure(config, Target(url), tmp_path / "r")

    intended = sorted(record.t_intended_ns for record in measured(result))
    assert len(intended) == 19  # the twentieth would start at the end itself
    assert sum(at < 500_000_000 for at in intended) in (9, 10)
    assert result.manifest.stop_reason == "duration"


@pytest.mark.parametrize(
    "api", ["tgi", *(pytest.param(api, marks=pytest.mark.slow) for api in ("openai-chat", "openai-completions"))]
)
def test_metrics_5_a_blocking_call_has_no_ttft_and_keeps_the_servers_times(url, state, tmp_path, api):
    config = BenchConfig(api=api, stream=False, requests=3, input_tokens="6", output_tokens="4")

    result = measure(config, Target(url), tmp_path / "r")

    records = measured(result)
    assert [record.status for record in records] == ["ok"] * 3
    assert {(record.events, record.t_first_ns, record.output_tokens) for record in records} == {(0, None, 4)}
    summary = summarize(result)
    assert summary["metrics"]["ttft_s"]["count"] == 0
    assert summary["metrics"]["e2e_s"]["count"] == 3
    assert summary["rates"]["output_tokens_per_s"]["value"] > 0
    if api == "tgi":
        times = {(record.srv_validation_s, record.srv_queue_s, record.srv_inference_s) for record in records}
        assert times == {(0.001, 0.002, 0.015)}
        assert summary["metrics"]["outside_server_s"]["count"] == 3


@pytest.mark.parametrize(
    ("api", "answer"), [pytest.param("tgi", "done", marks=pytest.mark.slow), ("openai-chat", " 1 2 3 4")]
)
def test_metrics_9_turns_repeat_the_servers_real_answers(url, state, tmp_path, api, answer):
    load = {"workload": "multi_turn", "turns": "3", "input_tokens": "6", "output_tokens": "4", "requests": 6}

    result = measure(BenchConfig(**load, api=api, assistant="real", concurrency=1), Target(url), tmp_path / "r")

    bodies = [request["body"] for request in state.requests if request["path"] != "/tokenize"]
    assert {record.status for record in measured(result)} == {"ok"}
    # Without the requests that measure the chat template.
    bodies = [body for body in bodies if body.get("max_tokens") != 1]
    if api == "tgi":
        first, second, third = (body["inputs"] for body in bodies[:3])
        assert second.startswith(first + answer + " ")
        assert third.startswith(second + answer + " ")
    else:
        said = [[m["content"] for m in body["messages"] if m["role"] == "assistant"] for body in bodies[:4]]
        assert said == [[], [answer], [answer, answer], []]


@pytest.mark.slow
def test_a_turn_that_was_clipped_to_the_limits_stays_scripted(url, state, tmp_path):
    state.max_input_tokens = 12
    load = {"workload": "multi_turn", "turns": "2", "input_tokens": "6", "output_tokens": "4", "requests": 2}

    result = measure(BenchConfig(**load, assistant="real", concurrency=1), Target(url), tmp_path / "r")

    assert [record.status for record in measured(result)] == ["ok", "ok"]
    assert "done" not in prompts_sent(state)[1]
    assert result.manifest.clipped["requests"] == 1

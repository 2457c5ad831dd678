"""A load over several URLs, against scripted servers of known speed."""

import contextlib
from dataclasses import replace

import pytest

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import TargetError, UsageError
from loadgen.runner import measure
from loadgen.target.access import Access
from loadgen.target.metrics_source import metrics_sources
from loadgen.target.target import Target
from reports.metrics.measured import Measured
from reports.metrics.replicas import replicas_table
from reports.metrics.server.server_replicas import server_replicas_table
from reports.metrics.server.server_series import server_summary
from reports.metrics.summary import Analysis
from reports.pages.run_page import build_run_report
from reports.renderers.markdown import render
from tests.support.measured_requests import measured
from tests.support.servers.stream_server import Script, ServerState, stream_server

LOAD = {"input_tokens": "8", "output_tokens": "4", "warmup": 0, "concurrency": 4}
FIRST_S = (0.05, 0.2)


@pytest.fixture
def states():
    return [ServerState(script=lambda body, s=first_s: Script(first_s=s, gap_s=0.002)) for first_s in FIRST_S]


@pytest.fixture
def urls(states):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(stream_server(state))[0] for state in states]


def run(urls, tmp_path, **load):
    return measure(BenchConfig(url=urls, **(LOAD | load)), Target(urls[0]), tmp_path / "r")


def generations(state):
    return sum(request["path"] != "/tokenize" for request in state.requests)


def test_servers_6_round_robin_sends_each_replica_the_same_number(urls, states, tmp_path):
    result = run(urls, tmp_path, requests=12)

    counts = [sum(record.replica == number for record in result.records) for number in (0, 1)]
    assert abs(counts[0] - counts[1]) <= 1
    assert counts == [generations(state) for state in states]
    assert result.manifest.target["replicas"] == urls[1:]


def test_servers_6_least_in_flight_sends_the_slow_replica_less(urls, tmp_path):
    result = run(urls, tmp_path, requests=60, balance="least_in_flight")

    fast, slow = (sum(record.replica == number for record in measured(result)) for number in (0, 1))
    assert fast > 1.5 * slow


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_servers_6_the_report_has_a_row_for_each_replica_with_its_own_times(urls, states, tmp_path, workers):
    result = run(urls, tmp_path, requests=40, workers=workers)

    table = replicas_table(Measured.of(result))
    assert list(table["replica"]) == urls
    assert table["requests"].sum() == len(measured(result)) == 40
    for (_, row), first_s in zip(table.iterrows(), FIRST_S, strict=True):
        own = [record for record in measured(result) if record.replica == urls.index(row["replica"])]
        ttft_ms = sorted((record.t_first_ns - record.t_sent_ns) / 1e6 for record in own)
        assert row["requests"] == len(own)
        assert 1e3 * first_s <= ttft_ms[0] <= row["TTFT p50, ms ↓"] <= ttft_ms[-1]
    rates = Analysis.of(result).summary["rates"]
    assert table["output tokens/s ↑"].sum() == pytest.approx(rates["output_tokens_per_s"]["value"])
    assert table["in flight, mean"].sum() == pytest.approx(rates["concurrency_mean"]["value"])
    assert b"## Replicas" in render(build_run_report([Analysis.of(result)]))
    assert result.client["server_requests"] == sum(map(generations, states))


def test_servers_1_metrics_of_all_replicas_are_summed_and_shown_one_by_one(urls, states, tmp_path):
    for number, state in enumerate(states):
        state.metrics = f"tgi_request_count {3 * number}\ntgi_batch_current_max_tokens {number + 1}\n"
    result = run(urls, tmp_path, requests=8)

    rows = [row for row in result.server_metrics if row["name"] == "tgi_batch_current_max_tokens"]
    assert {row["labels"]: row["value"] for row in rows} == {f'replica="{urls[0]}"': 1.0, f'replica="{urls[1]}"': 2.0}
    always = replace(Measured.of(result).window, start_s=-60.0, end_s=60.0)
    assert server_summary(result.server_metrics, always)["batch_tokens"]["mean"] == 3.0
    each = server_replicas_table(result.server_metrics, always).set_index("server metric")
    assert list(each.loc["Tokens in the batch", urls]) == [1.0, 2.0]
    assert b"By replica" in render(build_run_report([Analysis.of(result)]))


@pytest.mark.slow
def test_servers_1_metrics_are_read_from_another_place_without_the_key(urls, states, tmp_path):
    with stream_server(ServerState(metrics="tgi_queue_size 7\n")) as (metrics_url, other):
        result = run(urls[:1], tmp_path, requests=2, drain="1s", metrics_url=f"{metrics_url}/metrics", api_key="secret")

        assert {row["value"] for row in result.server_metrics} == {7.0}
        assert not other.requests
    assert result.client["server_requests"] is None
    source, own = metrics_sources(["http://a:1"], Access.with_key("k"), ["http://b:2/x/metrics", "http://a:3"])
    assert (source.route, source.control.url, source.control.headers) == ("/x/metrics", "http://b:2", {})
    assert (own.route, own.control.headers) == ("/metrics", {"Authorization": "Bearer k"})


@pytest.mark.slow
def test_servers_1_the_blocks_of_the_cache_are_those_of_the_metrics_url(urls, states, tmp_path):
    states[0].has_metrics = False
    text = 'vllm:cache_config_info{block_size="128"} 1\n'
    with stream_server(ServerState(metrics=text)) as (metrics_url, _):
        result = run(urls[:1], tmp_path, requests=2, metrics_url=metrics_url)

    assert result.manifest.target["prefix_cache"]["block_tokens"] == 128


@pytest.mark.slow
def test_servers_1_a_replica_without_metrics_is_named(urls, states, tmp_path):
    states[1].has_metrics = False
    result = run(urls, tmp_path, requests=4)

    assert result.manifest.target["server_metrics"] == f"none from {urls[1]}"
    assert {row["labels"] for row in result.server_metrics} == {f'replica="{urls[0]}"'}
    assert result.client["server_requests"] is None


def test_servers_6_a_replica_that_serves_another_model_is_refused(urls, states, tmp_path):
    states[1].has_info = False

    with pytest.raises(TargetError, match=r"its API is 'openai-chat' but that of .* is 'tgi'"):
        run(urls, tmp_path, requests=4)


def test_servers_6_urls_come_from_a_repeated_flag_and_from_a_list_in_a_file(tmp_path):
    file = tmp_path / "load.toml"
    file.write_text('url = ["http://a:1", "http://b:2/"]\n')

    for config in (
        parsing.load(BenchConfig, {"url": ["http://a:1", "http://b:2/"]}),
        parsing.load(BenchConfig, {}, file),
    ):
        assert (config.url, config.replicas) == ("http://a:1", ("http://b:2",))
    assert parsing.load(BenchConfig, {"url": ["http://a:1"]}).replicas == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"url": ["http://a:1", "http://a:1"]}, "one address twice"),
        ({"url": ["http://a:1", "b:2"]}, "must look like"),
        ({"url": "http://a:1", "balance": "least_in_flight"}, "the load has one server"),
        ({"replicas": ["http://b:1"]}, "there is no `url`"),
    ],
)
def test_servers_6_wrong_urls_are_refused(flags, message):
    with pytest.raises(UsageError, match=message):
        parsing.load(BenchConfig, flags)

"""A load over several URLs, against scripted servers of known speed."""

import contextlib

import pytest

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import TargetError, UsageError
from loadgen.runner import measure
from loadgen.target.target import Target
from reports.metrics.measured import Measured
from reports.metrics.replicas import replicas_table
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
    result = run(urls, tmp_path, requests=40)

    counts = [sum(record.replica == number for record in result.records) for number in (0, 1)]
    assert abs(counts[0] - counts[1]) <= 1
    assert counts == [generations(state) for state in states]
    assert result.manifest.target["replicas"] == urls[1:]


def test_servers_6_least_in_flight_sends_the_slow_replica_less(urls, tmp_path):
    result = run(urls, tmp_path, requests=60, balance="least_in_flight")

    fast, slow = (sum(record.replica == number for record in measured(result)) for number in (0, 1))
    assert fast > 1.5 * slow


def test_servers_6_the_report_has_a_row_for_each_replica_with_its_own_times(urls, tmp_path):
    result = run(urls, tmp_path, requests=40, workers=2)

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

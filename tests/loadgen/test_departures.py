"""`--cancel`: clients that leave after a number of tokens, against scripted servers."""

import re

import pytest

from loadgen.commands.present import render_summary
from loadgen.config.bench_config import BenchConfig
from loadgen.runner import measure
from loadgen.target.target import Target
from loadgen.workloads.departure import Departure, parse_departure
from reports.metrics.summary import Analysis, summarize
from reports.pages.sections import request_tables
from tests.support.measured_requests import measured
from tests.support.servers.stream_server import Script, ServerState, stream_server

LOAD = {"input_tokens": "8", "output_tokens": "10", "warmup": 0, "concurrency": 3, "requests": 40}


@pytest.fixture
def url():
    with stream_server(ServerState(script=lambda body: Script(first_s=0.01, gap_s=0.005))) as (url, _):
        yield url


@pytest.mark.parametrize("api", ["tgi", pytest.param("openai-chat", marks=pytest.mark.slow)])
def test_servers_6_the_drawn_clients_leave_after_their_tokens_and_no_other(url, tmp_path, api):
    result = measure(BenchConfig(**LOAD, cancel="0.4@4", api=api), Target(url), tmp_path / "r")

    departure = Departure(0.4, 4, seed=0)
    left = {record.prompt_id for record in measured(result) if record.status == "abandoned"}
    assert left == {record.prompt_id for record in measured(result) if departure.of(record.prompt_id)}
    assert 8 <= len(left) <= 24
    # Events that arrive in one read are counted together, before the client leaves.
    assert min(record.events for record in measured(result) if record.status == "abandoned") == 4
    assert {record.output_tokens for record in measured(result) if record.status == "ok"} == {10}


def test_servers_6_abandoned_requests_are_counted_and_enter_no_latency_error_or_objective(url, tmp_path):
    config = BenchConfig(**LOAD, cancel="40%@4", slo="e2e_ms < 60000")

    result = measure(config, Target(url), tmp_path / "r")

    summary = summarize(result)
    left, complete = summary["counts"]["abandoned"], summary["counts"]["ok"]
    assert left + complete == 40
    assert left > 5
    assert {summary["metrics"][name]["count"] for name in ("ttft_s", "tpot_s", "e2e_s")} == {complete}
    assert summary["metrics"]["e2e_s"]["adjusted"]["p99"] is not None
    assert summary["rates"]["error_rate"]["value"] == 0
    assert summary["slo"]["attainment"]["value"] == 1
    assert (summary["abandoned"]["requests"], summary["abandoned"]["tokens_mean"]) == (left, 4)
    assert "records" not in str(summary["verdict"]["reasons"])
    row = request_tables.abandoned_table([Analysis.of(result)]).iloc[0]
    assert (row["left"], row["tokens received, mean"]) == (left, 4)
    assert request_tables.failed_requests(Analysis.of(result)) == 0
    text = render_summary([Analysis.of(result)])
    assert re.search(r"failed +0\n", text)
    assert re.search(rf"clients left +{left}, as planned", text)


@pytest.mark.slow
def test_servers_6_an_answer_that_ends_with_the_limit_is_complete(url, tmp_path):
    config = BenchConfig(**(LOAD | {"output_tokens": "uniform:2,12"}), cancel="1@8", api="openai-completions")

    result = measure(config, Target(url), tmp_path / "r")

    for record in measured(result):
        assert record.status == ("abandoned" if record.planned_output_tokens > 8 else "ok")


@pytest.mark.parametrize("text", ["16", "0@16", "1.5@16", "0.2@0", "0.2@-1", "20%", "x@4", "nan@4"])
def test_servers_6_a_departure_that_is_not_a_share_and_a_count_is_refused(text):
    with pytest.raises(ValueError, match="SHARE@TOKENS"):
        parse_departure(text)


def test_servers_6_departures_that_cannot_happen_are_refused():
    with pytest.raises(ValueError, match="no answer is longer than 16 tokens"):
        BenchConfig(cancel="0.2@16", output_tokens="16")
    with pytest.raises(ValueError, match="blocking answer"):
        BenchConfig(cancel="0.2@16", stream=False)

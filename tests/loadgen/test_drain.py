"""The load goes on through the drain: runs against scripted servers, with one worker and with two."""

import itertools
import json

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.progress import SilentProgress
from loadgen.runner import measure
from loadgen.target.idle import wait_until_idle
from loadgen.target.metrics_source import MetricsSource
from loadgen.target.target import Target
from loadgen.workloads import arrivals
from reports.metrics.measured import Measured
from reports.metrics.summary import summarize
from reports.run_store import load_manifest
from tests.support.measured_requests import measured
from tests.support.servers.stream_server import Script, ServerState, stream_server

SHORT = {"input_tokens": "8", "output_tokens": "4", "warmup": 0}


@pytest.fixture
def state():
    return ServerState(script=lambda body: Script(first_s=0.02, gap_s=0.005))


def texts_sent(state):
    return [request["body"]["inputs"] for request in state.requests if request["path"] != "/tokenize"]


def slow_at(place, slow_s, other_s):
    """A script in which one request takes much longer than the others."""
    number = itertools.count()
    return lambda body: Script(first_s=slow_s if next(number) == place else other_s)


def drained(result):
    return [record for record in result.records if record.phase == "drain"]


def test_trust_W6_users_go_on_until_the_last_request_of_the_window_has_ended(url, state, tmp_path):
    state.script = slow_at(3, slow_s=2.0, other_s=0.2)

    result = measure(BenchConfig(concurrency=4, duration=0.5, **SHORT), Target(url), tmp_path / "r")

    last_s = max(record.t_end_ns for record in measured(result)) / 1e9
    assert Measured.of(result).concurrency.mean(0.5, last_s) > 2.5
    assert {record.status for record in measured(result)} == {"ok"}
    assert {record.status for record in drained(result)} <= {"ok", "cancelled"}
    assert summarize(result)["metrics"]["e2e_s"]["count"] == len(measured(result))
    manifest = load_manifest(tmp_path / "r")
    assert manifest.drain["requests"] == len(drained(result)) > 4
    assert (manifest.drain_s, manifest.drain["cut_off"]) == (30.0, 0)


@pytest.mark.slow
def test_trust_D1_a_number_of_requests_counts_those_that_started_first(url, state, tmp_path):
    result = measure(BenchConfig(concurrency=3, requests=12, **SHORT), Target(url), tmp_path / "r")

    by_start = sorted(result.records, key=lambda record: record.t_dispatch_ns)
    assert [record.phase for record in by_start] == ["measure"] * 12 + ["drain"] * (len(by_start) - 12)
    assert len(by_start) > 12
    window = Measured.of(result).window
    assert window.end_s * 1e9 == pytest.approx(max(record.t_sent_ns for record in measured(result)))
    summary = summarize(result)
    assert sum(summary["counts"].values()) == 12
    inside = sum(
        at <= window.end_s * 1e9
        for record in result.records
        for at in itertools.accumulate(record.gap_ns, initial=record.t_first_ns or 2**62)
    )
    assert summary["rates"]["output_tokens_per_s"]["value"] * window.end_s == pytest.approx(inside)


@pytest.mark.slow
def test_trust_D1_a_number_of_requests_counts_over_all_workers(url, state, tmp_path):
    config = BenchConfig(concurrency=4, requests=30, workers=2, **SHORT)

    result = measure(config, Target(url), tmp_path / "r")

    by_start = sorted(result.records, key=lambda record: record.t_dispatch_ns)
    assert [record.phase for record in by_start] == ["measure"] * 30 + ["drain"] * (len(by_start) - 30)
    assert {record.worker for record in drained(result)} == {0, 1}
    assert result.manifest.stop_reason == "requests"
    assert sum(summarize(result)["counts"].values()) == 30


@pytest.mark.slow
def test_trust_D1_all_workers_keep_sending_until_none_has_a_request_of_the_window(url, state, tmp_path):
    state.script = slow_at(3, slow_s=2.5, other_s=0.05)

    result = measure(BenchConfig(concurrency=4, duration=0.5, workers=2, **SHORT), Target(url), tmp_path / "r")

    slow = max(measured(result), key=lambda record: record.t_end_ns)
    others = [record.t_sent_ns for record in drained(result) if record.worker != slow.worker]
    assert slow.status == "ok"
    assert max(others) > (0.5e9 + slow.t_end_ns) / 2
    assert result.manifest.window_end_s == pytest.approx(0.5)


def test_trust_D1_the_arrivals_of_an_open_loop_go_on_and_their_hash_covers_the_window_alone(url, state, tmp_path):
    state.script = lambda body: Script(first_s=0.3)
    config = BenchConfig(mode="constant", rate=50, duration=0.5, **SHORT)

    result = measure(config, Target(url), tmp_path / "r")

    intended = sorted(record.t_intended_ns for record in drained(result))
    assert intended == [(25 + number) * 20_000_000 for number in range(len(intended))]
    assert len(intended) > 5
    assert len(measured(result)) == 25
    assert result.manifest.schedule_hash == arrivals.schedule_hash([number * 20_000_000 for number in range(25)])
    assert sum(summarize(result)["counts"].values()) == 25


@pytest.mark.parametrize("mode", ["closed", pytest.param("trace", marks=pytest.mark.slow)])
def test_trust_D1_a_trace_starts_again_in_the_drain_with_new_texts_and_blocks(url, state, tmp_path, mode):
    state.script = lambda body: Script(first_s=0.3)
    rows = [(0, 24, [1]), (20, 32, [1, 2]), (40, 24, [3]), (60, 20, [1])]
    lines = [{"timestamp": at, "input_length": n, "output_length": 2, "hash_ids": ids} for at, n, ids in rows]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = {"workload": "mooncake", "trace_file": str(tmp_path / "trace.jsonl"), "block_tokens": 8}

    result = measure(BenchConfig(mode=mode, concurrency=2, **trace), Target(url), tmp_path / "r")

    assert sorted(record.prompt_id for record in measured(result)) == [f"mooncake-{number}" for number in range(4)]
    assert result.manifest.stop_reason == "end_of_trace"
    again = sorted(drained(result), key=lambda record: record.t_dispatch_ns)
    assert again[0].prompt_id == "mooncake-drain1-0"
    assert again[0].planned_input_tokens == 24
    openings = {text[:12] for text in texts_sent(state)[:4]}, {text[:12] for text in texts_sent(state)[4:8]}
    assert not openings[0] & openings[1]


@pytest.mark.slow
def test_trust_D1_a_burst_has_no_drain_load(url, state, tmp_path):
    load = {"mode": "burst", "requests": 6, "max_in_flight": 2, "input_tokens": "8", "output_tokens": "4"}

    result = measure(BenchConfig(**load), Target(url), tmp_path / "r")

    assert len(result.records) == len(measured(result)) == len(texts_sent(state)) == 6


@pytest.mark.slow
def test_trust_D1_a_stop_by_errors_sends_nothing_more(url, state, tmp_path):
    number = itertools.count()
    state.script = lambda body: Script(first_s=1.0) if next(number) < 2 else Script(status=500)
    config = BenchConfig(concurrency=4, duration=30, max_errors=3, **SHORT)

    result = measure(config, Target(url), tmp_path / "r")

    statuses = [record.status for record in result.records]
    assert result.manifest.stop_reason == "error_count"
    assert len(statuses) <= 2 + 3 + 1
    assert statuses.count("ok") == 2
    assert result.manifest.drain["requests"] == 0


def test_trust_D1_the_verdict_counts_requests_cut_off_at_the_drain_limit(url, state, tmp_path):
    state.script = slow_at(3, slow_s=30.0, other_s=0.1)

    result = measure(BenchConfig(concurrency=4, duration=0.5, drain=0.4, **SHORT), Target(url), tmp_path / "r")

    summary = summarize(result)
    assert summary["counts"]["unfinished"] == 1
    assert {record.status for record in drained(result)} == {"ok", "cancelled"}
    assert result.manifest.drain["cut_off"] == 1
    messages = [reason["message"] for reason in summary["verdict"]["findings"] if reason["check"] == "drain"]
    assert messages[0].startswith("1 request was cut off at the drain limit of 0.4 s")
    assert summary["metrics"]["e2e_s"]["at_least"]
    assert not [reason for reason in summary["verdict"]["reasons"] if reason["check"] == "request_count"]


class ScriptedMetrics:
    """A control connection whose `/metrics` has one text after the other."""

    def __init__(self, *texts):
        self.texts = list(texts)

    def get(self, route, timeout_s):
        return (200, self.texts.pop(0).encode()) if self.texts else (404, b"")


class Lines(SilentProgress):
    """Keeps the lines that a run shows."""

    def __init__(self):
        self.lines = []

    def show(self, line):
        self.lines.append(line)


@pytest.mark.slow
def test_servers_1_the_end_of_requests_is_read_at_the_metrics_url(tmp_path):
    busy = ServerState(metrics="vllm:num_requests_running 3\n")
    with stream_server(ServerState()) as (url, _), stream_server(busy) as (metrics_url, _):
        config = BenchConfig(
            requests=1, concurrency=1, input_tokens="8", output_tokens="1", drain=0.1, metrics_url=metrics_url
        )
        progress = Lines()
        measure(config, Target(url), tmp_path / "r", progress)

    assert f"{metrics_url} still reports 3 requests; they may slow the next run" in progress.lines


def test_trust_D1_the_next_point_waits_until_the_server_has_no_requests():
    busy = "tgi_batch_current_size 2\ntgi_queue_size 1\n"
    control = ScriptedMetrics(busy, busy, "tgi_batch_current_size 0\ntgi_queue_size 0\n", busy)

    assert wait_until_idle(MetricsSource("m", control), limit_s=60) == 0
    assert len(control.texts) == 1
    assert wait_until_idle(MetricsSource("m", ScriptedMetrics(busy, busy)), limit_s=0) == 3
    assert wait_until_idle(MetricsSource("m", ScriptedMetrics("vllm:num_requests_running 4\n")), limit_s=0) == 4
    assert wait_until_idle(MetricsSource("m", ScriptedMetrics()), limit_s=60) == 0

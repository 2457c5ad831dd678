import threading

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.runner import measure
from loadgen.target import health_probe
from loadgen.target.control import ControlClient
from loadgen.target.health_probe import HealthProbe
from loadgen.target.server_kind import KINDS
from loadgen.target.target import Target
from tests.support.servers.stream_server import Script, ServerState, stream_server

ENDLESS = BenchConfig(concurrency=2, duration=60, warmup=0, input_tokens="8", output_tokens="2")


def with_rules(**rules):
    return ENDLESS.model_copy(update=rules)


@pytest.mark.slow
def test_metrics_10_a_number_of_errors_ends_the_run(tmp_path):
    state = ServerState(script=lambda body: Script(status=500))

    with stream_server(state) as (url, _):
        result = measure(with_rules(max_errors=7), Target(url), tmp_path / "r")

    assert result.manifest.stop_reason == "error_count"
    assert 7 <= len(result.records) <= 8
    assert {record.status for record in result.records} == {"http_5xx"}


def test_metrics_10_a_share_of_errors_ends_the_run_once_fifty_requests_are_seen(tmp_path):
    sent = iter(range(100_000))
    state = ServerState(script=lambda body: Script(status=429 if next(sent) >= 60 else 200))

    with stream_server(state) as (url, _):
        result = measure(with_rules(max_error_share=0.3), Target(url), tmp_path / "r")

    assert result.manifest.stop_reason == "error_share"
    # The 16th in the order of sends; users send a few more until they are stopped.
    assert 16 <= sum(record.status == "overloaded" for record in result.records) < 30


@pytest.mark.slow
def test_metrics_10_an_unhealthy_server_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(health_probe, "INTERVAL_S", 0.1)
    state = ServerState(script=lambda body: Script(gap_s=0.05))

    with stream_server(state) as (url, _):
        state.health = iter([200] * 5 + [503] * 1_000)
        result = measure(with_rules(unhealthy_probes=3), Target(url), tmp_path / "r")

    assert result.manifest.stop_reason == "server_unhealthy"
    assert {record.status for record in result.records} == {"ok"}


@pytest.mark.parametrize(("answers", "limit"), [([404], 3), ([200, 500, 500], 0)])
def test_a_server_without_a_health_route_is_not_polled(answers, limit):
    state = ServerState()
    state.health = iter(answers)

    with stream_server(state) as (url, _):
        probe = HealthProbe(ControlClient(url), limit, lambda _: pytest.fail("called"))
        probe.start()
        threads = {thread.name for thread in threading.enumerate()}
        probe.finish()

    assert "health" not in threads


# SGLang's `/health` generates a token; older releases have neither of its two newer routes.
@pytest.mark.parametrize(
    ("kind", "polled"),
    [
        ("sglang", ["/ready"]),
        ("sglang", ["/ready", "/model_info", "/get_model_info"]),
        ("ollama", ["/api/version"]),
        ("vllm", ["/health"]),
    ],
)
def test_a_server_is_polled_by_the_first_of_its_routes_that_exists(kind, polled):
    asked = []

    class Control:
        def get(self, route, timeout_s):
            asked.append(route)
            return (200 if route == polled[-1] else 404), b""

        def close(self):
            pass

    probe = HealthProbe(Control(), 3, lambda _: None, KINDS[kind].health_routes)
    probe.start()
    probe.finish()

    assert asked == polled


@pytest.mark.slow
def test_metrics_10_a_run_ends_once_its_interval_is_narrow_enough(tmp_path):
    state = ServerState(script=lambda body: Script(first_s=0.005))

    with stream_server(state) as (url, _):
        result = measure(with_rules(converge=("ttft_p50_ms 90%",)), Target(url), tmp_path / "r")

    assert result.manifest.stop_reason == "converged"
    assert len(result.records) >= 100

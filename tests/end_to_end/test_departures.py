"""Clients that leave, measured by the load generator on a launched server."""

import urllib.request

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.runner import measure
from loadgen.target.idle import wait_until_idle
from loadgen.target.metrics_source import MetricsSource
from loadgen.target.target import Target
from tests.support.measured_requests import measured

TOKENS = 900


def samples(server):
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


@pytest.mark.slow
def test_servers_6_the_blocks_of_clients_that_left_are_freed_before_their_answers_would_have_ended(server, tmp_path):
    steps = 'tgi_batch_inference_count{method="decode"}'
    before = samples(server).get(steps, 0.0)
    config = BenchConfig(concurrency=2, requests=4, input_tokens="16", output_tokens=str(TOKENS), cancel="1@4")

    result = measure(config, Target(server.url), tmp_path / "r")

    assert {record.status for record in measured(result)} == {"abandoned"}
    assert {record.events >= 4 for record in measured(result)} == {True}
    control = Target(server.url).control()
    assert wait_until_idle(MetricsSource(server.url, control), limit_s=60) == 0
    control.close()
    after = samples(server)
    assert after[steps] - before < TOKENS
    assert after.get("tgi_batch_current_size", 0.0) == 0
    assert after.get("tgi_batch_current_max_tokens", 0.0) == 0

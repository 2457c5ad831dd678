import json
import time

import pytest

from loadgen.target.control import ControlClient
from loadgen.target.metrics_source import MetricsSource
from loadgen.target.telemetry import Telemetry, parse_prometheus
from reports.run_store import JsonlWriter
from tests.support.servers.stream_server import ServerState, stream_server

EXPOSITION = """# HELP tgi_request_duration Duration
# TYPE tgi_request_duration histogram
tgi_request_duration_bucket{le="0.1"} 3
tgi_request_duration_bucket{le="+Inf"} 4
tgi_request_duration_sum 1.5e-1
tgi_batch_concat{reason="wait_exceeded",x="a b"} 2 1700000000
broken line
tgi_nan NaN
"""


def test_samples_keep_their_labels_and_values_that_are_not_numbers_are_left_out():
    assert list(parse_prometheus(EXPOSITION)) == [
        ("tgi_request_duration_bucket", 'le="0.1"', 3.0),
        ("tgi_request_duration_bucket", 'le="+Inf"', 4.0),
        ("tgi_request_duration_sum", "", 0.15),
        ("tgi_batch_concat", 'reason="wait_exceeded",x="a b"', 2.0),
    ]


def scrape_twice(state, between, tmp_path):
    with stream_server(state) as (url, _):
        telemetry = Telemetry([MetricsSource(url, ControlClient(url))], JsonlWriter(tmp_path / "server_metrics.jsonl"))
        telemetry.start()
        telemetry.begin_run(time.perf_counter_ns())
        between()
        telemetry.finish()
    rows = [json.loads(line) for line in (tmp_path / "server_metrics.jsonl").read_text().splitlines()]
    return telemetry, rows


def test_a_run_is_scraped_before_and_after_on_one_time_axis(tmp_path):
    telemetry, rows = scrape_twice(ServerState(), lambda: None, tmp_path)

    times = sorted({row["t_s"] for row in rows})
    assert len(times) == 2
    assert times[0] < 0 < times[1]
    assert {row["name"] for row in rows} == {"tgi_request_count", "tgi_queue_size"}
    assert telemetry.server_requests == 0


@pytest.mark.parametrize(
    ("before", "after", "requests"),
    [
        ("tgi_request_count 4\n", "tgi_request_count 9\n", 5),
        ("", 'tgi_request_count 9\ntgi_request_success 3\ntgi_request_failure{err="dropped"} 1\n', 4),
        ("tgi_request_count 4\ntgi_request_success 2\n", "tgi_request_count 8\ntgi_request_success 4\n", 2),
        ("x 1\n", "x 2\n", None),
    ],
)
def test_requests_are_read_from_the_counter_that_counts_each_once(tmp_path, before, after, requests):
    state = ServerState(metrics=before or "# nothing yet\n")

    def change():
        state.metrics = after

    telemetry, _ = scrape_twice(state, change, tmp_path)

    assert telemetry.server_requests == requests


def test_a_server_without_metrics_is_scraped_once(tmp_path):
    telemetry, rows = scrape_twice(ServerState(has_metrics=False), lambda: None, tmp_path)

    assert rows == []
    assert telemetry.server_requests is None

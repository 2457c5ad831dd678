"""Waits until a server has no requests left, so that those of one load do not slow the next."""

import time

from loadgen.target.metrics_source import MetricsSource
from loadgen.target.telemetry import Scrape, parse_prometheus

POLL_S = 0.1
# Gauges of running and waiting requests, by server. Those of SGLang and TensorRT-LLM keep their values when idle.
GAUGES = (
    ("tgi_batch_current_size", "tgi_queue_size"),
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    ("dynamo_frontend_inflight_requests", "dynamo_frontend_queued_requests"),
)


def wait_until_idle(source: MetricsSource, limit_s: float) -> int:
    """Requests that the metrics of a server still report as running or waiting, 0 if they report none.

    Waits for `limit_s` at most. A server without such metrics counts as idle: its cancelled connections are closed.
    """
    deadline_s = time.monotonic() + limit_s
    while (num_requests := _num_requests(source)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return num_requests


def _num_requests(source: MetricsSource) -> int:
    text = source.text()
    if text is None:
        return 0
    scrape = Scrape(time.perf_counter_ns(), list(parse_prometheus(text)))
    return round(next((total for names in GAUGES if (total := scrape.total(names)) is not None), 0.0))

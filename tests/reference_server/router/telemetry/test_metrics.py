import math
import re

import pytest

from reference_server.messages import DraftCounts, Timings
from reference_server.router.telemetry.metrics import (
    Counter,
    Gauge,
    Histogram,
    Metrics,
    Summary,
    duration_bounds,
    render_series,
    share_bounds,
)
from reference_server.router.telemetry.observer import BatchObserver


def lines(*series: Counter | Gauge | Histogram | Summary) -> list[str]:
    return render_series(series).decode().splitlines()


def test_a_series_appears_with_its_first_sample():
    counter = Counter("tgi_x", "What it counts.", "err")

    assert lines(counter) == []
    counter.add(label="validation")
    counter.add(2, "dropped")

    assert lines(counter) == [
        "# HELP tgi_x What it counts.",
        "# TYPE tgi_x counter",
        'tgi_x{err="validation"} 1',
        'tgi_x{err="dropped"} 2',
    ]


def test_a_gauge_renders_its_last_value():
    gauge = Gauge("tgi_g", "g")
    gauge.set(3)
    gauge.set(0)

    assert lines(gauge)[2:] == ["tgi_g 0"]


def test_a_histogram_is_cumulative_and_its_bounds_are_inclusive():
    histogram = Histogram("tgi_h", "h", [1, 2.5], "method")
    for value in (1, 2, 3):
        histogram.observe(value, "decode")

    assert lines(histogram)[2:] == [
        'tgi_h_bucket{method="decode",le="1"} 1',
        'tgi_h_bucket{method="decode",le="2.5"} 2',
        'tgi_h_bucket{method="decode",le="+Inf"} 3',
        'tgi_h_sum{method="decode"} 6',
        'tgi_h_count{method="decode"} 3',
    ]


def test_a_summary_has_exact_quantiles():
    summary = Summary("tgi_s", "s")
    summary.observe(0, times=9)
    summary.observe(4)

    assert lines(summary)[2:] == [
        'tgi_s{quantile="0"} 0',
        'tgi_s{quantile="0.5"} 0',
        'tgi_s{quantile="0.9"} 0',
        'tgi_s{quantile="0.95"} 4',
        'tgi_s{quantile="0.99"} 4',
        'tgi_s{quantile="0.999"} 4',
        'tgi_s{quantile="1"} 4',
        "tgi_s_sum 4",
        "tgi_s_count 10",
    ]


def test_duration_bounds_print_as_tgis_do():
    bounds = duration_bounds()

    assert [repr(bound) for bound in (*bounds[:4], *bounds[-2:])] == [
        "0.00015000000000000001",
        "0.00022500000000000002",
        "0.0003375",
        "0.00050625",
        "97.07397373664756",
        "145.61096060497135",
    ]
    assert len(bounds) == 35


def test_share_bounds_have_no_trailing_zeros():
    histogram = Histogram("tgi_i", "i", share_bounds(1024))
    histogram.observe(5)

    printed = re.findall(r'le="([^"]+)"', "\n".join(lines(histogram)))
    assert (printed[0], printed[99], printed[100]) == ("10.24", "1024", "+Inf")


def test_metrics_record_the_batching_loops_events():
    metrics = Metrics(1024, 2048)
    observer: BatchObserver = metrics
    observer.on_queue(3)
    observer.on_batch(2, "chunking", 30, 16)
    observer.on_call("prefill")
    observer.on_call_done("prefill", Timings(forward_ns=10**9, concat_ns=5 * 10**8), 2 * 10**9, 10**6, 3)
    observer.on_call_failed("decode")
    observer.on_running(2, 64)
    observer.on_blocks(7, 63)
    observer.on_tokens(0, 5)
    observer.on_failures("dropped", 2)
    observer.on_drafts(DraftCounts((3, 2), (2, 0)))
    observer.on_drafts(DraftCounts((1,), (1,), (0, 0, 5, 2)))
    text = metrics.render().decode()

    for line in (
        "tgi_queue_size 3",
        'tgi_undrafted_tokens{reason="cost"} 5',
        'tgi_undrafted_tokens{reason="no_guess"} 2',
        "tgi_batch_next_size_sum 2",
        'tgi_batch_concat{reason="chunking"} 1',
        "tgi_prompt_tokens 30",
        "tgi_prefix_hit_tokens 16",
        'tgi_batch_inference_count{method="prefill"} 1',
        'tgi_batch_inference_success{method="prefill"} 1',
        'tgi_batch_inference_failure{method="decode"} 1',
        'tgi_batch_forward_duration_sum{method="prefill"} 1',
        'tgi_batch_concat_duration_sum{method="decode"} 0.5',
        'tgi_batch_filter_duration_sum{method="prefill"} 0.001',
        "tgi_batch_current_size 2",
        "tgi_batch_current_max_tokens 64",
        "tgi_free_blocks 7",
        "tgi_total_blocks 63",
        'tgi_batch_generated_tokens_bucket{method="prefill",le="2"} 0',
        'tgi_batch_generated_tokens_bucket{method="prefill",le="4"} 1',
        'tgi_batch_generated_tokens_sum{method="prefill"} 3',
        "tgi_request_skipped_tokens_count 5",
        'tgi_request_failure{err="dropped"} 2',
        "tgi_draft_tokens 6",
        "tgi_accepted_tokens 3",
        'tgi_draft_tokens_per_position{position="1"} 4',
        'tgi_accepted_tokens_per_position{position="1"} 3',
        'tgi_accepted_tokens_per_position{position="2"} 0',
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("tgi_request_count", "counter"), ("tgi_request_skipped_tokens", "summary"), ("tgi_queue_size", "gauge")],
)
def test_every_series_states_its_kind(name: str, kind: str):
    metrics = Metrics(10, 20)
    metrics.request_count.add()
    metrics.on_tokens(0, 1)
    metrics.on_queue(0)

    assert f"# TYPE {name} {kind}" in metrics.render().decode()


def test_every_printed_number_reads_back():
    histogram = Histogram("tgi_d", "d", duration_bounds())
    histogram.observe(1 / 3)

    for line in lines(histogram)[2:]:
        assert math.isfinite(float(line.split()[-1]))

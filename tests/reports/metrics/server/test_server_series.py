"""The server's own metrics over a window, from scrapes made by hand."""

import pytest

from reports.metrics.server.server_series import gauge_series, server_summary
from reports.metrics.windows import Window

WINDOW = Window(10.0, 20.0, "configured", None, None, None)


def samples(name, points, labels=""):
    return [{"t_s": t_s, "name": name, "labels": labels, "value": value} for t_s, value in points.items()]


def histogram(name, sums, counts, labels=""):
    return samples(f"{name}_sum", sums, labels) + samples(f"{name}_count", counts, labels)


def test_a_histogram_is_the_difference_of_its_sum_and_count_over_the_window():
    rows = histogram("tgi_request_queue_duration", {5: 100.0, 10: 101.0, 20: 104.0}, {5: 10, 10: 20, 20: 30})

    found = server_summary(rows, WINDOW)["queue_s"]

    assert (found["mean"], found["count"], found["series"]) == (0.3, 10, "tgi_request_queue_duration")


def test_percentiles_come_from_bucket_differences_with_the_width_of_their_bucket():
    name = "tgi_request_queue_duration"
    rows = histogram(name, {10: 0.0, 20: 40.0}, {10: 100, 20: 200})
    for bound, grown in (("0.1", 20), ("0.5", 60), ("1", 96), ("+Inf", 100)):
        rows += samples(f"{name}_bucket", {10: 100.0, 20: 100.0 + grown}, f'le="{bound}"')

    percentiles = server_summary(rows, WINDOW)["queue_s"]["percentiles"]

    # 50 of 100 values: 30 of the 40 between 0.1 and 0.5.
    assert percentiles["p50"] == {"value": pytest.approx(0.1 + 0.4 * 30 / 40), "lo": 0.1, "hi": 0.5}
    assert percentiles["p95"] == {"value": pytest.approx(0.5 + 0.5 * 35 / 36), "lo": 0.5, "hi": 1.0}
    assert percentiles["p99"] == {"value": None, "lo": 1.0, "hi": None}


def test_vllm_inference_is_prefill_and_decode_together():
    rows = histogram("vllm:request_prefill_time_seconds", {10: 0, 20: 1}, {10: 0, 20: 10})
    assert "inference_s" not in server_summary(rows, WINDOW)

    rows += histogram("vllm:request_decode_time_seconds", {10: 0, 20: 4}, {10: 0, 20: 10})

    assert server_summary(rows, WINDOW)["inference_s"]["mean"] == 0.5


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        ("tgi_prefix_hit_tokens", "tgi_prompt_tokens"),
        ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ],
)
def test_a_quotient_of_counters_is_taken_over_the_window(part, whole):
    rows = samples(part, {10: 50.0, 20: 80.0}) + samples(whole, {10: 50.0, 20: 90.0})

    assert server_summary(rows, WINDOW)["prefix_hits"]["mean"] == 0.75


def test_the_token_budget_in_use_is_a_quotient_at_each_scrape():
    rows = samples("tgi_batch_current_max_tokens", {10: 500.0, 15: 1_000.0})
    rows += samples("tgi_batch_max_total_tokens", {10: 2_000.0, 15: 2_000.0})

    assert server_summary(rows, WINDOW)["cache_usage"] == {
        "kind": "average",
        "unit": "fraction",
        "series": "tgi_batch_current_max_tokens / tgi_batch_max_total_tokens",
        "mean": 0.375,
        "max": 0.5,
    }
    assert gauge_series(rows, "cache_usage") == ([10, 15], [0.25, 0.5])


def test_counters_are_summed_over_their_labels():
    rows = samples("tgi_batch_concat", {10: 1.0, 20: 4.0}, 'reason="wait_exceeded"')
    rows += samples("tgi_batch_concat", {10: 0.0, 20: 2.0}, 'reason="backpressure"')
    rows += samples("vllm:generation_tokens_total", {10: 5.0, 20: 905.0}, 'model_name="m"')

    found = server_summary(rows, WINDOW)

    assert (found["batch_joins"]["change"], found["output_tokens"]["change"]) == (5.0, 900.0)


def test_gpu_metrics_are_summed_or_averaged_by_unit():
    rows = []
    for gpu, watts, share in (("0", 300.0, 0.9), ("1", 500.0, 0.5)):
        rows += samples("accelerator_power_watts", {10: watts, 20: watts}, f'gpu="{gpu}"')
        rows += samples("accelerator_utilization_ratio", {10: share, 20: share}, f'gpu="{gpu}"')
        rows += samples("accelerator_memory_used_bytes", {10: 2.0**30}, f'gpu="{gpu}"')

    found = server_summary(rows, WINDOW)

    assert found["gpu_power"]["mean"] == 800.0
    assert found["gpu_utilization"]["mean"] == pytest.approx(0.7)
    assert found["gpu_memory"]["max"] == 2.0


@pytest.mark.parametrize(
    ("name", "counters", "change"),
    [
        ("output_tokens", {"vllm:generation_tokens": 30.0}, 30.0),
        ("output_tokens", {"sglang:generation_tokens_total": 30.0}, 30.0),
        ("output_tokens", {"llamacpp:tokens_predicted_total": 30.0}, 30.0),
        ("input_tokens", {"llamacpp:prompt_tokens_total": 30.0, "llamacpp:prompt_tokens_cached_total": 10.0}, 40.0),
        ("input_tokens", {"llamacpp:prompt_tokens_total": 30.0}, 30.0),
        ("output_tokens", {"trtllm_generation_tokens_total": 30.0}, 30.0),
        ("output_tokens", {"dynamo_frontend_output_sequence_tokens_sum": 30.0}, 30.0),
        ("preemptions", {"sglang:num_retracted_requests_total": 3.0}, 3.0),
    ],
)
def test_counters_of_every_server_have_our_name_with_or_without_their_suffix(name, counters, change):
    rows = [row for series, grown in counters.items() for row in samples(series, {10: 5.0, 20: 5.0 + grown})]

    assert server_summary(rows, WINDOW)[name]["change"] == change


@pytest.mark.parametrize(
    ("cached", "others"),
    [
        ("llamacpp:prompt_tokens_cached_total", {"llamacpp:prompt_tokens_total": 30.0}),
        ("sglang:cached_tokens_total", {"sglang:prompt_tokens_total": 40.0}),
        ("trtllm_kv_cache_reused_blocks_total", {"trtllm_kv_cache_missed_blocks_total": 30.0}),
    ],
)
def test_the_cached_share_of_every_server_is_one_of_all_prompt_tokens(cached, others):
    rows = samples(cached, {10: 0.0, 20: 10.0})
    rows += [row for series, grown in others.items() for row in samples(series, {10: 0.0, 20: grown})]

    assert server_summary(rows, WINDOW)["prefix_hits"]["mean"] == 0.25


def test_gauges_of_an_idle_sglang_are_stale_and_left_out():
    rows = samples("sglang:num_running_reqs", {10: 4.0, 12: 4.0, 14: 4.0, 16: 2.0})
    rows += samples("sglang:realtime_tokens_total", {10: 100.0, 12: 100.0, 14: 100.0, 16: 200.0})

    found = server_summary(rows, WINDOW)["batch_size"]

    assert found["mean"] == 3.0


def test_the_cache_in_use_of_several_replicas_is_their_mean():
    rows = samples("vllm:kv_cache_usage_perc", {10: 0.5}, 'engine="0"')
    rows += samples("vllm:kv_cache_usage_perc", {10: 0.7}, 'engine="1"')

    assert server_summary(rows, WINDOW)["cache_usage"]["max"] == pytest.approx(0.6)

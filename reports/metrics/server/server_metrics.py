"""The server's own metrics: names, titles, units, and the series of each kind of server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerMetric:
    """A server metric and the series that may contain it; the first series with samples is used.

    kind: histogram (mean and percentiles over the window), counter (difference), gauge (mean and maximum of the sum
    over label sets) or average (mean and maximum of the mean over label sets).
    series: names; a histogram or counter may be a sum `a + b`, a gauge a quotient `a / b` at each scrape, a counter a
    quotient of differences. The suffix `_total` of a counter is optional.
    scale: factor of a gauge.
    """

    name: str
    title: str
    unit: str
    kind: str
    series: tuple[str, ...]
    scale: float = 1.0


SERVER_METRICS = (
    ServerMetric(
        "request_duration_s",
        "Request duration",
        "s",
        "histogram",
        (
            "tgi_request_duration",
            "vllm:e2e_request_latency_seconds",
            "sglang:e2e_request_latency_seconds",
            "trtllm_e2e_request_latency_seconds",
            "dynamo_frontend_request_duration_seconds",
        ),
    ),
    ServerMetric(
        "queue_s",
        "Queue time",
        "s",
        "histogram",
        (
            "tgi_request_queue_duration",
            "vllm:request_queue_time_seconds",
            "sglang:queue_time_seconds",
            "trtllm_request_queue_time_seconds",
        ),
    ),
    ServerMetric(
        "inference_s",
        "Inference time",
        "s",
        "histogram",
        (
            "tgi_request_inference_duration",
            "vllm:request_prefill_time_seconds + vllm:request_decode_time_seconds",
            "vllm:request_inference_time_seconds",
            "trtllm_request_prefill_time_seconds + trtllm_request_decode_time_seconds",
            "trtllm_request_inference_time_seconds",
        ),
    ),
    ServerMetric(
        "prefill_s",
        "Prefill of a request",
        "s",
        "histogram",
        ("vllm:request_prefill_time_seconds", "trtllm_request_prefill_time_seconds"),
    ),
    ServerMetric("validation_s", "Validation time", "s", "histogram", ("tgi_request_validation_duration",)),
    ServerMetric(
        "ttft_s",
        "TTFT (server)",
        "s",
        "histogram",
        (
            "tgi_request_first_token_duration",
            "vllm:time_to_first_token_seconds",
            "sglang:time_to_first_token_seconds",
            "trtllm_time_to_first_token_seconds",
            "dynamo_frontend_time_to_first_token_seconds",
        ),
    ),
    ServerMetric(
        "tpot_s",
        "TPOT (server)",
        "s",
        "histogram",
        (
            "tgi_request_mean_time_per_token_duration",
            "vllm:request_time_per_output_token_seconds",
            "sglang:request_time_per_output_token_seconds",
            "sglang:time_per_output_token_seconds",
            "trtllm_time_per_output_token_seconds",
        ),
    ),
    ServerMetric(
        "gap_s",
        "Gap (server)",
        "s",
        "histogram",
        (
            "vllm:inter_token_latency_seconds",
            "sglang:inter_token_latency_seconds",
            "dynamo_frontend_inter_token_latency_seconds",
        ),
    ),
    ServerMetric("itl_s", "ITL (server)", "s", "histogram", ("tgi_request_inter_token_duration",)),
    ServerMetric(
        "prefill_step_s", "Prefill call", "s", "histogram", ('tgi_batch_inference_duration{method="prefill"}',)
    ),
    ServerMetric(
        "decode_step_s",
        "Decode call",
        "s",
        "histogram",
        ('tgi_batch_inference_duration{method="decode"}',),
    ),
    ServerMetric(
        "prefill_forward_s", "Prefill forward", "s", "histogram", ('tgi_batch_forward_duration{method="prefill"}',)
    ),
    ServerMetric(
        "decode_forward_s", "Decode forward", "s", "histogram", ('tgi_batch_forward_duration{method="decode"}',)
    ),
    ServerMetric(
        "decode_tokens_s",
        "Sampling and detokenization",
        "s",
        "histogram",
        ('tgi_batch_decode_duration{method="decode"}',),
    ),
    ServerMetric(
        "queue_size",
        "Waiting requests",
        "requests",
        "gauge",
        (
            "tgi_queue_size",
            "vllm:num_requests_waiting",
            "sglang:num_queue_reqs",
            "llamacpp:requests_deferred",
            "trtllm_num_requests_waiting",
            "dynamo_frontend_queued_requests",
        ),
    ),
    ServerMetric(
        "batch_size",
        "Running requests",
        "requests",
        "gauge",
        (
            "tgi_batch_current_size",
            "vllm:num_requests_running",
            "sglang:num_running_reqs",
            "llamacpp:requests_processing",
            "trtllm_num_requests_running",
            "dynamo_frontend_inflight_requests",
        ),
    ),
    ServerMetric("batch_tokens", "Tokens in the batch", "tokens", "gauge", ("tgi_batch_current_max_tokens",)),
    ServerMetric(
        "cache_usage",
        "Token budget in use",
        "fraction",
        "average",
        (
            "tgi_batch_current_max_tokens / tgi_batch_max_total_tokens",
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "sglang:token_usage",
            "trtllm_kv_cache_utilization",
        ),
    ),
    ServerMetric("gpu_utilization", "GPU utilization", "fraction", "average", ("accelerator_utilization_ratio",)),
    ServerMetric("gpu_memory", "GPU memory", "GiB", "gauge", ("accelerator_memory_used_bytes",), 2**-30),
    ServerMetric("gpu_power", "GPU power", "W", "gauge", ("accelerator_power_watts",)),
    ServerMetric("gpu_clock", "GPU clock", "GHz", "average", ("accelerator_clock_hertz",), 1e-9),
    ServerMetric(
        "requests",
        "Requests",
        "requests",
        "counter",
        ("tgi_request_count", "sglang:num_requests_total", "dynamo_frontend_requests_total"),
    ),
    ServerMetric(
        "successes",
        "Successes",
        "requests",
        "counter",
        ("tgi_request_success", "vllm:request_success_total", "trtllm_request_success_total"),
    ),
    ServerMetric(
        "failures", "Failures", "requests", "counter", ("tgi_request_failure", "sglang:num_aborted_requests_total")
    ),
    ServerMetric(
        "input_tokens",
        "Input tokens",
        "tokens",
        "counter",
        (
            "tgi_request_input_length_sum",
            "vllm:prompt_tokens_total",
            "sglang:prompt_tokens_total",
            "llamacpp:prompt_tokens_total + llamacpp:prompt_tokens_cached_total",
            "llamacpp:prompt_tokens_total",
            "trtllm_prompt_tokens_total",
            "dynamo_frontend_input_sequence_tokens_sum",
        ),
    ),
    ServerMetric(
        "output_tokens",
        "Output tokens",
        "tokens",
        "counter",
        (
            "tgi_request_generated_tokens_sum",
            "vllm:generation_tokens_total",
            "sglang:generation_tokens_total",
            "llamacpp:tokens_predicted_total",
            "trtllm_generation_tokens_total",
            "dynamo_frontend_output_sequence_tokens_sum",
        ),
    ),
    ServerMetric(
        "preemptions",
        "Preemptions",
        "requests",
        "counter",
        ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    ),
    ServerMetric("batch_joins", "Batch joins", "joins", "counter", ("tgi_batch_concat",)),
    ServerMetric(
        "prefix_hits",
        "Prefix cache hit rate",
        "fraction",
        "counter",
        (
            "tgi_prefix_hit_tokens / tgi_prompt_tokens",
            "vllm:prefix_cache_hits_total / vllm:prefix_cache_queries_total",
            "vllm:gpu_prefix_cache_hits_total / vllm:gpu_prefix_cache_queries_total",
            "sglang:cached_tokens_total / sglang:prompt_tokens_total",
            "llamacpp:prompt_tokens_cached_total / llamacpp:prompt_tokens_total + llamacpp:prompt_tokens_cached_total",
            "trtllm_kv_cache_reused_blocks / trtllm_kv_cache_reused_blocks + trtllm_kv_cache_missed_blocks",
        ),
    ),
    ServerMetric("skipped_tokens", "Skipped tokens of a step", "tokens", "histogram", ("tgi_request_skipped_tokens",)),
    ServerMetric(
        "accepted_drafts",
        "Draft acceptance rate",
        "fraction",
        "counter",
        (
            "tgi_accepted_tokens / tgi_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens_total / vllm:spec_decode_num_draft_tokens_total",
            "llamacpp:spec_decode_num_accepted_tokens_total / llamacpp:spec_decode_num_draft_tokens_total",
        ),
    ),
)


STALE_WHEN_IDLE = {
    "sglang:": ("sglang:realtime_tokens_total", "sglang:generation_tokens_total"),
    "trtllm_": ("trtllm_generation_tokens_total",),
}
"""Prefixes of gauges that keep their last value while the server is idle, and counters that grow while it decodes.

The first counter that was scraped is used.
"""

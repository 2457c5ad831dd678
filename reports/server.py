"""What the server said of itself over the window: histograms and counters as differences, gauges as means.

Samples are the rows of `server_metrics`: cumulative series under their Prometheus names, labels as `key="value",...`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from reports.windows import Window


@dataclass(frozen=True, slots=True)
class ServerMetric:
    """A meaning and the series that carry it; the first one present counts.

    `kind`: histogram (mean over the window), counter (difference), gauge (mean and maximum).
    """

    name: str
    title: str
    unit: str
    kind: str
    series: tuple[str, ...]


SERVER_METRICS = (
    ServerMetric(
        "request_duration_s",
        "Request duration",
        "s",
        "histogram",
        ("tgi_request_duration", "vllm:e2e_request_latency_seconds"),
    ),
    ServerMetric(
        "queue_s", "Queue time", "s", "histogram", ("tgi_request_queue_duration", "vllm:request_queue_time_seconds")
    ),
    ServerMetric("inference_s", "Inference time", "s", "histogram", ("tgi_request_inference_duration",)),
    ServerMetric("validation_s", "Validation time", "s", "histogram", ("tgi_request_validation_duration",)),
    ServerMetric("ttft_s", "TTFT, server's", "s", "histogram", ("vllm:time_to_first_token_seconds",)),
    ServerMetric(
        "tpot_s",
        "TPOT, server's",
        "s",
        "histogram",
        ("tgi_request_mean_time_per_token_duration", "vllm:request_time_per_output_token_seconds"),
    ),
    ServerMetric("gap_s", "Gap, server's", "s", "histogram", ("vllm:inter_token_latency_seconds",)),
    ServerMetric(
        "prefill_step_s", "Prefill call", "s", "histogram", ('tgi_batch_inference_duration{method="prefill"}',)
    ),
    ServerMetric(
        "decode_step_s",
        "Decode call",
        "s",
        "histogram",
        ('tgi_batch_inference_duration{method="decode"}', "tgi_batch_decode_duration"),
    ),
    ServerMetric(
        "queue_size", "Waiting requests", "requests", "gauge", ("tgi_queue_size", "vllm:num_requests_waiting")
    ),
    ServerMetric(
        "batch_size", "Running requests", "requests", "gauge", ("tgi_batch_current_size", "vllm:num_requests_running")
    ),
    ServerMetric("batch_tokens", "Tokens in the batch", "tokens", "gauge", ("tgi_batch_current_max_tokens",)),
    ServerMetric(
        "cache_usage", "Cache in use", "share", "gauge", ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    ),
    ServerMetric("requests", "Requests", "requests", "counter", ("tgi_request_count",)),
    ServerMetric(
        "successes", "Successes", "requests", "counter", ("tgi_request_success", "vllm:request_success_total")
    ),
    ServerMetric("failures", "Failures", "requests", "counter", ("tgi_request_failure",)),
    ServerMetric("batch_joins", "Batch joins", "joins", "counter", ("tgi_batch_concat",)),
    ServerMetric(
        "prefix_hit_tokens",
        "Prefix tokens found",
        "tokens",
        "counter",
        ("tgi_prefix_hit_tokens", "vllm:prefix_cache_hits_total"),
    ),
    ServerMetric(
        "prefix_asked_tokens",
        "Prefix tokens asked",
        "tokens",
        "counter",
        ("tgi_prompt_tokens", "vllm:prefix_cache_queries_total"),
    ),
    ServerMetric(
        "accepted_tokens",
        "Draft tokens accepted",
        "tokens",
        "counter",
        ("tgi_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_total"),
    ),
    ServerMetric(
        "draft_tokens",
        "Draft tokens proposed",
        "tokens",
        "counter",
        ("tgi_draft_tokens", "vllm:spec_decode_num_draft_tokens_total"),
    ),
)


def server_summary(rows: Iterable[Mapping[str, Any]], window: Window) -> dict[str, Any]:
    """Name -> {kind, unit, series, ...} for each meaning that the scraped series carry."""
    samples = _by_series(rows)
    found: dict[str, Any] = {}
    for metric in SERVER_METRICS:
        for series in metric.series:
            values = _reduce(metric.kind, samples, series, window)
            if values is not None:
                found[metric.name] = {"kind": metric.kind, "unit": metric.unit, "series": series, **values}
                break
    return found


def gauge_series(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Times and values of one meaning's gauge; empty where it was not scraped."""
    metric = next(each for each in SERVER_METRICS if each.name == name)
    samples = _by_series(rows)
    for series in metric.series:
        points = _summed(samples, series)
        if points:
            return sorted(points), [points[t_s] for t_s in sorted(points)]
    return [], []


Samples = Mapping[str, list[tuple[str, float, float]]]


def _by_series(rows: Iterable[Mapping[str, Any]]) -> Samples:
    samples: dict[str, list[tuple[str, float, float]]] = {}
    for row in rows:
        if row.get("value") is not None:
            samples.setdefault(row["name"], []).append((row.get("labels") or "", row["t_s"], row["value"]))
    return samples


def _summed(samples: Samples, series: str) -> dict[float, float]:
    """Value per scrape, summed over label sets that hold the wanted label, if `series` names one."""
    match = re.fullmatch(r"([^{]+)(?:\{(.*)\})?", series)
    assert match is not None, series
    name, label = match[1], match[2] or ""
    points: dict[float, float] = {}
    for labels, t_s, value in samples.get(name, ()):
        if label in labels:
            points[t_s] = points.get(t_s, 0.0) + value
    return points


def _reduce(kind: str, samples: Samples, series: str, window: Window) -> dict[str, float] | None:
    if kind == "histogram":
        base, _, label = series.partition("{")
        suffix = "{" + label if label else ""
        total = _difference(_summed(samples, f"{base}_sum{suffix}"), window)
        count = _difference(_summed(samples, f"{base}_count{suffix}"), window)
        return None if total is None or not count else {"mean": total / count, "count": count}
    points = _summed(samples, series)
    if kind == "counter":
        change = _difference(points or _summed(samples, f"{series}_total"), window)
        return None if change is None else {"change": change}
    inside = [value for t_s, value in points.items() if window.start_s <= t_s <= window.end_s]
    return {"mean": float(np.mean(inside)), "max": max(inside)} if inside else None


def _difference(points: Mapping[float, float], window: Window) -> float | None:
    """Growth over the window: from the last scrape at or before its start to the first at or after its end."""
    times = sorted(points)
    if len(times) < 2:
        return None
    first = max((t_s for t_s in times if t_s <= window.start_s), default=times[0])
    last = min((t_s for t_s in times if t_s >= window.end_s), default=times[-1])
    return points[last] - points[first] if last > first else None

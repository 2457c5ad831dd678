"""All metrics by name, and the interval of each.

Metrics of a request are in `per_request.py`, of token events in `pooled_metrics.py`, of a run in `run_metrics.py`.
"""

import math
import re

from reports.metrics.early_end import interval_factor, latency_interval
from reports.metrics.measured import Measured
from reports.metrics.requests.per_request import (
    LATENCY_NAME,
    PER_REQUEST,
    RequestMetric,
    request_metric_of,
)
from reports.metrics.requests.pooled_metrics import POOLED, PooledMetric
from reports.metrics.requests.request_series import RequestSeries
from reports.metrics.run_metrics import PER_RUN, RunMetric
from reports.metrics.titles import FRACTIONS
from reports.stats.bootstrap import block_length, bootstrap_mean, bootstrap_percentiles
from reports.stats.estimators import PERCENTILES, Interval, percentile_name

METRICS: tuple[RequestMetric | PooledMetric | RunMetric, ...] = (*PER_REQUEST, *POOLED, *PER_RUN)

ENDS_INCLUDED = FRACTIONS | {"goodput_rps"}
"""Metrics whose functions return the interval that the end of the run permits."""
STATISTIC = re.compile(r"mean|p\d+(?:\.\d+)?")


def has_interval(name: str) -> bool:
    """Whether a metric has an interval: a rate, a fraction, or a mean or percentile of a latency.

    >>> [has_interval(name) for name in ("ttft_p95_ms", "gap_mean_ms", "output_tokens_per_s", "ttft_max_ms", "speed")]
    [True, True, True, False, False]
    """
    if name in {metric.name for metric in PER_RUN}:
        return True
    match = LATENCY_NAME.fullmatch(name)
    if match is None or STATISTIC.fullmatch(match["stat"]) is None:
        return False
    return request_metric_of(name, is_open_loop=False) is not None or _is_pooled(match["name"])


def is_summarized(name: str) -> bool:
    """Whether a summary has a metric: a rate or fraction, or the mean, an extreme or a percentile of a latency.

    >>> [is_summarized(name) for name in ("ttft_p95_ms", "ttft_max_ms", "error_rate", "ttft_p59_ms", "ttft")]
    [True, True, True, False, False]
    """
    if name in {metric.name for metric in PER_RUN}:
        return True
    match = LATENCY_NAME.fullmatch(name)
    if match is None or not has_interval(f"{match['name']}_mean_ms"):
        return False
    return match["stat"] in {"mean", "min", "max", *map(percentile_name, PERCENTILES)}


def metric_interval(measured: Measured, name: str) -> Interval:
    """The value and 95 % interval of a metric by name. Raises KeyError for an unknown name.

    Latencies are in ms; in an open loop they count from the intended start.
    """
    for metric in PER_RUN:
        if metric.name == name:
            return run_interval(metric, measured)
    if not has_interval(name):
        raise KeyError(name)
    match = LATENCY_NAME.fullmatch(name)
    assert match is not None, "checked by has_interval"
    percentile = None if match["stat"] == "mean" else float(match["stat"][1:])
    column = request_metric_of(name, measured.manifest.is_open_loop)
    if column is None:
        return _pooled_interval(measured, match["name"], percentile).widened(interval_factor(measured)).scaled(1e3)
    return latency_interval(_interval(measured, column, percentile), measured, column).scaled(1e3)


def run_interval(metric: RunMetric, measured: Measured) -> Interval:
    """The value of a metric of the whole run, with the interval that the end of the run permits."""
    found = metric.function(measured)
    return found if metric.name in ENDS_INCLUDED else found.widened(interval_factor(measured))


def _interval(measured: Measured, column: str, percentile: float | None) -> Interval:
    series = RequestSeries.of(measured).series(column)
    return (series.mean() if percentile is None else series.percentile(percentile)).interval


def _pooled_interval(measured: Measured, short: str, percentile: float | None) -> Interval:
    pooled = next(metric for metric in POOLED if metric.name == f"{short}_s")
    values, sizes = pooled.function(measured)
    window = measured.window
    mean_in_flight = measured.concurrency.mean(window.start_s, window.end_s) if window.length_s > 0 else 0.0
    block = block_length(len(sizes), mean_in_flight)
    if percentile is None:
        return bootstrap_mean(values, sizes, block)
    return bootstrap_percentiles(values, sizes, block, [percentile])[0]


def relative_half_width(interval: Interval) -> float:
    """Half the interval divided by the value; infinite without an interval."""
    half = (interval.hi - interval.lo) / 2
    return half / abs(interval.value) if interval.value and not math.isnan(half) else math.inf


def _is_pooled(name: str) -> bool:
    return f"{name}_s" in {metric.name for metric in POOLED}

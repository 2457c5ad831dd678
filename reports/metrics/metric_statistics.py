"""The statistics of each metric in `summary.json`: count, mean, extremes, percentiles, and their intervals."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reports.metrics.early_end import interval_factor, latency_interval
from reports.metrics.measured import Measured
from reports.metrics.named_metrics import METRICS
from reports.metrics.requests.counted import GENERATOR_DELAYS, least_bound
from reports.metrics.requests.per_request import RequestMetric
from reports.metrics.requests.pooled_metrics import PooledMetric
from reports.metrics.requests.request_series import RequestSeries
from reports.run_schema import NOT_FAILED, Status
from reports.stats.bootstrap import block_length, bootstrap_percentiles
from reports.stats.bounded_estimate import BoundedEstimate
from reports.stats.dependence import independent_support
from reports.stats.estimators import PERCENTILES, Interval, adjusted_quantile, is_supported, percentile_name
from reports.stats.queue_intervals import QueueSeries


class BootstrapCache:
    """Percentiles with intervals of a run's series; equal series are resampled once.

    Series of different metrics are often equal: with one token per event, ITL is the gap.
    """

    def __init__(self, concurrency: float) -> None:
        self._concurrency = 0.0 if math.isnan(concurrency) else concurrency
        self._known: dict[bytes, list[Interval]] = {}

    def of(self, values: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64]) -> list[Interval]:
        key = b"".join(hashlib.blake2b(each.data).digest() for each in (values, sizes))
        if key not in self._known:
            block = block_length(len(sizes), self._concurrency)
            self._known[key] = bootstrap_percentiles(values, sizes, block)
        return self._known[key]


def metric_statistics(measured: Measured, concurrency: float) -> dict[str, Any]:
    bootstraps, series = BootstrapCache(concurrency), RequestSeries.of(measured)
    status = measured.population["status"]
    succeeded, failures = np.asarray(status == Status.OK), int((~status.isin(NOT_FAILED)).sum())
    return {
        metric.name: _per_request(metric, measured, series.series(metric.name))
        | {"adjusted": _adjusted(metric, measured.population[metric.name].to_numpy()[succeeded], failures)}
        if isinstance(metric, RequestMetric)
        else _pooled(metric, measured, bootstraps)
        for metric in METRICS
        if isinstance(metric, RequestMetric | PooledMetric)
    }


def _per_request(metric: RequestMetric, measured: Measured, series: QueueSeries) -> dict[str, Any]:
    population = measured.population
    bound = least_bound(population, metric.name)
    mean, *percentiles = (
        BoundedEstimate(latency_interval(each.interval, measured, metric.name))
        for each in (series.mean(), *map(series.percentile, PERCENTILES))
    )
    found = _statistics(metric, series.values, percentiles, bound)
    hi = mean.interval.hi if math.isinf(bound) else math.inf
    return found | {
        "mean_interval": {"lo": mean.interval.lo, "hi": hi, "needed": mean.needed},
        "at_least": math.isfinite(bound),
        "population": "requests started in the window",
        "missing": len(population) - len(series.values),
    }


def _adjusted(
    metric: RequestMetric, succeeded: npt.NDArray[np.float64], failures: int
) -> dict[str, float | None] | None:
    """Percentiles if failed requests count as infinitely slow; None if the metric is not a latency of the server.

    succeeded: the values of the succeeded requests; NaN for an unknown one.
    """
    if metric.unit != "s" or metric.name in GENERATOR_DELAYS:
        return None
    values = np.sort(succeeded[~np.isnan(succeeded)])
    return {percentile_name(p): adjusted_quantile(values, failures, p) for p in PERCENTILES}


def _pooled(metric: PooledMetric, measured: Measured, bootstraps: BootstrapCache) -> dict[str, Any]:
    values, sizes = metric.function(measured)
    unit = {"gap_s": "gaps", "itl_s": "tokens"}[metric.name]
    intervals = bootstraps.of(values, sizes)
    requests_per_value = len(sizes) / max(len(values), 1)
    estimates = [
        BoundedEstimate(interval).widened(interval_factor(measured))
        if is_supported(percentile, len(values))
        else BoundedEstimate.unsupported(
            interval.value, math.ceil(requests_per_value * independent_support(percentile))
        )
        for percentile, interval in zip(PERCENTILES, intervals, strict=True)
    ]
    found = _statistics(metric, values, estimates)
    exact = {"exact": bool(measured.population["itl_exact"].all())} if metric.name == "itl_s" else {}
    return (
        found
        | exact
        | {
            "population": f"{unit} of requests started in the window, pooled",
            "missing": int((sizes == 0).sum()),
            "adjusted": None,
        }
    )


def _statistics(
    metric: RequestMetric | PooledMetric,
    values: npt.NDArray[np.float64],
    estimates: Sequence[BoundedEstimate],
    least_bound: float = math.inf,
) -> dict[str, Any]:
    """The statistics of a metric. Values and percentiles from `least_bound` on are lower bounds."""
    count = len(values)
    known = float(np.max(values, where=values < least_bound, initial=-math.inf))
    return {
        "unit": metric.unit,
        "direction": metric.direction,
        "population": "",
        "count": count,
        "missing": 0,
        "mean": float(np.mean(values)) if count else None,
        "std": float(np.std(values, ddof=1)) if count > 1 else None,
        "min": float(np.min(values)) if count else None,
        "max": float(np.max(values)) if count else None,
        "percentiles": {
            percentile_name(percentile): {
                "value": each.interval.value,
                "lo": each.interval.lo,
                "hi": math.inf if each.interval.value > known else each.interval.hi,
                "at_least": each.interval.value > known,
                "supported": each.is_supported,
                "needed": each.needed,
            }
            for percentile, each in zip(PERCENTILES, estimates, strict=True)
        },
    }

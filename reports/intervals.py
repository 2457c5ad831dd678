"""The 95 % interval of one metric of a run, by the name that limits and tables use."""

import math
import re

import numpy as np
import numpy.typing as npt

from reports.measured import Measured
from reports.metrics import PER_RUN, POOLED
from reports.per_request import LATENCY_NAME, request_metric_of
from reports.stats import Interval, block_length, bootstrap_mean, bootstrap_percentiles

STATISTIC = re.compile(r"mean|p\d+(?:\.\d+)?")


def has_interval(name: str) -> bool:
    """Whether there is such a metric and it has an interval: rates, shares, means and percentiles of latencies.

    >>> [has_interval(name) for name in ("ttft_p95_ms", "gap_mean_ms", "output_tokens_per_s", "ttft_max_ms", "speed")]
    [True, True, True, False, False]
    """
    if name in {metric.name for metric in PER_RUN}:
        return True
    match = LATENCY_NAME.fullmatch(name)
    if match is None or STATISTIC.fullmatch(match["stat"]) is None:
        return False
    return request_metric_of(name, is_open_loop=False) is not None or _is_pooled(match["name"])


def metric_interval(measured: Measured, name: str) -> Interval:
    """Value and interval; latencies in ms, those of an open loop from the intended start. Raises KeyError."""
    for metric in PER_RUN:
        if metric.name == name:
            return metric.function(measured)
    if not has_interval(name):
        raise KeyError(name)
    match = LATENCY_NAME.fullmatch(name)
    assert match is not None, "has_interval looked"
    values, sizes = _values(measured, name, match["name"])
    window = measured.window
    mean_in_flight = measured.concurrency.mean(window.start_s, window.end_s) if window.length_s > 0 else 0.0
    block = block_length(len(sizes), mean_in_flight)
    if match["stat"] == "mean":
        found = bootstrap_mean(values, sizes, block)
    else:
        [found] = bootstrap_percentiles(values, sizes, block, [float(match["stat"][1:])])
    return Interval(1e3 * found.value, 1e3 * found.lo, 1e3 * found.hi)


def relative_half_width(interval: Interval) -> float:
    """Half the interval as a share of the value; infinite where there is none."""
    half = (interval.hi - interval.lo) / 2
    return half / abs(interval.value) if interval.value and not math.isnan(half) else math.inf


def _is_pooled(name: str) -> bool:
    return f"{name}_s" in {metric.name for metric in POOLED}


def _values(measured: Measured, name: str, short: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    pooled = next((metric for metric in POOLED if metric.name == f"{short}_s"), None)
    if pooled is not None:
        return pooled.function(measured)
    column = request_metric_of(name, measured.manifest.is_open_loop)
    assert column is not None, "has_interval looked"
    values = np.asarray(measured.population[column].dropna(), dtype=np.float64)
    return values, np.ones(len(values), dtype=np.int64)

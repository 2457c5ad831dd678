"""The pooled metrics and the metrics of a whole run, and the interval of any metric by name.

Metrics of one request are in `per_request.py`.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.metrics.measured import Array, Measured
from reports.metrics.per_request import (
    LATENCY_NAME,
    PER_REQUEST,
    Direction,
    RequestMetric,
    meets_objectives,
    request_metric_of,
)
from reports.metrics.request_series import RequestSeries, run_fraction, run_throughput
from reports.metrics.structured import validity_rate
from reports.metrics.windows import Concurrency
from reports.run_schema import NOT_FAILED
from reports.stats.bootstrap import block_length, bootstrap_mean, bootstrap_percentiles
from reports.stats.estimators import NUM_BATCHES, Interval


@dataclass(frozen=True, slots=True)
class PooledMetric:
    """A value per token event or token, pooled over requests.

    `function` returns the values in the order of the requests, and the number of values of each request.
    """

    name: str
    title: str
    unit: str
    direction: Direction
    formula: str
    function: Callable[[Measured], tuple[Array, npt.NDArray[np.int64]]]


def _gaps(measured: Measured) -> tuple[Array, npt.NDArray[np.int64]]:
    gaps = measured.counted_events.gaps
    return gaps.values / 1e9, gaps.sizes


def _itl(measured: Measured) -> tuple[Array, npt.NDArray[np.int64]]:
    events = measured.counted_events
    if events.is_one_token_each:
        return _gaps(measured)
    values: list[Array] = []
    sizes = np.zeros(len(events.first_ns))
    for batch in events.batches():
        later = ~np.isnan(batch.gap_s)
        tokens = np.maximum(np.rint(batch.tokens[later]), 1).astype(np.int64)
        sizes += np.bincount(batch.request[later], weights=tokens, minlength=len(sizes))
        values.append(np.repeat(batch.gap_s[later] / tokens, tokens))
    return np.concatenate(values or [np.empty(0)]), sizes.astype(np.int64)


POOLED = (
    PooledMetric("gap_s", "Gap", "s", Direction.LOWER, "t_event[i] - t_event[i-1]", _gaps),
    PooledMetric("itl_s", "ITL", "s", Direction.LOWER, "each gap split evenly over the tokens of its event", _itl),
)


@dataclass(frozen=True, slots=True)
class RunMetric:
    """One value for the whole run; NaN if the run has no data for it."""

    name: str
    title: str
    unit: str
    direction: Direction
    formula: str
    function: Callable[[Measured], Interval]


def point(value: float) -> Interval:
    """A value without an interval."""
    return Interval(value, math.nan, math.nan)


def _output_rate(m: Measured) -> Interval:
    return m.rate(m.output_batches)


def _input_moments(m: Measured) -> "tuple[pd.Series[float], pd.Series[float]]":
    return m.requests["t_first_ns"].fillna(m.requests["t_end_ns"]) / 1e9, m.requests["input_tokens"]


def _input_rate(m: Measured) -> Interval:
    return m.batches(*_input_moments(m))


def _total_rate(m: Measured) -> Interval:
    moments, tokens = _input_moments(m)
    span = (m.window.start_s, m.window.end_s)
    if m.window.length_s <= 0:
        return point(math.nan)
    known = m.window.contains(moments) & ~np.isnan(np.asarray(tokens))
    sums, _ = np.histogram(moments[known], NUM_BATCHES, span, weights=tokens[known])
    return m.rate(m.output_batches + sums)


def meets_slo(m: Measured) -> "pd.Series[bool] | None":
    """The judged requests that meet every objective; None without objectives."""
    return meets_objectives(m.judged, m.manifest.objectives, m.manifest.is_open_loop)


def _goodput(m: Measured) -> Interval:
    good = meets_slo(m)
    return point(math.nan) if good is None else m.batches(m.judged.loc[good, "start_s"])


def _attainment(m: Measured) -> Interval:
    good = meets_slo(m)
    return point(math.nan) if good is None else run_fraction(m, np.asarray(good, dtype=np.bool_))


def _error_rate(m: Measured) -> Interval:
    return run_fraction(m, ~np.asarray(m.population["status"].isin(NOT_FAILED), dtype=np.bool_))


def _in_window(statistic: Callable[[Concurrency, float, float], float]) -> Callable[[Measured], Interval]:
    def function(m: Measured) -> Interval:
        has_length = m.window.length_s > 0
        return point(statistic(m.concurrency, m.window.start_s, m.window.end_s) if has_length else math.nan)

    return function


def _timeliness(m: Measured) -> Interval:
    """Tokens that arrived in time; for a failed request the requested tokens count as due."""
    bounds = {request_metric_of(each["metric"], False): each for each in m.manifest.objectives if each.get("max")}
    if not {"ttft_s", "tpot_s"} <= bounds.keys():
        return point(math.nan)
    ttft_s, tpot_s = (
        bounds[name]["max"] / (1e3 if bounds[name]["metric"].endswith("_ms") else 1) for name in ("ttft_s", "tpot_s")
    )
    start_s = np.asarray(m.population["start_s"])
    arrived = 0.0
    for batch in m.started_events.batches():
        order = np.cumsum(batch.tokens)
        first = np.flatnonzero(np.isnan(batch.gap_s))
        before = np.repeat((order - batch.tokens)[first], np.diff(np.append(first, len(order))))
        due_s = start_s[batch.request] + ttft_s + (order - before - 1) * tpot_s
        arrived += float(batch.tokens[batch.t_s <= due_s].sum())
    requested = m.population["requested_output_tokens"].fillna(m.population["planned_output_tokens"])
    produced = m.population["output_tokens"].fillna(0)
    failed = ~m.population["status"].isin(NOT_FAILED)
    due = float(produced.where(~failed, np.fmax(requested, produced)).fillna(0).sum())
    return point(arrived / due if due else math.nan)


def _energy(m: Measured) -> Interval:
    """Tokens and energy of the whole window: power is linear between samples, also across the window's edges.

    None if the samples do not cover the window.
    """
    t_s, watts = m.power
    if not len(t_s) or t_s[0] > m.window.start_s or t_s[-1] < m.window.end_s:
        return point(math.nan)
    inside = (t_s > m.window.start_s) & (t_s < m.window.end_s)
    moments = np.concatenate(([m.window.start_s], t_s[inside], [m.window.end_s]))
    power = np.interp(moments, t_s, watts)
    joules = float(((power[1:] + power[:-1]) / 2) @ np.diff(moments))
    rate = _output_rate(m)
    return point(rate.value * m.window.length_s / joules if joules > 0 else math.nan)


def _cost(m: Measured) -> Interval:
    rate, price = _output_rate(m), m.manifest.price_per_hour
    if price is None or not rate.value > 0:
        return point(math.nan)
    per_rate = price / 3600 * 1e6
    lo = per_rate / rate.hi if rate.hi > 0 else math.nan
    return Interval(per_rate / rate.value, lo, per_rate / rate.lo if rate.lo > 0 else math.nan)


def _start_up(name: str) -> Callable[[Measured], Interval]:
    """A time of the launch that the run was measured on; NaN for a server that was not launched."""
    return lambda m: point((m.manifest.target.get("start_up") or {}).get(name, math.nan))


def _little(m: Measured) -> Interval:
    mean = _in_window(Concurrency.mean)(m).value
    sent_s, end_s = m.requests["t_sent_ns"] / 1e9, m.requests["t_end_ns"] / 1e9
    inside = m.window.contains(sent_s)
    residence = float((end_s - sent_s)[inside].sum())
    return point(abs(mean - residence / m.window.length_s) / mean if mean > 0 else math.nan)


PER_RUN = (
    RunMetric(
        "output_tokens_per_s",
        "Output tokens",
        "tokens/s",
        Direction.HIGHER,
        "output tokens received in the window / its length",
        _output_rate,
    ),
    RunMetric(
        "input_tokens_per_s",
        "Input tokens",
        "tokens/s",
        Direction.HIGHER,
        "input tokens of requests whose first token fell in the window / its length",
        _input_rate,
    ),
    RunMetric("total_tokens_per_s", "Total tokens", "tokens/s", Direction.HIGHER, "sum of the two", _total_rate),
    RunMetric(
        "requests_per_s",
        "Requests",
        "req/s",
        Direction.HIGHER,
        "successful completions in the window / its length",
        run_throughput,
    ),
    RunMetric(
        "offered_rate",
        "Offered",
        "req/s",
        Direction.NONE,
        "intended sends in the window / its length",
        lambda m: m.batches(m.requests["t_intended_ns"] / 1e9),
    ),
    RunMetric(
        "sent_rate",
        "Sent",
        "req/s",
        Direction.NONE,
        "actual sends in the window / its length",
        lambda m: m.batches(m.requests["t_sent_ns"] / 1e9),
    ),
    RunMetric(
        "concurrency_mean",
        "In flight, mean",
        "requests",
        Direction.NONE,
        "time-weighted number in flight",
        _in_window(Concurrency.mean),
    ),
    RunMetric(
        "concurrency_p50",
        "In flight, median",
        "requests",
        Direction.NONE,
        "time-weighted median in flight",
        _in_window(Concurrency.median),
    ),
    RunMetric(
        "concurrency_max",
        "In flight, max",
        "requests",
        Direction.NONE,
        "maximum in flight",
        _in_window(Concurrency.max),
    ),
    RunMetric(
        "goodput_rps",
        "Goodput",
        "req/s",
        Direction.HIGHER,
        "requests started in the window that meet every objective / its length",
        _goodput,
    ),
    RunMetric(
        "slo_attainment",
        "Objectives met",
        "fraction",
        Direction.HIGHER,
        "requests that meet every objective / all started in the window that were not abandoned",
        _attainment,
    ),
    RunMetric(
        "token_timeliness",
        "Tokens in time",
        "fraction",
        Direction.HIGHER,
        "tokens before TTFT objective + i * TPOT objective / tokens due",
        _timeliness,
    ),
    RunMetric(
        "error_rate",
        "Errors",
        "fraction",
        Direction.LOWER,
        "requests started in the window that failed / all",
        _error_rate,
    ),
    RunMetric(
        "tokens_per_joule",
        "Tokens per joule",
        "tokens/J",
        Direction.HIGHER,
        "output tokens in the window / accelerator energy",
        _energy,
    ),
    RunMetric(
        "cost_per_mtok",
        "Cost per million tokens",
        "price",
        Direction.LOWER,
        "price per hour / 3600 / output_tokens_per_s * 1e6",
        _cost,
    ),
    RunMetric(
        "structured_validity",
        "Valid structured answers",
        "fraction",
        Direction.HIGHER,
        "complete structured answers that their schema accepts / all",
        validity_rate,
    ),
    RunMetric(
        "startup_ready_s",
        "Start-up: ready",
        "s",
        Direction.LOWER,
        "launch of the server until its ready route answers",
        _start_up("ready_s"),
    ),
    RunMetric(
        "startup_first_token_s",
        "Start-up: first token",
        "s",
        Direction.LOWER,
        "launch of the server until one token is answered",
        _start_up("first_token_s"),
    ),
    RunMetric(
        "little_residual",
        "Little's law residual",
        "fraction",
        Direction.LOWER,
        "relative difference of concurrency_mean and request rate * mean residence",
        _little,
    ),
)

METRICS: tuple[RequestMetric | PooledMetric | RunMetric, ...] = (*PER_REQUEST, *POOLED, *PER_RUN)


STATISTIC = re.compile(r"mean|p\d+(?:\.\d+)?")


def has_interval(name: str) -> bool:
    """Whether a metric of this name has an interval: rates, fractions, means and percentiles of latencies.

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
    """The value and 95 % interval of a metric by name; latencies in ms, in an open loop from the intended start.

    Raises KeyError for an unknown name.
    """
    for metric in PER_RUN:
        if metric.name == name:
            return metric.function(measured)
    if not has_interval(name):
        raise KeyError(name)
    match = LATENCY_NAME.fullmatch(name)
    assert match is not None, "checked by has_interval"
    percentile = None if match["stat"] == "mean" else float(match["stat"][1:])
    column = request_metric_of(name, measured.manifest.is_open_loop)
    found = (
        _pooled_interval(measured, match["name"], percentile)
        if column is None
        else _interval(measured, column, percentile)
    )
    return found.scaled(1e3)


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

"""The metrics of a whole run: name, unit, direction, formula and function."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from reports.metrics.measured import Measured
from reports.metrics.requests.per_request import (
    Direction,
    meets_objectives,
    request_metric_of,
)
from reports.metrics.requests.structured import validity_rate
from reports.metrics.run_fraction import run_fraction
from reports.metrics.run_rates import good_rate, input_rate, output_rate, run_throughput, total_rate
from reports.metrics.windows import Concurrency
from reports.run_schema import NOT_FAILED
from reports.stats.estimators import Interval


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


def meets_slo(m: Measured) -> "pd.Series[bool] | None":
    """The judged requests that meet every objective; None without objectives."""
    return meets_objectives(m.judged, m.manifest.objectives, m.manifest.is_open_loop)


def _goodput(m: Measured) -> Interval:
    good = meets_slo(m)
    return point(math.nan) if good is None else good_rate(m, good)


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
    """The share of tokens that arrived in time; all requested tokens of a failed request were due."""
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
    """Output tokens per joule of the window. Power is interpolated linearly between samples.

    NaN if the samples do not cover the window.
    """
    t_s, watts = m.power
    if not len(t_s) or t_s[0] > m.window.start_s or t_s[-1] < m.window.end_s:
        return point(math.nan)
    inside = (t_s > m.window.start_s) & (t_s < m.window.end_s)
    moments = np.concatenate(([m.window.start_s], t_s[inside], [m.window.end_s]))
    power = np.interp(moments, t_s, watts)
    joules = float(((power[1:] + power[:-1]) / 2) @ np.diff(moments))
    rate = m.rate(m.output_batches)
    return point(rate.value * m.window.length_s / joules if joules > 0 else math.nan)


def _cost(m: Measured) -> Interval:
    rate, price = output_rate(m), m.manifest.price_per_hour
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
        output_rate,
    ),
    RunMetric(
        "input_tokens_per_s",
        "Input tokens",
        "tokens/s",
        Direction.HIGHER,
        "input tokens of requests whose first token fell in the window / its length",
        input_rate,
    ),
    RunMetric("total_tokens_per_s", "Total tokens", "tokens/s", Direction.HIGHER, "sum of the two", total_rate),
    RunMetric(
        "requests_per_s",
        "Requests",
        "requests/s",
        Direction.HIGHER,
        "successful completions in the window / its length",
        run_throughput,
    ),
    RunMetric(
        "offered_rate",
        "Offered",
        "requests/s",
        Direction.NONE,
        "intended sends in the window / its length",
        lambda m: m.batches(m.requests["t_intended_ns"] / 1e9),
    ),
    RunMetric(
        "sent_rate",
        "Sent",
        "requests/s",
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
        "requests/s",
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
        "Failed",
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
        "Cost per million output tokens",
        "unit of the price",
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

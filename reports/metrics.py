"""Every metric, once. Those of a request are in `per_request.py`; here are the pooled ones and those of a whole run."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.measured import Array, Measured
from reports.per_request import PER_REQUEST, Direction, RequestMetric, meets_objectives, request_metric_of
from reports.records import Status
from reports.stats import NUM_BATCHES, Interval, proportion
from reports.windows import Concurrency


@dataclass(frozen=True, slots=True)
class PooledMetric:
    """A value per token event or token, pooled over requests.

    `function` gives the values, request after request, and how many each request has.
    """

    name: str
    title: str
    unit: str
    direction: Direction
    formula: str
    function: Callable[[Measured], tuple[Array, npt.NDArray[np.int64]]]


def _gaps(measured: Measured) -> tuple[Array, npt.NDArray[np.int64]]:
    gaps = measured.started_events.gaps
    return gaps.values / 1e9, gaps.sizes


def _itl(measured: Measured) -> tuple[Array, npt.NDArray[np.int64]]:
    events = measured.started_events
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
    """One value for the whole run, NaN where the run cannot tell it."""

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
    known = m.window.holds(moments) & ~np.isnan(np.asarray(tokens))
    sums, _ = np.histogram(moments[known], NUM_BATCHES, span, weights=tokens[known])
    return m.rate(m.output_batches + sums)


def _completions(m: Measured) -> Interval:
    succeeded = m.requests["status"] == Status.OK
    return m.batches(m.requests.loc[succeeded, "t_end_ns"] / 1e9)


def is_good(m: Measured) -> "pd.Series[bool] | None":
    return meets_objectives(m.population, m.manifest.objectives, m.manifest.is_open_loop)


def _goodput(m: Measured) -> Interval:
    good = is_good(m)
    return point(math.nan) if good is None else m.batches(m.population.loc[good, "start_s"])


def _attainment(m: Measured) -> Interval:
    good = is_good(m)
    return point(math.nan) if good is None else proportion(np.asarray(good, dtype=np.bool_))


def _error_rate(m: Measured) -> Interval:
    return proportion(np.asarray(m.population["status"] != Status.OK, dtype=np.bool_))


def _in_window(statistic: Callable[[Concurrency, float, float], float]) -> Callable[[Measured], Interval]:
    def function(m: Measured) -> Interval:
        has_length = m.window.length_s > 0
        return point(statistic(m.concurrency, m.window.start_s, m.window.end_s) if has_length else math.nan)

    return function


def _timeliness(m: Measured) -> Interval:
    """Tokens that were there when due; a failed request owes the tokens that were asked of it."""
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
    asked = m.population["requested_output_tokens"].fillna(m.population["planned_output_tokens"])
    produced = m.population["output_tokens"].fillna(0)
    failed = m.population["status"] != Status.OK
    due = float(produced.where(~failed, np.fmax(asked, produced)).fillna(0).sum())
    return point(arrived / due if due else math.nan)


def _energy(m: Measured) -> Interval:
    t_s, watts = m.power
    inside = m.window.holds(t_s)
    watts, t_s = watts[inside], t_s[inside]
    joules = float(((watts[1:] + watts[:-1]) / 2) @ np.diff(t_s)) if len(t_s) > 1 else 0.0
    rate = _output_rate(m)
    return point(rate.value * m.window.length_s / joules if joules > 0 else math.nan)


def _cost(m: Measured) -> Interval:
    rate, price = _output_rate(m), m.manifest.price_per_hour
    if price is None or not rate.value > 0:
        return point(math.nan)
    per_rate = price / 3600 * 1e6
    lo = per_rate / rate.hi if rate.hi > 0 else math.nan
    return Interval(per_rate / rate.value, lo, per_rate / rate.lo if rate.lo > 0 else math.nan)


def _little(m: Measured) -> Interval:
    mean = _in_window(Concurrency.mean)(m).value
    sent_s, end_s = m.requests["t_sent_ns"] / 1e9, m.requests["t_end_ns"] / 1e9
    inside = m.window.holds(sent_s)
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
        _completions,
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
        "concurrency_max", "In flight, max", "requests", Direction.NONE, "most in flight", _in_window(Concurrency.max)
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
        "share",
        Direction.HIGHER,
        "requests that meet every objective / all started in the window",
        _attainment,
    ),
    RunMetric(
        "token_timeliness",
        "Tokens in time",
        "share",
        Direction.HIGHER,
        "tokens before TTFT objective + i * TPOT objective / tokens due",
        _timeliness,
    ),
    RunMetric(
        "error_rate",
        "Errors",
        "share",
        Direction.LOWER,
        "requests started in the window that did not end ok / all",
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
        "little_residual",
        "Little's law residual",
        "share",
        Direction.LOWER,
        "relative difference of concurrency_mean and request rate * mean residence",
        _little,
    ),
)

METRICS: tuple[RequestMetric | PooledMetric | RunMetric, ...] = (*PER_REQUEST, *POOLED, *PER_RUN)

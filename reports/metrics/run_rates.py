"""Rates of a run with their intervals: requests, tokens and good requests per second of the window.

In a closed loop the users keep the batch means of tokens independent. In an open loop a queue makes them dependent:
there the variance comes from the requests, by their starts and by their ends, and the larger one counts.
"""

import math

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.metrics.early_end import DECIDED, interval_factor
from reports.metrics.measured import Array, Measured
from reports.metrics.requests.request_series import run_dependence
from reports.metrics.run_fraction import run_fraction
from reports.metrics.windows import UNEVEN_MODES
from reports.run_schema import Status
from reports.stats.dependence import Dependence
from reports.stats.estimators import NUM_BATCHES, Interval
from reports.stats.rate_intervals import amount_rate, throughput


def run_throughput(measured: Measured) -> Interval:
    """Requests completed per second of the window."""
    ends_s = _ends_s(measured)[_succeeded(measured)]
    rate = measured.batches(ends_s).value
    found = throughput(np.sort(ends_s[measured.window.contains(ends_s)]), _dependence(measured)).interval
    # The gaps leave out the ends of the window.
    scale = rate / found.value
    return Interval(rate, found.lo * scale, found.hi * scale, found.needed)


def output_rate(measured: Measured) -> Interval:
    """Output tokens received per second of the window."""
    return _token_rate(measured, measured.output_batches, _column(measured, "output_tokens"))


def input_rate(measured: Measured) -> Interval:
    """Input tokens per second, of the requests whose first token fell in the window."""
    return _token_rate(measured, _input_batches(measured), _column(measured, "input_tokens"))


def total_rate(measured: Measured) -> Interval:
    tokens = _column(measured, "output_tokens") + _column(measured, "input_tokens")
    return _token_rate(measured, measured.output_batches + _input_batches(measured), tokens)


def good_rate(measured: Measured, is_good: "pd.Series[bool]") -> Interval:
    """Requests started per second of the window that meet every objective. is_good: of the judged requests.

    Its error is that of the attainment and that of the rate of all requests, both as the end of the run permits. After
    a decision about the attainment, batch means of a changing load have no bounds: they do not allow for the looks.
    """
    by_batches, factor = measured.batches(measured.judged.loc[is_good, "start_s"]), interval_factor(measured)
    if not _is_level(measured):
        is_decided = measured.window.stop_reason in DECIDED
        return Interval(by_batches.value, math.nan, math.nan) if is_decided else by_batches.widened(factor)
    share = run_fraction(measured, np.asarray(is_good, dtype=np.bool_))
    all_requests = _request_rate(measured).widened(factor)
    needed = [each.needed for each in (share, all_requests) if each.needed is not None]
    if math.isnan(share.lo) or math.isnan(all_requests.lo):
        return Interval(by_batches.value, math.nan, math.nan, max(needed, default=None))
    if share.value == 0:
        return Interval(0.0, 0.0, share.hi * all_requests.hi)
    lo, hi = (
        math.hypot(getattr(share, bound) / share.value - 1, getattr(all_requests, bound) / all_requests.value - 1)
        for bound in ("lo", "hi")
    )
    return Interval(by_batches.value, by_batches.value * max(1 - lo, 0.0), by_batches.value * (1 + hi))


def _token_rate(measured: Measured, batches: Array, tokens: Array) -> Interval:
    """batches: tokens in each batch of the window; tokens: those of each request."""
    by_batches = measured.rate(batches)
    if not measured.manifest.is_open_loop or not _is_level(measured) or not by_batches.value > 0:
        return by_batches
    dependence = _dependence(measured)
    starts, ends_s = measured.started, _ends_s(measured)
    ended = np.flatnonzero(measured.window.contains(ends_s) & (tokens > 0))
    ended = ended[np.argsort(ends_s[ended], kind="stable")]
    found = [
        amount_rate(_starts_s(measured)[starts], tokens[starts], dependence).interval,
        amount_rate(ends_s[ended], tokens[ended], dependence).interval,
    ]
    widest = max(found, key=lambda each: math.inf if math.isnan(each.lo) else each.hi / each.value)
    scale = by_batches.value / widest.value
    return Interval(by_batches.value, widest.lo * scale, widest.hi * scale, widest.needed)


def _request_rate(measured: Measured) -> Interval:
    """The rate of starts in an open loop, and of completions in a closed loop."""
    if not measured.manifest.is_open_loop:
        return run_throughput(measured)
    return throughput(_starts_s(measured)[measured.started], _dependence(measured)).interval


def _is_level(measured: Measured) -> bool:
    return measured.manifest.mode not in UNEVEN_MODES and measured.window.length_s > 0


def _dependence(measured: Measured) -> Dependence:
    return run_dependence(measured, _succeeded(measured)[measured.started])


def _succeeded(measured: Measured) -> npt.NDArray[np.bool_]:
    return np.asarray(measured.requests["status"] == Status.OK, dtype=np.bool_)


def _starts_s(measured: Measured) -> Array:
    return np.asarray(measured.requests["start_s"], dtype=np.float64)


def _ends_s(measured: Measured) -> Array:
    return np.asarray(measured.requests["t_end_ns"], dtype=np.float64) / 1e9


def _column(measured: Measured, name: str) -> Array:
    """Tokens of each request; 0 where they are unknown."""
    return np.nan_to_num(np.asarray(measured.requests[name], dtype=np.float64))


def _input_batches(measured: Measured) -> Array:
    """Input tokens in each batch of the window, at the first token of their request."""
    moments_s = np.asarray(measured.requests["t_first_ns"].fillna(measured.requests["t_end_ns"]) / 1e9)
    inside = measured.window.contains(moments_s)
    span = (measured.window.start_s, measured.window.end_s)
    if measured.window.length_s <= 0:
        return np.zeros(NUM_BATCHES)
    weights = _column(measured, "input_tokens")[inside]
    return np.asarray(np.histogram(moments_s[inside], NUM_BATCHES, span, weights=weights)[0], dtype=np.float64)

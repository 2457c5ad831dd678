"""Answers with a schema or a tool call: how many are valid, and their latencies against unconstrained answers.

A token mask that delays a step of the server delays every request of the batch. The difference between the two groups
is therefore only the cost that constrained requests have alone.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from reports.metrics.early_end import interval_factor
from reports.metrics.measured import Measured
from reports.metrics.requests.group_latencies import group_latencies
from reports.metrics.requests.per_request import primary_latency
from reports.metrics.requests.request_series import RequestSeries
from reports.metrics.run_fraction import run_fraction
from reports.run_schema import Status
from reports.stats.estimators import Interval

VALID = "valid"
LATENCIES = ("ttft_s", "tpot_s")
NOT_KNOWN = Interval(math.nan, math.nan, math.nan)


def validity_rate(measured: Measured) -> Interval:
    """The valid fraction of the complete structured answers; NaN without any."""
    return _validity(measured, _structured(measured))


def structured_summary(measured: Measured) -> list[dict[str, Any]]:
    """A row per kind of answer, unconstrained answers first; empty if the load requests no structure."""
    complete = _complete(measured)
    if not _structured(measured).any():
        return []
    free = complete & _is_free(measured)
    series = RequestSeries.of(measured)
    rows: list[dict[str, Any]] = [
        {"kind": None, "requests": int(free.sum()), **group_latencies(series, free, LATENCIES)}
    ]
    for kind in sorted(measured.population["constraint"].dropna().unique()):
        own = complete & np.asarray(measured.population["constraint"] == kind)
        causes = measured.population["validity"][own].value_counts()
        ratios = {f"{name}_ratio": _ratio(_mean(series, name, own), _mean(series, name, free)) for name in LATENCIES}
        rows.append(
            {
                "kind": str(kind),
                "requests": int(own.sum()),
                "validity": _as_json(_validity(measured, own)),
                "causes": {str(cause): int(count) for cause, count in causes.items() if cause != VALID},
                **group_latencies(series, own, LATENCIES),
                **{name: _as_json(found) for name, found in ratios.items()},
            }
        )
    return rows


def _complete(measured: Measured) -> npt.NDArray[np.bool_]:
    return np.asarray(measured.population["status"] == Status.OK, dtype=np.bool_)


def _is_free(measured: Measured) -> npt.NDArray[np.bool_]:
    return np.asarray(measured.population["constraint"].isna(), dtype=np.bool_)


def _structured(measured: Measured) -> npt.NDArray[np.bool_]:
    """The complete structured answers, [population]."""
    return _complete(measured) & ~_is_free(measured)


def _validity(measured: Measured, own: npt.NDArray[np.bool_]) -> Interval:
    if not own.any():
        return NOT_KNOWN
    return run_fraction(measured, np.asarray(measured.population["validity"][own] == VALID, dtype=np.bool_))


def _mean(series: RequestSeries, name: str, own: npt.NDArray[np.bool_]) -> Interval:
    """The mean of a latency over the requests `own`, [population], with the dependence of the run."""
    column = primary_latency(name, series.measured.manifest.is_open_loop)
    return series.series(column, own).mean().interval.widened(interval_factor(series.measured))


def _ratio(value: Interval, base: Interval) -> Interval:
    """The quotient of two means, whose logarithms are taken as independent."""
    if not (value.value > 0 and base.value > 0):
        return NOT_KNOWN
    ratio = value.value / base.value
    if not (value.lo > 0 and base.lo > 0):
        return Interval(ratio, math.nan, math.nan)
    width = math.hypot(math.log(value.hi / value.lo), math.log(base.hi / base.lo)) / 2
    return Interval(ratio, ratio * math.exp(-width), ratio * math.exp(width))


def _as_json(found: Interval) -> dict[str, float | None]:
    return {"value": found.value, "lo": found.lo, "hi": found.hi}

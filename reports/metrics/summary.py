"""`summary.json`: every metric of a run with count, percentiles and intervals, and the verdict on the run."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.metrics.checks.abandoned import find_abandoned
from reports.metrics.checks.client_facts import client_facts
from reports.metrics.checks.overload import find_overload
from reports.metrics.checks.validity import judge_run
from reports.metrics.early_end import interval_factor
from reports.metrics.finish_run import finish_run
from reports.metrics.judged_objectives import judge_objective
from reports.metrics.measured import Measured
from reports.metrics.named_metrics import METRICS, run_interval
from reports.metrics.requests.counted import GENERATOR_DELAYS, least_bound
from reports.metrics.requests.per_adapter import adapters_summary
from reports.metrics.requests.per_request import LATENCY_NAME, RequestMetric, meets_objective, request_metric_of
from reports.metrics.requests.pooled_metrics import PooledMetric
from reports.metrics.requests.prefix_cache import cached_share
from reports.metrics.requests.request_series import RequestSeries
from reports.metrics.requests.structured import structured_summary
from reports.metrics.run_metrics import PER_RUN
from reports.metrics.server.server_series import server_summary
from reports.metrics.server.speculation import speculation_summary
from reports.run_schema import NOT_FAILED, Status
from reports.run_store import SCHEMA_VERSION, SUMMARY_FILE, RunResult, write_json
from reports.saved_run import load_run
from reports.stats.bootstrap import block_length, bootstrap_percentiles
from reports.stats.estimators import PERCENTILES, Interval, adjusted_quantile, is_supported, percentile_name
from reports.stats.queue_intervals import BoundedEstimate, QueueSeries, independent_support


@dataclass(frozen=True, slots=True)
class Analysis:
    """A measured and summarized run, the input of reports."""

    run: RunResult
    measured: Measured
    summary: dict[str, Any]

    @classmethod
    def of(cls, run: RunResult) -> "Analysis":
        measured = Measured.of(run)
        return cls(run, measured, _summary(run, measured))

    @classmethod
    def summarized(cls, directory: Path) -> "Analysis":
        """The analysis of a run whose `summary.json` this process has written: it is read."""
        run = load_run(directory)
        return cls(run, Measured.of(run), json.loads((directory / SUMMARY_FILE).read_bytes()))

    @property
    def label(self) -> str:
        return self.run.manifest.title

    def named(self, label: str) -> "Analysis":
        """The same analysis under another label."""
        run = dataclasses.replace(self.run, manifest=dataclasses.replace(self.run.manifest, label=label))
        return dataclasses.replace(self, run=run)


def summarize(run: RunResult) -> dict[str, Any]:
    """The content of `summary.json`; every number is finite or None."""
    return Analysis.of(run).summary


def analyse_run(directory: Path) -> Analysis:
    """Finish, measure and summarize the run of a directory; writes its `summary.json`. Raises RunDirectoryError."""
    finish_run(directory)
    analysis = Analysis.of(load_run(directory))
    write_json(directory / SUMMARY_FILE, analysis.summary)
    return analysis


def _summary(run: RunResult, measured: Measured) -> dict[str, Any]:
    facts, server = client_facts(run, measured), server_summary(run.server_metrics, measured.window)
    cached = cached_share(measured, server)
    window, overload = measured.window, find_overload(measured)
    abandoned = find_abandoned(measured, run.server_metrics)
    rates = {metric.name: run_interval(metric, measured) for metric in PER_RUN}
    metrics = _metrics(measured, rates["concurrency_mean"].value)
    summary = {
        "schema_version": SCHEMA_VERSION,
        "run_id": run.manifest.run_id,
        "verdict": judge_run(run, measured, facts, overload, cached, abandoned).to_json(),
        "overload": overload.to_json() if overload else None,
        "abandoned": abandoned.to_json() if abandoned else None,
        "window": {
            "start_s": window.start_s,
            "end_s": window.end_s,
            "warmup_rule": window.warmup_rule,
            "truncation_s": window.truncation_s,
            "drain_s": window.drain_s,
            "stop_reason": window.stop_reason,
        },
        "counts": _counts(measured),
        "metrics": metrics,
        "rates": {name: _interval(found) for name, found in rates.items()},
        "slo": _slo(measured, metrics, rates, is_growing=overload is not None and overload.is_growing),
        "client": facts,
        "server": server,
        "cached": cached.to_json(),
        "speculation": speculation_summary(run.server_metrics, measured.window),
        "structured": structured_summary(measured),
        "adapters": adapters_summary(measured),
        "workload": _workload(measured),
    }
    return _finite(summary)


def metric_value(summary: Mapping[str, Any], name: str, is_open_loop: bool) -> float | None:
    """The value of a metric in a summary, by its name in limits and tables (`ttft_p95_ms`, `output_tokens_per_s`).

    In an open loop TTFT and E2E count from the intended start. Raises KeyError for an unknown name.
    """
    if name in summary["rates"]:
        return _number(summary["rates"][name]["value"])
    match = LATENCY_NAME.fullmatch(name)
    if match is None:
        raise KeyError(name)
    column = request_metric_of(name, is_open_loop) or f"{match['name']}_s"
    found = summary["metrics"][column]
    stat = match["stat"]
    value = found["percentiles"][stat]["value"] if stat.startswith("p") else found[stat]
    return None if value is None else 1e3 * float(value)


def _counts(measured: Measured) -> dict[str, int]:
    found = measured.population["status"].value_counts()
    return {status: int(found.get(status, 0)) for status in Status}


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


def _metrics(measured: Measured, concurrency: float) -> dict[str, Any]:
    bootstraps, series = BootstrapCache(concurrency), RequestSeries.of(measured)
    return {
        metric.name: _per_request(metric, measured, series.series(metric.name))
        if isinstance(metric, RequestMetric)
        else _pooled(metric, measured, bootstraps)
        for metric in METRICS
        if isinstance(metric, RequestMetric | PooledMetric)
    }


def _per_request(metric: RequestMetric, measured: Measured, series: QueueSeries) -> dict[str, Any]:
    population = measured.population
    bound = least_bound(population, metric.name)
    factor = interval_factor(measured)
    mean = series.mean().widened(factor)
    percentiles = [series.percentile(percentile).widened(factor) for percentile in PERCENTILES]
    found = _statistics(metric, series.values, percentiles, bound)
    hi = mean.interval.hi if math.isinf(bound) else math.inf
    return found | {
        "mean_interval": {"lo": mean.interval.lo, "hi": hi, "needed": mean.needed},
        "at_least": math.isfinite(bound),
        "population": "requests started in the window",
        "missing": len(population) - len(series.values),
        "adjusted": _adjusted(metric, population),
    }


def _adjusted(metric: RequestMetric, population: pd.DataFrame) -> dict[str, float | None] | None:
    """Percentiles if failed requests count as infinitely slow; None if the metric is not a latency of the server."""
    if metric.unit != "s" or metric.name in GENERATOR_DELAYS:
        return None
    succeeded = population["status"] == Status.OK
    values = np.asarray(population.loc[succeeded, metric.name].dropna(), dtype=np.float64)
    failures = int((~population["status"].isin(NOT_FAILED)).sum())
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


def _slo(
    measured: Measured, metrics: Mapping[str, Any], rates: Mapping[str, Interval], *, is_growing: bool
) -> dict[str, Any]:
    objectives, is_open = measured.manifest.objectives, measured.manifest.is_open_loop
    attainment = rates["slo_attainment"]
    first_violated: dict[str, int] = {}
    unjudged = np.ones(len(measured.judged), dtype=np.bool_)
    for objective in objectives:
        met = meets_objective(measured.judged, objective, is_open)
        if met is not None:
            missed = unjudged & ~np.asarray(met, dtype=np.bool_)
            first_violated[objective["metric"]] = int(missed.sum())
            unjudged &= ~missed
    known = {"metrics": metrics, "rates": {name: _interval(found) for name, found in rates.items()}}
    judged = (judge_objective(each, measured, known, is_growing=is_growing) for each in objectives)
    return {
        "objectives": objectives,
        "results": [each.to_json() for each in judged],
        "attainment": _interval(attainment),
        "goodput_rps": rates["goodput_rps"].value,
        "first_violated": first_violated,
    }


def _interval(found: Interval) -> dict[str, Any]:
    return {"value": found.value, "lo": found.lo, "hi": found.hi, "needed": found.needed}


def _workload(measured: Measured) -> dict[str, Any]:
    population = measured.population
    lengths = (
        "input_tokens",
        "cached_input_tokens",
        "output_tokens",
        "planned_input_tokens",
        "planned_output_tokens",
        "images",
    )
    reasons = population["finish_reason"].dropna().value_counts()
    return {
        "lengths": {name: _distribution(population[name]) for name in lengths},
        "finish_reasons": {str(reason): int(count) for reason, count in reasons.items()},
        "length_control": measured.manifest.length_control,
        "clipped": measured.manifest.clipped,
    }


def _distribution(column: "pd.Series[float]") -> dict[str, Any]:
    known = np.asarray(column.dropna(), dtype=np.float64)
    if not len(known):
        return {"count": 0, "mean": None, "min": None, "max": None, "percentiles": {}}
    return {
        "count": len(known),
        "mean": float(known.mean()),
        "min": float(known.min()),
        "max": float(known.max()),
        "percentiles": {percentile_name(p): float(np.quantile(known, p / 100)) for p in PERCENTILES},
    }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _finite(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _finite_value(each) for key, each in value.items()}


def _finite_value(value: Any) -> Any:
    """The same structure with None for NaN and infinity, and Python scalars for numpy scalars."""
    if isinstance(value, Mapping):
        return _finite(value)
    if isinstance(value, list | tuple):
        return [_finite_value(each) for each in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value

"""`summary.json`: every metric of a run with count, percentiles and intervals, and the verdict on the run."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from reports.metrics.checks.abandoned import find_abandoned
from reports.metrics.checks.client_facts import client_facts
from reports.metrics.checks.overload import find_overload
from reports.metrics.checks.validity import judge_run
from reports.metrics.finish_run import finish_run
from reports.metrics.judged_objectives import judge_objective
from reports.metrics.measured import Measured
from reports.metrics.metric_statistics import metric_statistics
from reports.metrics.named_metrics import run_interval
from reports.metrics.requests.per_adapter import adapters_summary
from reports.metrics.requests.per_request import LATENCY_NAME, meets_objective, request_metric_of
from reports.metrics.requests.prefix_cache import cached_share
from reports.metrics.requests.structured import structured_summary
from reports.metrics.run_metrics import PER_RUN
from reports.metrics.server.server_series import server_summary
from reports.metrics.server.speculation import speculation_summary
from reports.run_schema import Status
from reports.run_store import SCHEMA_VERSION, SUMMARY_FILE, RunResult, write_json
from reports.saved_run import load_run
from reports.stats.estimators import PERCENTILES, Interval, percentile_name, quantiles


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
        """The analysis of a run, read from the `summary.json` that this process has written."""
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
    metrics = metric_statistics(measured, rates["concurrency_mean"].value)
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
        "percentiles": dict(zip(map(percentile_name, PERCENTILES), quantiles(known, PERCENTILES), strict=True)),
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

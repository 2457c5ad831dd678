"""The objectives of a run beside their measured values: met or missed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from reports.document import Estimate, format_percent
from reports.metrics.per_request import LATENCY_NAME, meets_objective, request_metric_of
from reports.metrics.summary import Analysis
from reports.pages.tables import scaled


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """One objective of a run. `is_met` is None if its metric has no statistic to compare, or no value.

    `is_supported`: the 95 % interval of the value lies on one side of the limit.
    """

    text: str
    value: str
    is_met: bool | None = None
    is_supported: bool = True

    @property
    def decision(self) -> str:
        """`met`, `missed`, or the same marked as unsupported; empty for a share of requests."""
        if self.is_met is None:
            return ""
        word = "met" if self.is_met else "missed"
        return word if self.is_supported else f"{word}, unsupported"


def objective_results(analysis: Analysis) -> tuple[ObjectiveResult, ...]:
    """Each objective with the measured value of its statistic, or with the share of requests that meet it."""
    return tuple(_result(analysis, objective) for objective in analysis.summary["slo"]["objectives"])


def _result(analysis: Analysis, objective: Mapping[str, Any]) -> ObjectiveResult:
    text = objective_text(objective)
    measured = statistic(analysis, objective["metric"])
    if measured is None:
        met = meets_objective(analysis.measured.judged, objective, analysis.run.manifest.is_open_loop)
        if met is None or not len(met):
            return ObjectiveResult(text, "no value")
        return ObjectiveResult(text, f"met by {format_percent(float(met.mean()))} of requests")
    if measured.value is None:
        return ObjectiveResult(text, "no value")
    ends = [end for end in (measured.lo, measured.hi) if end is not None]
    is_met = _is_within(measured.value, objective)
    is_supported = len(ends) == 2 and all(_is_within(end, objective) == is_met for end in ends)
    return ObjectiveResult(text, measured.text, is_met, is_supported)


def objective_text(objective: Mapping[str, Any]) -> str:
    """`ttft_p95_ms ≤ 200`."""
    bounds = [
        f"{sign} {objective[key]:g}" for key, sign in (("max", "≤"), ("min", "≥")) if objective.get(key) is not None
    ]
    return f"{objective['metric']} {' and '.join(bounds)}"


def _is_within(value: float, objective: Mapping[str, Any]) -> bool:
    least, most = objective.get("min"), objective.get("max")
    return (most is None or value <= most) and (least is None or value >= least)


def statistic(analysis: Analysis, name: str) -> Estimate | None:
    """A statistic of a latency in ms with its interval, or a rate; None for the metric of one request."""
    summary = analysis.summary
    if name in summary["rates"]:
        return scaled(summary["rates"][name], 1.0)
    match = LATENCY_NAME.fullmatch(name)
    column = request_metric_of(name, analysis.run.manifest.is_open_loop)
    if match is None or column is None:
        return None
    metric, stat = summary["metrics"][column], match["stat"]
    if stat.startswith("p"):
        found = metric["percentiles"].get(stat)
        return None if found is None else scaled(found, 1e3, is_high=float(stat[1:]) >= 90)
    if stat == "mean":
        return scaled({"value": metric["mean"], **metric.get("mean_interval", {"lo": None, "hi": None})}, 1e3)
    return scaled({"value": metric[stat], "lo": None, "hi": None}, 1e3)


def objectives_table(analysis: Analysis) -> pd.DataFrame:
    """Each objective with its value and decision, and the number of requests for which it is the first one missed."""
    first_violated = analysis.summary["slo"]["first_violated"]
    return pd.DataFrame(
        {
            "objective": result.text,
            "measured": result.value,
            "decision": result.decision,
            "first missed by": first_violated.get(objective["metric"], "checked over the run"),
        }
        for objective, result in zip(analysis.summary["slo"]["objectives"], objective_results(analysis), strict=True)
    )

"""Judges the objectives of a run: met, missed or undecided, and the share of requests that meet each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from reports.metrics.measured import Measured
from reports.metrics.requests.per_request import LATENCY_NAME, meets_objectives, request_metric_of
from reports.metrics.run_fraction import run_fraction
from reports.run_schema import Status
from reports.stats.estimators import Interval

UNKNOWN = Interval(math.nan, math.nan, math.nan)
NO_VALUE: Mapping[str, Any] = {"value": None, "lo": None, "hi": None}


class ObjectiveDecision(StrEnum):
    """The decision on an objective at 95 % confidence."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class JudgedObjective:
    """One objective {metric, max or min} of a run.

    value: the statistic, in ms for a latency. share: the requests that meet the objective.
    required: the share that a percentile requires, 0.95 for p95; None for other statistics.
    is_met: whether the observed value meets it; None without a value. is_supported: whether the whole interval agrees.
    """

    objective: Mapping[str, Any]
    value: Interval
    share: Interval
    required: float | None
    is_met: bool | None
    is_supported: bool

    @property
    def decision(self) -> ObjectiveDecision:
        if self.is_met is None or not self.is_supported:
            return ObjectiveDecision.UNDECIDED
        return ObjectiveDecision.MET if self.is_met else ObjectiveDecision.MISSED

    def to_json(self) -> dict[str, Any]:
        return {
            "objective": objective_text(self.objective),
            "value": self.value.value,
            "lo": self.value.lo,
            "hi": self.value.hi,
            "attainment": {
                "value": self.share.value,
                "lo": self.share.lo,
                "hi": self.share.hi,
                "needed": self.share.needed,
            },
            "required": self.required,
            "observed_met": self.is_met,
            "decision": self.decision,
        }


def judge_objective(
    objective: Mapping[str, Any], measured: Measured, summary: Mapping[str, Any], *, is_growing: bool
) -> JudgedObjective:
    """The decision on one objective.

    A percentile is decided by the share of requests within its limit; a failed request is beyond the limit. Another
    statistic is decided by its interval, without failed requests. summary: with `metrics` and `rates`.
    is_growing: latencies grow with time. An objective that this run meets is then undecided, because a longer run would
    miss it.
    """
    value, share = _value(objective, measured, summary), _share(objective, measured)
    required = required_share(objective)
    if required is None:
        is_met, is_supported = _side(value, lambda x: is_within(x, objective))
    else:
        is_met, is_supported = _side(share, lambda x: x >= required)
    return JudgedObjective(objective, value, share, required, is_met, is_supported and not (is_met and is_growing))


def _value(objective: Mapping[str, Any], measured: Measured, summary: Mapping[str, Any]) -> Interval:
    found, scale = named_statistic(summary, objective["metric"], measured.manifest.is_open_loop) or (NO_VALUE, 1.0)
    value, lo, hi = (math.nan if found[name] is None else scale * found[name] for name in ("value", "lo", "hi"))
    return Interval(value, lo, hi)


def named_statistic(
    summary: Mapping[str, Any], name: str, is_open_loop: bool
) -> tuple[Mapping[str, Any], float] | None:
    """A rate, or a statistic of a latency: {value, lo, hi}, and the factor to the unit in its name.

    None for any other name.
    """
    if name in summary["rates"]:
        return summary["rates"][name], 1.0
    match, column = LATENCY_NAME.fullmatch(name), request_metric_of(name, is_open_loop)
    if match is None or column is None:
        return None
    metric, stat = summary["metrics"][column], match["stat"]
    if stat.startswith("p"):
        found = metric["percentiles"].get(stat)
    else:
        interval = metric.get("mean_interval", {}) if stat == "mean" else {}
        found = {**NO_VALUE, **interval, "value": metric[stat]}
    return None if found is None else (found, 1e3)


def _share(objective: Mapping[str, Any], measured: Measured) -> Interval:
    """The share of the requests that succeeded within the limit, of those that failed or have a value."""
    is_open, judged = measured.manifest.is_open_loop, measured.judged
    column = request_metric_of(objective["metric"], is_open)
    if column is None:
        return UNKNOWN
    judged = judged[judged[column].notna() | (judged["status"] != Status.OK)]
    met = meets_objectives(judged, [objective], is_open)
    if met is None or not len(met):
        return UNKNOWN
    return run_fraction(measured, np.asarray(met, dtype=np.bool_))


def required_share(objective: Mapping[str, Any]) -> float | None:
    """The share of requests that a percentile requires within its limit; None for another statistic.

    >>> required_share({"metric": "ttft_p95_ms", "max": 500.0}), required_share({"metric": "tpot_mean_ms", "max": 50.0})
    (0.95, None)
    """
    match = LATENCY_NAME.fullmatch(objective["metric"])
    if match is None or not match["stat"].startswith("p"):
        return None
    below = float(match["stat"][1:]) / 100
    return below if objective.get("max") is not None else 1 - below


def is_decidable(objective: Mapping[str, Any]) -> bool:
    """Whether a run can decide the objective: it is about a percentile or a mean, not about a minimum or maximum."""
    match = LATENCY_NAME.fullmatch(objective["metric"])
    return match is not None and match["stat"] not in ("min", "max")


def _side(found: Interval, holds: Callable[[float], bool]) -> tuple[bool | None, bool]:
    """Whether `holds` is true of the value (None if unknown), and whether its whole interval agrees."""
    if math.isnan(found.value):
        return None, False
    is_met = bool(holds(found.value))
    return is_met, all(not math.isnan(end) and holds(end) == is_met for end in (found.lo, found.hi))


def objective_text(objective: Mapping[str, Any]) -> str:
    """The objective in one line: `ttft_p95_ms ≤ 200`."""
    bounds = [
        f"{sign} {objective[key]:g}" for key, sign in (("max", "≤"), ("min", "≥")) if objective.get(key) is not None
    ]
    return f"{objective['metric']} {' and '.join(bounds)}"


def is_within(value: float, objective: Mapping[str, Any]) -> bool:
    """Whether a value is within the limits of an objective."""
    least, most = objective.get("min"), objective.get("max")
    return (most is None or value <= most) and (least is None or value >= least)

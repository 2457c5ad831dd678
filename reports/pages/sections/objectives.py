"""The objectives of a run with their measured values: met or missed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from reports.document import Estimate, format_percent
from reports.metrics.judged_objectives import ObjectiveDecision, named_statistic
from reports.metrics.requests.per_request import LATENCY_NAME
from reports.metrics.summary import Analysis
from reports.metrics.titles import limits_text
from reports.pages.sections.latency_tables import scaled


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """One objective of a run: its text, its value, and the share of requests that meet it, in percent.

    is_met: None if its metric has no statistic or no value. is_supported: whether the whole 95 % interval agrees.
    """

    text: str
    value: str
    share: Estimate
    is_met: bool | None = None
    is_supported: bool = True

    @property
    def decision(self) -> str:
        """`met` or `missed`, with `, undecided` if it is not supported; empty without a decision."""
        if self.is_met is None:
            return ""
        word = "met" if self.is_met else "missed"
        return word if self.is_supported else f"{word}, undecided"


def objective_results(analysis: Analysis) -> tuple[ObjectiveResult, ...]:
    """Each objective with the measured value of its statistic, or with the share of requests that meet it."""
    slo = analysis.summary["slo"]
    return tuple(
        _result(analysis, objective["metric"], found)
        for objective, found in zip(slo["objectives"], slo["results"], strict=True)
    )


def _result(analysis: Analysis, name: str, found: Mapping[str, Any]) -> ObjectiveResult:
    text, share = limits_text([found["objective"]]), found["attainment"]
    measured = statistic(analysis, name)
    is_supported = found["decision"] != ObjectiveDecision.UNDECIDED
    percent = scaled(share, 100.0)
    if measured is not None:
        value = "no value" if measured.value is None else measured.text
        return ObjectiveResult(text, value, percent, found["observed_met"], is_supported)
    value = "no value" if share["value"] is None else f"met by {format_percent(share['value'])} of requests"
    return ObjectiveResult(text, value, percent, found["observed_met"], is_supported)


def statistic(analysis: Analysis, name: str) -> Estimate | None:
    """A rate, or a statistic of a latency in ms, with its interval; None for any other name."""
    found = named_statistic(analysis.summary, name, analysis.run.manifest.is_open_loop)
    if found is None:
        return None
    match = LATENCY_NAME.fullmatch(name)
    is_high = match is not None and match["stat"].startswith("p") and float(match["stat"][1:]) >= 90
    return scaled(*found, is_high=is_high)


def objectives_table(analysis: Analysis) -> pd.DataFrame:
    """A row per objective: its value, the requests that meet it, its decision, the requests that first missed it."""
    first_violated = analysis.summary["slo"]["first_violated"]
    return pd.DataFrame(
        {
            "objective": result.text,
            "measured": result.value,
            "requests within, %": result.share,
            "decision": result.decision,
            "first missed by": first_violated.get(objective["metric"], "checked over the run"),
        }
        for objective, result in zip(analysis.summary["slo"]["objectives"], objective_results(analysis), strict=True)
    )

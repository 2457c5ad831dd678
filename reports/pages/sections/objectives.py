"""The objectives of a run with their measured values: met or missed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from reports.document import Estimate, format_percent
from reports.metrics.checks.findings import latencies_grow
from reports.metrics.judged_objectives import ObjectiveDecision, is_within, named_statistic
from reports.metrics.requests.per_request import LATENCY_NAME
from reports.metrics.summary import Analysis
from reports.metrics.titles import limits_text
from reports.pages.sections.latency_tables import marked, scaled


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """One objective of a run: its text, its value, and the share of requests that meet it, in percent.

    is_met: None if its metric has no statistic or no value. is_supported: whether the whole 95 % interval agrees.
    is_growing: the latencies grow with time, so the result of a longer run would be worse.
    has_failures: the value is within the limit, and the objective is missed because of failed requests.
    """

    text: str
    value: str
    share: Estimate
    is_met: bool | None = None
    is_supported: bool = True
    is_growing: bool = False
    has_failures: bool = False

    @property
    def decision(self) -> str:
        """`met` or `missed`; if that is not certain, `met in this run, not certain`; empty without a decision."""
        if self.is_met is None:
            return ""
        word = "met" if self.is_met else "missed"
        return word if self.is_supported else f"{word} in this run, not certain"

    @property
    def sentence(self) -> str:
        """The objective with its value, its decision, and why the decision is not certain.

        >>> ObjectiveResult("TTFT p95 ≤ 400 ms", "350", Estimate(99.0), is_met=True).sentence
        'TTFT p95 ≤ 400 ms: 350, met'
        >>> ObjectiveResult("TTFT p95 ≤ 70 ms", "≥76.5", Estimate(90.0), is_met=False, is_supported=False).sentence
        'TTFT p95 ≤ 70 ms: 76.5, missed in this run, but the run is too short to be certain'
        """
        if (self.is_supported and not self.has_failures) or self.is_met is None:
            return f"{self.text}: {', '.join(filter(None, (self.value, self.decision)))}"
        value, word = self.value.lstrip("~≥"), "met" if self.is_met else "missed"
        result = f"{value}, {word}"
        if self.has_failures:
            result = f"{value} for complete answers, but missed, because failed requests count as misses"
        if self.is_supported:
            return f"{self.text}: {result}"
        reason = UNCERTAIN_GROWING if self.is_growing and self.is_met else UNCERTAIN
        return f"{self.text}: {result}{'; ' if self.has_failures else ' in this run, but '}{reason}"


UNCERTAIN = "the run is too short to be certain"
UNCERTAIN_GROWING = "latencies grow with time, so a longer run would miss it"


def objective_results(analysis: Analysis) -> tuple[ObjectiveResult, ...]:
    """Each objective with the measured value of its statistic, or with the share of requests that meet it."""
    slo = analysis.summary["slo"]
    return tuple(
        _result(analysis, objective, found) for objective, found in zip(slo["objectives"], slo["results"], strict=True)
    )


def _result(analysis: Analysis, objective: Mapping[str, Any], found: Mapping[str, Any]) -> ObjectiveResult:
    text, share = limits_text([found["objective"]]), found["attainment"]
    measured = statistic(analysis, objective["metric"])
    is_supported = found["decision"] != ObjectiveDecision.UNDECIDED
    percent = scaled(share, 100.0)
    if measured is not None:
        value = "no value" if measured.value is None else measured.text
    else:
        value = "no value" if share["value"] is None else f"met by {format_percent(share['value'])} of requests"
    is_growing = latencies_grow(analysis.summary)
    is_missed, own = found["observed_met"] is False, found["value"]
    has_failures = is_missed and own is not None and is_within(own, objective)
    return ObjectiveResult(text, value, percent, found["observed_met"], is_supported, is_growing, has_failures)


def statistic(analysis: Analysis, name: str) -> Estimate | None:
    """A rate, or a statistic of a latency in ms, with its interval; None for any other name."""
    found = named_statistic(analysis.summary, name, analysis.run.manifest.is_open_loop)
    if found is None:
        return None
    match = LATENCY_NAME.fullmatch(name)
    is_high = match is not None and match["stat"].startswith("p") and float(match["stat"][1:]) >= 90
    return scaled(*found, is_high=is_high)


def marked_statistic(analysis: Analysis, name: str) -> Estimate | float | None:
    """The value of `statistic` without its interval; an unsupported value has its mark. None without a value."""
    found = statistic(analysis, name)
    return None if found is None or found.value is None else marked(found)


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

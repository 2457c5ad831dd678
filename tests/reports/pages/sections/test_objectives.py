"""Objectives of a run with their measured values."""

from typing import Any

import pytest

from reports.metrics.judged_objectives import judge_objective
from reports.metrics.summary import Analysis
from reports.pages.sections.objectives import ObjectiveResult, objective_results, statistic
from tests.support.samples.sample_run import SampleLoad, sample_run


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    run = sample_run(SampleLoad(duration_s=300, rate=4.0, failure_share=0.0))
    run.manifest.objectives = []
    return Analysis.of(run)


def result(analysis: Analysis, **objective: Any) -> ObjectiveResult:
    slo = analysis.summary["slo"]
    slo["objectives"] = [objective]
    slo["results"] = [judge_objective(objective, analysis.measured, analysis.summary, is_growing=False).to_json()]
    [found] = objective_results(analysis)
    return found


@pytest.mark.parametrize("metric", ["ttft_p50_ms", "ttft_mean_ms"])
def test_a_statistic_is_met_missed_or_undecided_by_its_interval(analysis: Analysis, metric: str) -> None:
    found = statistic(analysis, metric)
    assert found is not None
    lo, value, hi = found.lo or 0.0, found.value or 0.0, found.hi or 0.0
    assert lo < value < hi

    assert result(analysis, metric=metric, max=1.05 * hi).decision == "met"
    assert result(analysis, metric=metric, max=0.95 * lo).decision == "missed"
    assert result(analysis, metric=metric, max=value + 0.1 * (hi - value)).decision == "met in this run, not certain"
    assert result(analysis, metric=metric, max=value - 0.1 * (value - lo)).decision == "missed in this run, not certain"
    assert result(analysis, metric=metric, max=300.0).text == f"TTFT {metric.split('_')[1]} ≤ 300 ms"


def test_the_share_of_a_percentile_is_that_of_the_requests_within_its_limit(analysis: Analysis) -> None:
    ttft_s = analysis.measured.judged["ttft_co_s"]
    found = result(analysis, metric="ttft_p90_ms", max=1e3 * float(ttft_s.quantile(0.8)))

    assert found.share.value == pytest.approx(80, abs=0.1)
    assert found.decision == "missed"


def test_pages_1_an_objective_that_failed_requests_miss_names_them() -> None:
    """The value is within the limit, but a fifth of the requests failed."""
    analysis = Analysis.of(sample_run(SampleLoad(duration_s=120, rate=4.0, failure_share=0.2)))

    found = result(analysis, metric="ttft_p90_ms", max=60_000.0)

    assert (found.is_met, found.has_failures) == (False, True)
    assert "because failed requests count as misses" in found.sentence


def test_an_objective_on_one_request_has_its_share_and_no_decision(analysis: Analysis) -> None:
    found = result(analysis, metric="ttft_s", max=1e6)

    assert found.value == "met by 100 % of requests"
    assert found.decision == ""

"""Objectives of a run beside their measured values."""

import pytest

from reports.metrics.summary import Analysis
from reports.pages.objectives import objective_results
from tests.support.samples.sample_run import SampleLoad, sample_run


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    run = sample_run(SampleLoad(duration_s=300, rate=4.0, failure_share=0.0))
    run.manifest.objectives = []
    return Analysis.of(run)


def result(analysis: Analysis, **objective: object) -> object:
    analysis.summary["slo"]["objectives"] = [objective]
    [found] = objective_results(analysis)
    return found


def test_a_percentile_is_met_missed_or_unsupported_by_its_interval(analysis: Analysis) -> None:
    p50 = analysis.summary["metrics"]["ttft_co_s"]["percentiles"]["p50"]
    lo, value, hi = (1e3 * p50[name] for name in ("lo", "value", "hi"))
    assert p50["supported"]

    assert result(analysis, metric="ttft_p50_ms", max=1.01 * hi).decision == "met"
    assert result(analysis, metric="ttft_p50_ms", max=0.99 * lo).decision == "missed"
    assert result(analysis, metric="ttft_p50_ms", max=(value + hi) / 2).decision == "met, unsupported"
    assert result(analysis, metric="ttft_p50_ms", max=(value + lo) / 2).decision == "missed, unsupported"
    assert result(analysis, metric="ttft_p50_ms", max=300.0).text == "ttft_p50_ms ≤ 300"


def test_an_objective_on_one_request_has_its_share_and_no_decision(analysis: Analysis) -> None:
    found = result(analysis, metric="ttft_s", max=1e6)

    assert found.value == "met by 100 % of requests"
    assert found.decision == ""

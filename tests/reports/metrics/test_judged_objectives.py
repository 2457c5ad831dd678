"""Decisions on the objectives of a run, for constructed runs with a known result."""

from typing import Any

import pytest

from reports.metrics.judged_objectives import JudgedObjective, ObjectiveDecision, judge_objective
from reports.metrics.summary import Analysis, summarize
from tests.support.samples.sample_run import SampleLoad, sample_run

EASY = {"metric": "ttft_p95_ms", "max": 60_000.0}


@pytest.fixture(scope="module")
def failing() -> Analysis:
    """Each successful request is fast, and three in ten fail."""
    return Analysis.of(sample_run(SampleLoad(duration_s=120, rate=4.0, failure_share=0.3)))


@pytest.fixture(scope="module")
def short() -> Analysis:
    return Analysis.of(sample_run(SampleLoad(duration_s=10, rate=2.0, failure_share=0.0)))


def judged(analysis: Analysis, objective: dict[str, Any], *, is_growing: bool = False) -> JudgedObjective:
    return judge_objective(objective, analysis.measured, analysis.summary, is_growing=is_growing)


def test_pages_2_failed_requests_miss_a_percentile_however_fast_the_others_are(failing: Analysis) -> None:
    found = judged(failing, EASY)

    assert found.value.value < 1_000
    assert found.share.value == pytest.approx(0.7, abs=0.07)
    assert found.share.hi < found.required == 0.95
    assert found.decision is ObjectiveDecision.MISSED


def test_pages_2_a_percentile_that_fewer_requests_need_is_met_with_the_same_failures(failing: Analysis) -> None:
    assert judged(failing, {"metric": "ttft_p50_ms", "max": 60_000.0}).decision is ObjectiveDecision.MET


def test_pages_2_a_short_run_decides_no_high_percentile(short: Analysis) -> None:
    found = judged(short, EASY)

    assert found.is_met
    assert found.share.value == 1.0
    assert found.decision is ObjectiveDecision.UNDECIDED


def test_pages_2_a_met_objective_is_undecided_while_latencies_grow(failing: Analysis) -> None:
    objective = {"metric": "ttft_p50_ms", "max": 60_000.0}

    assert judged(failing, objective, is_growing=True).decision is ObjectiveDecision.UNDECIDED
    assert judged(failing, EASY, is_growing=True).decision is ObjectiveDecision.MISSED


def test_pages_2_an_extreme_is_never_decided(failing: Analysis) -> None:
    assert judged(failing, {"metric": "ttft_max_ms", "max": 60_000.0}).decision is ObjectiveDecision.UNDECIDED


def test_pages_2_the_summary_has_each_objective_with_its_decision() -> None:
    run = sample_run(SampleLoad(duration_s=120, rate=4.0, failure_share=0.3))
    run.manifest.objectives = [EASY, {"metric": "tpot_mean_ms", "max": 500.0}]

    first, second = summarize(run)["slo"]["results"]

    assert first["objective"] == "ttft_p95_ms ≤ 60000"
    assert (first["decision"], first["required"]) == ("missed", 0.95)
    assert first["attainment"]["lo"] < first["attainment"]["value"] < first["attainment"]["hi"] < 0.95
    assert (second["decision"], second["required"]) == ("met", None)
    assert second["lo"] < second["value"] < second["hi"] < 500

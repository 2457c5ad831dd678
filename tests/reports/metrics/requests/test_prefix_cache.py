"""Prompts that the server received before the run are detected by their cached tokens."""

import pytest

from loadgen.commands.present import render_summary
from reports.metrics.summary import Analysis
from reports.run_store import RunResult
from tests.support.samples.sample_run import SampleLoad, sample_run


def run_with(measured: float | None, planned: float | None) -> RunResult:
    """A run whose prompts were cached to the given shares."""
    run = sample_run(SampleLoad(mode="closed"))
    for record in run.records:
        tokens = record.input_tokens or 0
        record.cached_input_tokens = None if measured is None else round(measured * tokens)
        record.planned_cached_tokens = None if planned is None else round(planned * tokens)
    return run


@pytest.mark.parametrize(
    ("measured", "planned", "level"),
    [
        pytest.param(0.0, 0.0, None, marks=pytest.mark.slow),
        (0.30, 0.295, None),
        (0.32, 0.30, "degraded"),
        pytest.param(0.39, 0.30, "degraded", marks=pytest.mark.slow),
        (0.42, 0.30, "invalid"),
        pytest.param(0.73, 0.0, "invalid", marks=pytest.mark.slow),
        (0.10, 0.60, None),
    ],
)
def test_trust_W1_planned_share_of_cached_tokens_bounds_the_measured_one(
    measured: float, planned: float, level: str | None
) -> None:
    analysis = Analysis.of(run_with(measured, planned))

    found = [reason for reason in analysis.summary["verdict"]["reasons"] if reason["check"] == "prompts_known"]
    assert [reason["level"] for reason in found] == ([] if level is None else [level])
    assert analysis.summary["cached"]["measured"] == pytest.approx(measured, abs=0.01)
    if found:
        assert found[0]["message"].startswith("prompts were known to the server: ")


def test_trust_W1_planned_and_measured_share_are_in_the_summary() -> None:
    text = render_summary([Analysis.of(run_with(0.3, 0.3))])

    assert "cached           30.0 % of prompt tokens (30.0 % planned)" in text


def test_trust_W1_planned_shares_are_compared_with_counters_if_responses_have_no_count() -> None:
    """The counters of the sample grow by 90 of 700 tokens per request, and by 12 per second."""
    analysis = Analysis.of(run_with(None, 0.0))

    assert analysis.summary["cached"]["source"] == "counters"
    assert analysis.summary["cached"]["measured"] == pytest.approx(0.13, abs=0.01)
    assert [each["check"] for each in analysis.summary["verdict"]["reasons"]] == ["prompts_known"]


def test_trust_W1_planned_shares_without_counts_and_counters_leave_the_cached_tokens_unknown() -> None:
    run = run_with(None, 0.0)
    run.server_metrics = []

    analysis = Analysis.of(run)

    assert [each["message"] for each in analysis.summary["verdict"]["findings"]] == [
        "3 of 589 requests failed",
        "cached tokens unknown",
    ]
    assert "cached tokens unknown" in render_summary([analysis]).splitlines()[0]

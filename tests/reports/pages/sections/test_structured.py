"""The table of structured answers: counts are whole, percentiles have intervals."""

from reports.document import Estimate
from reports.metrics.summary import Analysis
from reports.pages.sections.structured import structured_table
from reports.renderers.markdown import cell_text, is_numeric
from tests.support.samples.sample_run import SampleLoad, sample_run


def test_counts_are_whole_and_percentiles_have_intervals() -> None:
    run = sample_run(SampleLoad(duration_s=120, rate=4, failure_share=0.0))
    for number, record in enumerate(run.records):
        if number % 3 == 0:
            record.constraint, record.validity = "schema", "cut" if number % 30 == 0 else "valid"
    rows = Analysis.of(run).summary["structured"]

    table = structured_table(rows)

    assert table["answers"].tolist() == ["unconstrained", "JSON schema"]
    cut = rows[1]["causes"]["cut"]
    assert [cell_text(each) for each in table["cut at the limit"]] == ["–", str(cut)]
    assert is_numeric(table["cut at the limit"])
    assert all(isinstance(each, Estimate) and each.interval for each in table["TPOT p50, ms ↓"])


def test_a_ratio_without_an_interval_is_marked() -> None:
    run = sample_run(SampleLoad(duration_s=20, rate=4, failure_share=0.0))
    for record in run.records[::3]:
        record.constraint, record.validity = "schema", "valid"

    table = structured_table(Analysis.of(run).summary["structured"])

    assert str(table["TTFT ratio"][1]).startswith("~")


def test_times_count_from_the_schedule_as_in_the_tiles() -> None:
    """A client whose sends wait in its queue, longer before structured answers."""
    run = sample_run(SampleLoad(duration_s=120, rate=4, failure_share=0.0))
    for number, record in enumerate(run.records):
        record.t_intended_ns = (record.t_intended_ns or 0) - (1_000_000_000 if number % 3 == 0 else 500_000_000)
        if number % 3 == 0:
            record.constraint, record.validity = "schema", "valid"
    summary = Analysis.of(run).summary

    free, schema = summary["structured"]

    assert free["ttft_s_p50"] > 0.5
    assert schema["ttft_s_p50"] > 1.0
    assert schema["ttft_s_ratio"]["value"] > 1.5
    assert free["ttft_s_p50"] <= summary["metrics"]["ttft_co_s"]["percentiles"]["p50"]["value"] <= schema["ttft_s_p50"]

"""The timeline of a run: bins of a second, shorter ones in a run of a few seconds."""

import pytest

from reports.metrics.summary import Analysis
from reports.pages.sections.run_figures import timeline_frame
from tests.support.samples.sample_run import SampleLoad, sample_run


@pytest.mark.parametrize(
    ("scale", "bin_s"), [(1.0, 1.0), pytest.param(0.1, 0.2, marks=pytest.mark.slow), (0.001, 0.01)]
)
def test_a_short_run_has_enough_bins_to_show_its_speed(scale: float, bin_s: float) -> None:
    run = sample_run(SampleLoad(mode="closed", duration_s=28, warmup_s=0, failure_share=0.0))
    for record in run.records:
        for name in ("t_intended_ns", "t_dispatch_ns", "t_sent_ns", "t_headers_ns", "t_first_ns", "t_first_answer_ns"):
            setattr(record, name, round(scale * (getattr(record, name) or 0)))
        record.gap_ns = [round(scale * each) for each in record.gap_ns or []]
        record.t_last_ns = (record.t_first_ns or 0) + sum(record.gap_ns)
        record.t_end_ns = record.t_last_ns
    run.manifest.window_end_s = scale * 28
    analysis = Analysis.of(run)

    frame = timeline_frame(analysis)

    assert set(frame["bin_s"]) == {bin_s}
    rate = analysis.summary["rates"]["output_tokens_per_s"]["value"]
    assert frame["output_tokens_per_s"].max() == pytest.approx(rate, rel=0.3)
    assert frame["output_tokens_per_s"].sum() * bin_s == pytest.approx(sum(each.output_tokens for each in run.records))

"""Server gauges and load-generator health over the run."""

import pytest

from reports.metrics.server.server_series import ratio_series
from reports.metrics.summary import Analysis
from reports.pages.sections.health import (
    PREFIX_PANEL,
    gauges_frame,
    generator_blocks,
    server_plot,
    worker_table,
    workers_frame,
)
from reports.plots.figure import NARROW, WIDE
from tests.support.samples.sample_run import SampleLoad, sample_run


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return Analysis.of(sample_run(SampleLoad(seed=2, duration_s=20, workers=2)))


def test_queue_batch_cache_and_prefix_hits_have_a_panel_each(analysis: Analysis) -> None:
    frame = gauges_frame(analysis)

    assert list(dict.fromkeys(frame["panel"])) == [
        "requests inside the server",
        "token budget of the batch",
        "KV cache or token budget in use, %",
        PREFIX_PANEL,
    ]
    assert frame["t_s"].max() <= analysis.run.server_metrics[-1]["t_s"]


def test_prefix_hit_rate_is_taken_between_scrapes_with_prompts() -> None:
    rows = [
        {"t_s": t_s, "name": name, "labels": "", "value": value}
        for t_s, found, asked in ((0.0, 0, 0), (1.0, 30, 100), (2.0, 30, 100), (3.0, 90, 200))
        for name, value in (("tgi_prefix_hit_tokens", found), ("tgi_prompt_tokens", asked))
    ]

    assert ratio_series(rows, "prefix_hits") == ([1.0, 3.0], [0.3, 0.6])


def test_each_worker_has_a_line_and_a_row(analysis: Analysis) -> None:
    frame = workers_frame(analysis)
    table = worker_table([analysis])

    assert set(frame["worker"]) == {0.0, 1.0}
    assert list(table["worker"]) == ["0", "1"]
    assert list(table["CPU, %"]) == [31.0, 31.0]
    assert [block.title for block in generator_blocks([analysis])] == ["Load generator health", "Each worker"]


def test_one_worker_needs_no_table() -> None:
    alone = Analysis.of(sample_run(SampleLoad(seed=2, duration_s=10)))

    assert len(worker_table([alone])) == 0
    assert len(generator_blocks([alone])) == 1


def test_a_run_without_scrapes_has_no_server_figure(analysis: Analysis) -> None:
    silent = sample_run(SampleLoad(duration_s=10))
    silent.server_metrics, silent.timeseries = [], []

    assert server_plot(Analysis.of(silent), "server") == []
    assert generator_blocks([Analysis.of(silent)]) == ()


def test_figures_are_drawn_wide_and_narrow(analysis: Analysis) -> None:
    for plot in (*server_plot(analysis, "server"), generator_blocks([analysis])[0]):
        for size in (WIDE, NARROW):
            figure = plot.draw(size)
            assert figure.get_size_inches()[0] * 100 == pytest.approx(size.width)
            assert figure.axes[-1].get_xlabel() == "seconds since the run's start"

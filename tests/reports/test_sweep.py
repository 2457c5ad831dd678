"""The knee, the highest load within objectives, and the report of several loads."""

from dataclasses import replace

import pytest

from reports.document import Table
from reports.plots import HALF
from reports.report import write_built
from reports.summary import Analysis
from reports.sweep import LoadPoint, Standing, find_knee, highest_within
from reports.sweep_report import Sweep, build_sweep_report, points_table, sweep_json, verdict
from tests.support.sample_run import SampleLoad, sample_run


def point(rate: float, limit_ms: float = 400.0, runs: int = 1) -> LoadPoint:
    analyses = []
    for seed in range(runs):
        run = sample_run(replace(SampleLoad(), rate=rate, seed=seed, failure_share=0.0))
        run.manifest.objectives = [{"metric": "ttft_p95_ms", "max": limit_ms}]
        analyses.append(Analysis.of(run))
    return LoadPoint(rate, tuple(analyses))


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return Sweep("rate", tuple(point(rate) for rate in (2.0, 4.0, 8.0, 16.0, 32.0)), 0.95, ("tgi-bench", "sweep"))


@pytest.mark.parametrize(
    ("loads", "throughput", "knee"),
    [
        ([1, 2, 4, 8, 16], [10, 20, 40, 42, 43], 2),
        ([1, 2, 3, 4, 5], [10, 20, 30, 40, 50], None),
        ([1, 2, 4], [10, 20, 20], None),
        ([1, 2, 4, 8], [10, 10, 10, 10], None),
        ([1, 2, 4, 8, 16], [10, 20, 40, 38, 30], 2),
    ],
)
def test_metrics_8_the_knee_is_where_more_load_stops_to_bring_throughput(loads, throughput, knee) -> None:
    assert find_knee(loads, throughput) == knee


def test_a_point_stands_to_the_target_by_its_interval_and_runs_are_pooled() -> None:
    one, two = point(8.0), point(8.0, runs=2)

    assert one.standing(0.2) is Standing.WITHIN
    assert point(8.0, limit_ms=1.0).standing(0.2) is Standing.BEYOND
    assert one.standing(one.attainment.value) is Standing.UNDECIDED
    assert two.attainment.hi - two.attainment.lo < one.attainment.hi - one.attainment.lo


def test_the_highest_load_within_is_the_last_before_the_first_that_is_beyond() -> None:
    good, bad, again = point(2.0), point(4.0, limit_ms=1.0), point(8.0)

    assert highest_within((good, bad, again), 0.5) is good
    assert highest_within((bad, again), 0.5) is None


def test_the_report_holds_every_point_the_curve_and_the_verdict(sweep: Sweep, tmp_path) -> None:
    report = build_sweep_report(sweep)

    paths = write_built(report, tmp_path)
    assert {path.name for path in paths.figures} >= {"throughput_latency.svg", "throughput_by_load.png"}
    text = paths.markdown.read_text()
    assert "5 loads from 2 to 32 requests/s" in text
    assert verdict(sweep).sentence in text
    assert list(points_table(sweep)["requests/s"]) == ["2", "4", "8", "16", "32"]
    assert any(isinstance(block, Table) for block in report.sections[0].blocks)


def test_what_the_points_say_is_there_as_plain_values(sweep: Sweep) -> None:
    told = sweep_json(sweep)

    assert [each["load"] for each in told["points"]] == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert told["highest_within"] == (sweep.within.load if sweep.within else None)
    assert told["points"][0]["standing"] in ("within", "beyond", "undecided")


@pytest.mark.parametrize(
    ("label", "title"), [("rate 4", "Sweep over rate"), ("", "Sweep over rate"), ("new batching", "new batching")]
)
def test_a_sweep_is_titled_by_its_label_or_by_what_it_varies(label: str, title: str) -> None:
    one = point(4.0)
    one.first.run.manifest.label = label

    report = build_sweep_report(Sweep("rate", (one,), 0.95, ("tgi-bench", "sweep", "--slo", "ttft_p95_ms < 500")))

    assert report.title == title
    assert "--slo 'ttft_p95_ms < 500'" in str(report.sections[-1])


def test_the_curve_has_a_line_at_the_objective_of_its_own_latency(sweep: Sweep) -> None:
    [plot] = [plot for plot in build_sweep_report(sweep).plots if plot.name == "throughput_latency"]

    assert "Dashed: the objective." in plot.caption
    [axes] = plot.draw(HALF).axes
    assert [text.get_text() for text in axes.texts if "objective" in text.get_text()] == ["objective 400 ms"]
    assert axes.get_ylim()[1] > 400


def test_latencies_that_lie_far_apart_are_drawn_on_a_logarithmic_axis(sweep: Sweep) -> None:
    apart, near = (replace(sweep, points=points) for points in (sweep.points, sweep.points[:3]))

    scales = {}
    for name, each in (("apart", apart), ("near", near)):
        [plot] = [plot for plot in build_sweep_report(each).plots if plot.name == "throughput_latency"]
        [axes] = plot.draw(HALF).axes
        scales[name] = axes.get_yscale()

    assert scales == {"apart": "log", "near": "linear"}


def test_one_user_is_said_in_the_singular() -> None:
    one = replace(point(4.0), load=1.0)

    section = build_sweep_report(Sweep("concurrency", (one,), 0.95)).sections[1]

    assert "1 user:" in str(section.blocks[0])


def test_the_curve_of_answers_that_were_not_streamed_is_named_for_what_it_shows(sweep: Sweep) -> None:
    blocking = []
    for each in sweep.points:
        run = sample_run(replace(SampleLoad(), rate=each.load, failure_share=0.0, duration_s=20))
        for record in run.records:
            record.t_first_ns = record.t_last_ns = None
            record.gap_ns = []
        blocking.append(LoadPoint(each.load, (Analysis.of(run),)))

    [plot] = [
        plot
        for plot in build_sweep_report(replace(sweep, points=tuple(blocking))).plots
        if plot.name == "throughput_latency"
    ]

    assert plot.alt.startswith("Line chart of E2E p95")

"""The knee, the highest load within objectives, and the report of several loads."""

import functools
from dataclasses import replace

import pytest

from reports.document import Table
from reports.metrics.summary import Analysis
from reports.metrics.sweep import LoadPoint, SloDecision, Sweep, find_knee, highest_within
from reports.pages.sweep_figures import curve_frame
from reports.pages.sweep_page import build_sweep_report, points_table, sweep_json, verdict
from reports.plots.figure import HALF
from reports.renderers.markdown import cell_text
from reports.renderers.write import write_report
from reports.stats.capacity import Capacity, RunEvidence
from tests.support.samples.sample_run import SampleLoad, sample_run
from tests.support.undrawn_figures import undrawn_figures


@functools.cache
def point(rate: float, limit_ms: float = 400.0, runs: int = 1, duration_s: float = 60.0) -> LoadPoint:
    """A load whose runs are analysed once; no test changes them."""
    analyses = []
    for seed in range(runs):
        run = sample_run(replace(SampleLoad(), rate=rate, seed=seed, failure_share=0.0, duration_s=duration_s))
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
def test_metrics_8_throughput_stops_growing_with_load_at_the_knee(loads, throughput, knee) -> None:
    assert find_knee(loads, throughput) == knee


def test_slo_decision_uses_the_interval_of_the_pooled_runs() -> None:
    one, two = point(4.0), point(4.0, runs=2)

    assert one.slo_decision(0.5) is SloDecision.WITHIN
    assert point(4.0, limit_ms=1.0).slo_decision(0.5) is SloDecision.BEYOND
    assert one.slo_decision(one.attainment.value) is SloDecision.UNDECIDED
    assert two.attainment.hi - two.attainment.lo < one.attainment.hi - one.attainment.lo


def test_the_highest_load_within_precedes_the_first_one_beyond() -> None:
    good, bad, again = point(2.0), point(4.0, limit_ms=1.0), point(8.0)

    assert highest_within((good, bad, again), 0.5) is good
    assert highest_within((bad, again), 0.5) is None


def test_the_report_has_every_point_the_curve_and_the_verdict(sweep: Sweep, tmp_path) -> None:
    report = build_sweep_report(sweep)

    with undrawn_figures():
        paths = write_report(report, tmp_path)
    assert {path.name for path in paths.figures} >= {"throughput_latency.svg", "throughput_by_load.png"}
    text = paths.markdown.read_text()
    assert "5 loads from 2 to 32 requests/s" in text
    assert verdict(sweep).sentence in text
    assert list(points_table(sweep)["requests/s"]) == ["2", "4", "8", "16", "32"]
    assert any(isinstance(block, Table) for block in report.sections[0].blocks)


def test_pages_1_the_sentence_has_the_objectives_and_the_last_load_that_meets_them(sweep: Sweep) -> None:
    limits = {2.0: 60_000.0, 4.0: 60_000.0, 8.0: 1.0}
    met, missed = (
        verdict(replace(sweep, points=tuple(point(rate, limits[rate]) for rate in rates))).sentence
        for rates in ((2.0, 4.0, 8.0), (8.0,))
    )

    assert met.startswith("4 requests/s: ")
    assert "; all objectives met" in met
    assert "4 requests/s is the last load that reached 95 % of requests within the objectives." in met
    assert "; missed: TTFT p95 ≤ 1 ms. No load reached 95 %" in missed


def test_sweep_json_has_the_values_of_every_point(sweep: Sweep) -> None:
    content = sweep_json(sweep)

    assert [each["load"] for each in content["points"]] == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert content["highest_within"] == (sweep.within.load if sweep.within else None)
    assert content["points"][0]["standing"] in ("within", "beyond", "undecided")


@pytest.mark.parametrize(
    ("label", "title"), [("rate 4", "Sweep over rate"), ("", "Sweep over rate"), ("new batching", "new batching")]
)
def test_the_title_is_the_label_or_the_varied_quantity(label: str, title: str) -> None:
    one = LoadPoint(4.0, (point(4.0).first.named(label),))

    report = build_sweep_report(Sweep("rate", (one,), 0.95, ("tgi-bench", "sweep", "--slo", "ttft_p95_ms < 500")))

    assert report.title == title
    assert "--slo 'ttft_p95_ms < 500'" in str(report.sections[-1])


def test_the_curve_has_a_line_at_the_objective_of_its_own_latency(sweep: Sweep) -> None:
    [plot] = [plot for plot in build_sweep_report(sweep).plots if plot.name == "throughput_latency"]

    assert "Dashed: the objective." in plot.caption
    [axes] = plot.draw(HALF).axes
    assert [text.get_text() for text in axes.texts if "objective" in text.get_text()] == ["objective 400 ms"]
    assert axes.get_ylim()[1] > 400


def test_wide_latency_ranges_have_a_logarithmic_axis(sweep: Sweep) -> None:
    apart, near = (replace(sweep, points=points) for points in (sweep.points, sweep.points[:3]))

    scales = {}
    for name, each in (("apart", apart), ("near", near)):
        [plot] = [plot for plot in build_sweep_report(each).plots if plot.name == "throughput_latency"]
        [axes] = plot.draw(HALF).axes
        scales[name] = axes.get_yscale()

    assert scales == {"apart": "log", "near": "linear"}


def test_one_user_is_singular() -> None:
    one = replace(point(4.0), load=1.0)

    section = build_sweep_report(Sweep("concurrency", (one,), 0.95)).sections[1]

    assert "1 user:" in str(section.blocks[0])


def test_without_streaming_the_curve_shows_e2e(sweep: Sweep) -> None:
    blocking = []
    for each in sweep.points[:3]:
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


def test_trust_W4_search_runs_of_one_load_are_pooled_with_the_dependence_of_each() -> None:
    """The end of one run does not continue in the next, so the order of the runs does not matter."""
    both = point(4.0, runs=2)
    turned = replace(both, analyses=both.analyses[::-1])

    assert turned.attainment == both.attainment
    assert [run.count for run in both.evidence] == [len(each.measured.population) for each in both.analyses]


@pytest.fixture
def search(sweep: Sweep) -> Sweep:
    """A search whose shares fall through the target between 8 and 16 requests/s."""
    shares = {4.0: 0.999, 8.0: 0.98, 12.0: 0.95, 16.0: 0.88}
    runs = [RunEvidence(load, share, 300.0, 33.0, 1_000) for load, share in shares.items()]
    runs.append(RunEvidence(32.0, 0.1, 50.0, 33.0, 500, is_overloaded=True))
    return replace(sweep, search=("valid", "12 (11–13) requests/s"), capacity=Capacity(tuple(runs), 0.95))


def test_the_report_of_a_search_draws_the_curve_and_the_interval(search: Sweep) -> None:
    [plot] = [plot for plot in build_sweep_report(search).plots if plot.name == "attainment_by_load"]

    assert "the fitted curve with its 95 % band" in plot.caption
    assert "Grey: the 95 % interval of the capacity." in plot.caption
    [axes] = plot.draw(HALF).axes
    assert axes.get_title(loc="left") == "requests within the objectives, %  ↑ better"
    content = sweep_json(search)
    assert content["capacity"]["lo"] < 12.0 < content["capacity"]["hi"]
    assert curve_frame(search.capacity)["value"].is_monotonic_decreasing


@pytest.mark.parametrize(
    ("level", "word"),
    [
        ("valid", "Valid measurements"),
        ("inconclusive", "Inconclusive"),
        ("invalid", "Objectives missed at every load"),
    ],
)
def test_pages_1_a_search_has_its_own_verdict(search: Sweep, level: str, word: str) -> None:
    [line] = build_sweep_report(replace(search, search=(level, "12 users (11–13)"))).verdicts

    assert (line.level, line.word) == (level, word)
    assert line.sentence.startswith("12 users (11–13)")


def test_the_report_of_a_sweep_has_no_curve(sweep: Sweep) -> None:
    [plot] = [plot for plot in build_sweep_report(sweep).plots if plot.name == "attainment_by_load"]

    assert "curve" not in plot.caption
    assert sweep_json(sweep)["capacity"] is None


def test_the_verdict_of_a_sweep_starts_with_the_numbers_of_the_best_load(sweep: Sweep) -> None:
    best = sweep.within
    assert best is not None
    row = points_table(sweep).iloc[sweep.points.index(best)]
    speed, latency = row["Output tokens/s ↑"].text, row["TTFT p95, ms ↓"].text

    sentence = verdict(sweep).sentence

    assert sentence.startswith(
        f"{best.load:g} requests/s: {speed} output tokens/s, TTFT p95 {latency} ms; all objectives met"
    )
    assert "not saturated" not in sentence
    # Shorter runs of a queue have no interval of tokens/s.
    below = verdict(replace(sweep, points=tuple(point(rate, duration_s=300.0) for rate in (2.0, 8.0)))).sentence
    assert "The server is not saturated: try more than 8 requests/s." in below


def test_geometric_loads_have_a_log2_axis_with_ticks_at_the_points(sweep: Sweep) -> None:
    [plot] = [plot for plot in build_sweep_report(sweep).plots if plot.name == "throughput_by_load"]
    [axes] = plot.draw(HALF).axes

    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8", "16", "32"]
    assert axes.get_ylim()[1] >= 1_226


def test_latencies_and_the_speed_of_one_request_are_drawn_against_load(sweep: Sweep) -> None:
    plots = {plot.name: plot for plot in build_sweep_report(sweep).plots}

    assert plots["latency_by_load"].alt.startswith("Line chart of TTFT p95, TPOT p50, E2E p95")
    [axes] = plots["speed_per_user"].draw(HALF).axes
    assert axes.get_title(loc="left") == "tokens/s of one request  ↑ better"


def test_the_note_promises_intervals_only_where_the_table_has_them(sweep: Sweep) -> None:
    """The latencies of a row have none; the page of the run has theirs."""
    [note] = [
        block.note
        for section in build_sweep_report(sweep).sections
        for block in section.blocks
        if isinstance(block, Table) and "a load links" in block.note
    ]

    assert "Values with 95 % intervals" not in note
    assert "The page of a run has those of the other values." in note


def test_trust_C3_an_unsupported_latency_of_a_load_has_its_mark(sweep: Sweep) -> None:
    short = replace(sweep, points=(point(2.0, duration_s=20.0), point(4.0, duration_s=20.0)))

    report = build_sweep_report(short)

    cells = [cell_text(each) for each in points_table(short)["TTFT p95, ms ↓"]]
    assert all(cell.startswith("≥") for cell in cells)
    [table] = [block for block in report.sections[0].blocks if isinstance(block, Table)]
    assert "~ and ≥ mark" in table.note
    assert f"TTFT p95 {cells[1]} ms" in verdict(short).sentence

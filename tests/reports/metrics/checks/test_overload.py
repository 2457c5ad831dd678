"""Overload of an open loop is a finding about the server at level valid."""

import re

import numpy as np
import pytest

from loadgen.commands.present import render_summary
from reports.gate.compare import judge
from reports.gate.side_run import Pair, SideRun
from reports.metrics.checks.findings import is_overloaded
from reports.metrics.checks.overload import is_growing
from reports.metrics.summary import Analysis
from reports.metrics.sweep import LoadPoint, highest_within
from reports.pages.run_page import build_run_report
from reports.renderers.markdown import render
from reports.stats.capacity import Capacity
from tests.support.samples.sample_run import SampleLoad, sample_run

# 4 slots and 1.4 s a request: 2.8 requests/s.
QUEUEING = SampleLoad(rate=6, slots=4, failure_share=0)
# 40 requests/s offered to 32 slots, which serve 23/s; the rest is refused.
REFUSING = SampleLoad(rate=40, slots=32, max_in_flight=36, failure_share=0)


@pytest.fixture(scope="module")
def queueing() -> Analysis:
    return Analysis.of(sample_run(QUEUEING))


@pytest.fixture(scope="module")
def refusing() -> Analysis:
    return Analysis.of(sample_run(REFUSING))


def test_trust_W7_overload_is_a_valid_measurement_with_a_finding(queueing: Analysis) -> None:
    summary = queueing.summary

    verdict = summary["verdict"]
    assert (verdict["status"], verdict["reasons"]) == ("valid", [])
    [finding] = verdict["findings"]
    assert finding["check"] == "overloaded"
    arrivals, completions = map(float, re.findall(r"[\d.]+(?=/s)", finding["message"]))
    assert finding["message"] == f"overloaded: arrivals {arrivals:.3g}/s, completions {completions:.3g}/s"
    assert arrivals == pytest.approx(6, rel=0.1)
    assert completions == pytest.approx(2.8, rel=0.15)
    assert is_overloaded(summary)
    assert summary["overload"]["latencies_grow"]
    assert LoadPoint(6.0, (queueing,)).is_valid


def test_trust_W7_overload_is_in_the_verdict_line_and_in_the_note_on_latencies(queueing: Analysis) -> None:
    [finding] = queueing.summary["verdict"]["findings"]

    text, page = render_summary([queueing]), render(build_run_report([queueing])).decode()

    assert text.splitlines()[0].endswith(finding["message"])
    assert "latencies        grow with time: the server is overloaded" in text
    assert "Overloaded server: latencies grow with time, arrivals" in page
    assert "Latencies grow with time: the server is overloaded" in page


def test_trust_W7_overload_with_refused_requests_names_their_share(refusing: Analysis) -> None:
    """The queue is short, so latencies of the accepted requests do not grow."""
    summary = refusing.summary

    failures, finding = summary["verdict"]["findings"]
    assert failures["check"] == "failed_requests"
    assert re.fullmatch(r"overloaded: arrivals [\d.]+/s, completions [\d.]+/s, \d\d % refused", finding["message"])
    refused = summary["counts"]["overloaded"] / sum(summary["counts"].values())
    assert summary["overload"]["refused"] == pytest.approx(refused)
    assert not summary["overload"]["latencies_grow"]
    assert is_overloaded(summary)


@pytest.mark.parametrize("found", ["queueing", "refusing"])
def test_pages_1_the_first_line_of_an_overloaded_run_is_a_warning(found: str, request: pytest.FixtureRequest) -> None:
    analysis: Analysis = request.getfixturevalue(found)

    [first] = build_run_report([analysis]).verdicts

    refused = analysis.summary["overload"]["refused"]
    cause = f"{100 * refused:.1f} % of requests refused" if refused else "latencies grow with time"
    assert first.level == "warning"
    rates = r"arrivals [\d.]+/s, completions [\d.]+/s"
    assert re.match(rf"Overloaded server: {cause}, {rates}\. Valid run", first.word)
    assert first.word.count("refused") == bool(refused)


def test_trust_W7_overload_makes_runs_incomparable(queueing: Analysis) -> None:
    side = SideRun.of(queueing.run.manifest, queueing.summary, ["ttft_p50_ms"])

    comparison = judge([Pair(side, side)] * 4)

    assert side.status == "overloaded"
    assert "cannot be compared: overloaded: arrivals" in comparison.refusals[0].message


@pytest.mark.parametrize("found", ["queueing", "refusing"])
def test_trust_F1_every_overloaded_point_is_beyond_the_capacity_and_has_no_share(found: str, request) -> None:
    analysis: Analysis = request.getfixturevalue(found)
    analysis.run.manifest.objectives = [{"metric": "e2e_p95_ms", "max": 60_000.0}]
    point = LoadPoint(6.0, (analysis,))

    capacity = Capacity(point.evidence, 0.5)

    assert analysis.measured.window.stop_reason == "duration"
    assert point.is_overloaded
    assert (capacity.beyond, capacity.within) == (6.0, None)
    assert highest_within([point], 0.5) is None


def test_trust_W7_overload_is_not_found_below_capacity() -> None:
    for load in (SampleLoad(), SampleLoad(rate=2, slots=4, failure_share=0), SampleLoad(mode="closed")):
        assert Analysis.of(sample_run(load)).summary["overload"] is None


def test_trust_W7_overload_that_ended_the_run_is_a_finding() -> None:
    run = sample_run(SampleLoad(rate=6, slots=4, duration_s=12, failure_share=0))
    run.manifest.stop_reason = "overload"

    assert is_overloaded(Analysis.of(run).summary)


def test_a_server_that_fills_up_is_not_overloaded() -> None:
    """20 requests/s that take 10 s each: after 10 s, 200 are in flight, and the number stays."""
    start_s = np.arange(0, 33, 0.05)

    assert not is_growing(start_s, start_s + 10, 3.0, 33.0)
    assert not is_growing(start_s, start_s + 20, 3.0, 33.0)


def test_a_growing_queue_is_found_and_a_busy_one_is_not() -> None:
    start_s = np.arange(0, 33, 0.1)
    turns = np.arange(len(start_s))

    assert is_growing(start_s, 0.1 + turns / 7, 3.0, 33.0)
    assert not is_growing(start_s, 0.5 + turns / 9.99, 3.0, 33.0)


def test_requests_that_never_left_count_as_waiting() -> None:
    start_s = np.arange(0, 33, 0.1)
    leave_s = np.where(start_s < 15, start_s + 0.2, np.nan)

    assert is_growing(start_s, leave_s, 3.0, 33.0)

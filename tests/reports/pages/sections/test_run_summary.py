"""The tiles of a run agree with the tables below them."""

import re
from dataclasses import replace

import pytest

from reports.document import Estimate
from reports.metrics.summary import Analysis
from reports.pages.sections.objectives import ObjectiveResult
from reports.pages.sections.run_summary import objectives_tile
from reports.pages.sections.run_tables import totals_table
from tests.support.samples.sample_run import SampleLoad, sample_run

MET, MISSED = (True, True), (False, True)
UNDECIDED, LIKELY_MISSED = (True, False), (False, False)


def results(*judged: tuple[bool, bool]) -> list[ObjectiveResult]:
    return [ObjectiveResult("TTFT p95 ≤ 400 ms", "350", Estimate(99.0), *each) for each in judged]


@pytest.mark.parametrize(
    ("judged", "value", "unit", "is_bad"),
    [
        ((MET, MET), "all met", "", False),
        ((UNDECIDED, UNDECIDED), "2 not certain", "of 2", False),
        ((MET, LIKELY_MISSED), "1 not certain", "of 2", False),
        ((MISSED, UNDECIDED), "1 missed, 1 not certain", "of 2", True),
        ((UNDECIDED,), "not certain", "", False),
        ((MISSED,), "missed", "", True),
    ],
)
def test_the_tile_of_objectives_has_the_decisions_of_its_lines(
    judged: tuple[tuple[bool, bool], ...], value: str, unit: str, is_bad: bool
) -> None:
    tile = objectives_tile(results(*judged))

    assert (tile.value, tile.unit, tile.is_bad) == (value, unit, is_bad)
    assert len(tile.details) == len(judged)


def test_the_columns_of_runs_have_intervals_and_the_change_against_the_first_run() -> None:
    first, slower = (Analysis.of(sample_run(SampleLoad(mode="closed", slowdown=each))) for each in (1.0, 1.3))

    rows = totals_table([first.named("first"), slower.named("slower")]).set_index("")

    assert re.fullmatch(r"[\d.,]+ \([\d.,]+–[\d.,]+\)", rows.loc["Output tokens/s ↑", "first"])
    assert re.fullmatch(r"[\d.]+ \([\d.]+–[\d.]+\), \+\d+\.\d %", rows.loc["TPOT p50, ms ↓", "slower"])


def test_pages_1_the_tile_has_the_reason_why_an_objective_is_not_certain() -> None:
    text, value, share = "TTFT p95 ≤ 70 ms", "≥76.5", Estimate(90.0)
    short = ObjectiveResult(text, value, share, is_met=False, is_supported=False)
    growing = ObjectiveResult(text, "~61.2", share, is_met=True, is_supported=False, is_growing=True)

    failing = replace(short, value="≥61.2", has_failures=True)

    assert objectives_tile([short, growing, failing, replace(failing, is_supported=True)]).details == (
        "TTFT p95 ≤ 70 ms: 76.5, missed in this run, but the run is too short to be certain",
        "TTFT p95 ≤ 70 ms: 61.2, met in this run, but latencies grow with time, so a longer run would miss it",
        "TTFT p95 ≤ 70 ms: 61.2 for complete answers, but missed, because failed requests count as misses; "
        "the run is too short to be certain",
        "TTFT p95 ≤ 70 ms: 61.2 for complete answers, but missed, because failed requests count as misses",
    )

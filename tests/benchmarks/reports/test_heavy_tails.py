"""Intervals under heavy-tailed service times: the rows of the experiment, and the table of the page."""

import json
from pathlib import Path

import pytest

from benchmarks.reports.heavy_tails import MODELS, STATISTICS, planned_rows, render, stationary

PAGE, RESULT = Path("docs/intervals.md"), Path("benchmarks/results/heavy_tails.json")


def test_trust_C1_the_tables_of_heavy_tails_are_those_of_the_stored_result():
    text, found = PAGE.read_text(), json.loads(RESULT.read_text())

    assert found["runs"] >= 100
    for table in render(found).split("\n\n"):
        assert table in text


@pytest.mark.slow
def test_a_row_counts_the_printed_intervals_and_those_that_cover():
    model = MODELS[0]
    truths = stationary(model, 0.5)

    rows = list(planned_rows(model, 0.5, 8, truths, counts=(1_000,)))

    assert [row["statistic"] for row in rows] != []
    assert {row["statistic"] for row in rows} == set(STATISTICS)
    mean = next(row for row in rows if row["statistic"] == "ttft mean")
    assert mean["truth"] == 0.5 * (1 + 2.0**2) / (2 * 0.5) + 0.05
    assert 4 <= mean["covered"] <= mean["printed"] <= 8

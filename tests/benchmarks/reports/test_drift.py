"""Intervals of a server that becomes slower: the rows of the experiment, and the table of the page."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.reports.drift import SlowingServer, drift_rows, render

PAGE, RESULT = Path("docs/intervals.md"), Path("benchmarks/results/drift.json")


def test_trust_S1_the_table_of_drift_is_that_of_the_stored_result():
    found = json.loads(RESULT.read_text())

    assert found["runs"] >= 100
    assert render(found) in PAGE.read_text()


def test_the_speed_falls_by_the_share_from_the_warm_up_to_the_end_of_the_window():
    slowdown = SlowingServer("M/G/16", 0.7, 0.2).slowdown(np.array([0.0, 12.0, 4 * 33.0, 4 * 63.0, 1e6]))

    assert slowdown.tolist() == [1.0, 1.0, 1 / 0.9, 1.25, 1.25]


@pytest.mark.slow
def test_trust_S1_a_loss_of_a_fifth_of_the_speed_is_reported():
    level, slower = drift_rows("closed loop", 1.5, 4, (0.0, 0.2))

    assert (level["checked"], slower["checked"]) == (4, 4)
    assert level["reported"] <= 1
    assert slower["reported"] == 4
    assert slower["statistics"]["throughput rate"]["change"] < -0.05
    assert slower["statistics"]["e2e mean"]["start"] < slower["statistics"]["e2e mean"]["window"]

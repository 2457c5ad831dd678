"""The check for a steady state, in simulated queues: few false alarms, and changes of speed are found."""

import pytest

from benchmarks.reports.steady_state import CHANGES, LOADS, SPEEDS, changed_row, stationary_rows
from loadgen.selftest.queue_models import MODELS


@pytest.mark.slow
def test_trust_S1_stationary_queues_are_seldom_degraded():
    rows = [row for model in MODELS[:4] for row in stationary_rows(model, 0.7, 4.0, runs=15, seed=21)]

    checked = sum(row["checked"] for row in rows)
    assert checked > 200
    assert sum(row["degraded"] for row in rows) <= 0.05 * checked


@pytest.mark.parametrize(
    "change",
    [CHANGES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in CHANGES[2:4])],
    ids=lambda change: change.name,
)
def test_trust_S1_a_change_of_a_saturated_server_is_found_in_30_seconds(change):
    row = changed_row(change, load=1.5, speed=4.0, window_s=30.0, runs=10, seed=21)

    assert row["checked"] == 10
    assert row["degraded"] >= 9


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_trust_S1_at_most_two_percent_of_stationary_runs_are_degraded(model):
    rows = [row for load in LOADS for speed in SPEEDS for row in stationary_rows(model, load, speed, runs=60, seed=22)]

    assert sum(row["degraded"] for row in rows) <= 0.02 * sum(row["checked"] for row in rows)

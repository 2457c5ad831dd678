"""Intervals of waiting times in queues of known truth: they cover, or they are not printed."""

import json

import numpy as np
import pytest

from loadgen.selftest.coverage import COUNTS, coverage, coverage_table, stationary_values
from loadgen.selftest.queue_models import LOADS, MODELS, closed_loop

MODEL = {model.name: model for model in MODELS}


def cells(model, load, count, runs, seed=1):
    found = coverage(MODEL[model], load, count, stationary_values(model, load), runs, seed)
    return {(cell.latency, cell.statistic): cell for cell in found}


def test_the_simulated_single_server_queue_has_the_waits_of_its_formula():
    # M/M/1: mean wait rho / (1 - rho) services; the rest is the time to the first token of a request that does not wait
    values = stationary_values("M/M/1", 0.7)

    assert values["ttft mean"] == pytest.approx(0.7 / 0.3 + 0.05, rel=0.01)
    assert values["e2e mean"] == pytest.approx(1 / 0.3 + 0.05, rel=0.01)


def test_the_closed_loop_is_as_fast_as_its_slots_allow():
    runs = closed_loop(np.random.default_rng(3), 4, 400, 0.95)
    rate = 399 / (runs.arrival_s[:, -1] - runs.arrival_s[:, 0])

    assert 11 < rate.mean() < 14
    assert (runs.e2e_s > runs.queue_s).all()


def test_trust_C1_means_and_percentiles_of_a_calm_queue_are_covered():
    found = cells("M/M/1", 0.5, 1_000, runs=120)

    for latency in ("ttft", "e2e"):
        for statistic in ("mean", "p50", "p95"):
            cell = found[latency, statistic]
            assert cell.printed_fraction >= 0.7
            assert cell.coverage >= 0.9, (latency, statistic)


def test_trust_C2_a_calm_queue_prints_its_mean_and_median():
    found = cells("M/G/16", 0.5, 1_000, runs=60)

    assert found["ttft", "p50"].printed_fraction >= 0.9
    assert found["e2e", "mean"].printed_fraction >= 0.9


def test_trust_C3_a_busy_queue_in_a_short_run_prints_nothing_and_says_how_much_is_needed():
    found = cells("M/M/1", 0.95, 300, runs=40)

    assert found["ttft", "p95"].printed == 0
    assert found["ttft", "mean"].printed_fraction <= 0.05
    assert found["ttft", "mean"].median_needed > 1_000


def test_trust_W3_tail_percentiles_of_a_16_slot_queue_are_covered_or_withheld():
    for load in (0.7, 0.85):
        cell = cells("M/G/16", load, 1_000, runs=60)["ttft", "p95"]

        assert cell.miss_fraction <= 0.1


def test_trust_W4_attainment_at_high_load_is_covered_or_withheld():
    cell = cells("M/G/16", 0.85, 1_000, runs=60)["ttft", "att95"]

    assert cell.miss_fraction <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("model", [model.name for model in MODELS])
def test_trust_C1_every_cell_of_the_certificate(model):
    found = [
        cell
        for load in LOADS
        for count in COUNTS
        for cell in coverage(MODEL[model], load, count, stationary_values(model, load), runs=200, seed=11)
    ]
    frequent = [cell for cell in found if cell.printed_fraction >= 0.2]
    below = [cell for cell in frequent if cell.coverage < 0.9]

    assert len(below) <= 0.02 * len(frequent), coverage_table(below)


def test_the_table_names_each_cell_once():
    found = list(cells("M/M/1", 0.5, 300, runs=5).values())

    rows = json.loads(json.dumps(coverage_table(found)))

    assert len(rows) == len(found) == len({(row["latency"], row["statistic"]) for row in rows})

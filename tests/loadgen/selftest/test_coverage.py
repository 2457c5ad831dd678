"""Intervals of waiting times in queues of known truth: they cover, or they are not printed."""

import numpy as np
import pytest

from loadgen.selftest.coverage import Setting, measured_requests
from loadgen.selftest.queue_models import MODELS, closed_loop
from loadgen.selftest.stationary import exact_values, simulated_values, stationary_values

MODEL = {model.name: model for model in MODELS}


def cells(model, load, count, runs, seed=1):
    found = Setting(MODEL[model], load, count).cells(runs, seed)
    return {(cell.latency, cell.statistic): cell for cell in found}


def test_the_wait_of_a_single_server_has_the_distribution_of_its_formula():
    """M/M/1: the mean wait is rho / (1 - rho) services; a time in the system is exponential, then the first token."""
    values = stationary_values("M/M/1", 0.7)

    assert values["ttft mean"] == pytest.approx(0.7 / 0.3 + 0.05, rel=1e-6)
    assert values["e2e mean"] == pytest.approx(1 / 0.3 + 0.05, rel=1e-6)
    assert values["e2e p95"] == pytest.approx(np.log(20) / 0.3 + 0.05, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in MODELS if model.servers == 1])
def test_simulated_requests_agree_with_the_formula(model):
    exact, simulated = exact_values(model, 0.5), simulated_values(model, 0.5, seed=5)

    for name, value in exact.items():
        assert simulated[name] == pytest.approx(value, rel=0.02), name
        assert stationary_values(model.name, 0.5)[name] == pytest.approx(value, rel=1e-6), name


def test_the_closed_loop_is_as_fast_as_its_slots_allow():
    runs = closed_loop(np.random.default_rng(3), 4, 400, 0.95)
    rate = 399 / (runs.arrival_s[:, -1] - runs.arrival_s[:, 0])

    assert 11 < rate.mean() < 14
    assert (runs.e2e_s > runs.queue_s).all()


def test_a_run_starts_with_the_first_request_after_the_warm_up():
    model = MODEL["M/G/16"]
    simulated = model.simulate(np.random.default_rng(0), 2, 200, 0.7)

    runs = list(measured_requests(simulated, 3.0, 100))

    assert [len(run.queue_s) for run in runs] == [100, 100]
    assert all(run.arrival_s[0] >= 3.0 for run in runs)
    assert runs[1].arrival_s[0] == simulated.arrival_s[1][simulated.arrival_s[1] >= 3.0][0]


def test_trust_C1_means_and_percentiles_of_a_calm_queue_are_covered():
    found = cells("M/M/1", 0.5, 1_000, runs=120)

    for latency in ("ttft", "e2e"):
        for statistic in ("mean", "p50", "p95"):
            cell = found[latency, statistic]
            assert cell.printed_fraction >= 0.7
            assert cell.coverage >= 0.9, (latency, statistic)


@pytest.mark.slow
def test_trust_C2_a_calm_queue_prints_its_mean_and_median():
    found = cells("M/G/16", 0.5, 1_000, runs=60)

    assert found["ttft", "p50"].printed_fraction >= 0.9
    assert found["e2e", "mean"].printed_fraction >= 0.9


def test_trust_C3_a_busy_queue_in_a_short_run_prints_nothing_and_names_the_requests_it_needs():
    found = cells("M/M/1", 0.95, 300, runs=40)

    assert found["ttft", "p95"].printed == 0
    assert found["ttft", "mean"].printed_fraction <= 0.05
    assert found["ttft", "mean"].median_needed > 1_000


@pytest.mark.slow
def test_trust_W3_tail_percentiles_of_a_16_slot_queue_are_covered_or_withheld():
    for load in (0.7, 0.85):
        found = cells("M/G/16", load, 1_000, runs=60)

        for statistic in ("p95", "p99"):
            assert found["ttft", statistic].miss_fraction <= 0.1, (load, statistic)


def test_trust_W4_attainment_at_high_load_is_covered_or_withheld():
    cell = cells("M/G/16", 0.85, 1_000, runs=60)["ttft", "att95"]

    assert cell.miss_fraction <= 0.1

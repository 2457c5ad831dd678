"""Bounds of the attainment of dependent requests, compared with a known attainment."""

import numpy as np
import pytest

from tuner.simulator.capacity_planning.attainment import Attainment, FleetVerdict

RUNS, REQUESTS = 10, 1500
LEVEL = 0.05


def workload(rng: np.random.Generator, load: float, requests: int = REQUESTS) -> np.ndarray:
    """[runs, requests]: waiting times of an M/M/1 queue (Lindley), stationary from the start."""
    steps = rng.exponential(load, (RUNS, requests)) - rng.exponential(1.0, (RUNS, requests))
    walk = np.cumsum(steps, axis=1)
    start = rng.exponential(load / (1 - load), (RUNS, 1)) * (rng.random((RUNS, 1)) < load)
    return np.maximum(walk + start, walk - np.minimum.accumulate(np.minimum(walk, 0.0), axis=1))


def test_trust_P1_the_lower_bound_is_above_the_truth_no_more_often_than_stated():
    # The waiting time of M/M/1 at load 0.8 exceeds w with probability 0.8 * exp(-0.2 w / 0.8).
    rng = np.random.default_rng(1)
    limit = 4 * np.log(0.8 / 0.06)
    truth = 0.94

    fleets = [workload(rng, 0.8) for _ in range(300)]
    found = [Attainment.of(waits <= limit, waits, LEVEL) for waits in fleets]

    assert np.mean([each.value for each in found]) == pytest.approx(truth, abs=0.005)
    # 5 % of 300, and three standard deviations of that count.
    assert sum(each.lower > truth for each in found) <= 26
    assert sum(each.upper < truth for each in found) <= 26


def test_without_a_miss_the_bound_needs_enough_independent_requests():
    rng = np.random.default_rng(2)
    met = np.ones((RUNS, REQUESTS), dtype=bool)

    calm = Attainment.of(met, rng.normal(5, 1, met.shape), LEVEL)
    dependent = Attainment.of(met, np.repeat(rng.normal(5, 1, (RUNS, 5)), REQUESTS // 5, axis=1), LEVEL)

    assert calm.lower > 0.999
    assert dependent.lower < 0.95
    assert dependent.verdict(0.95, is_last=True) is FleetVerdict.NOT_SHOWN


def test_a_number_in_the_system_that_rises_is_never_stationary():
    rng = np.random.default_rng(3)
    met = np.ones((RUNS, REQUESTS), dtype=bool)

    found = Attainment.of(met, np.linspace(5, 50, REQUESTS) + rng.normal(0, 1, met.shape), LEVEL)

    assert found.is_growing
    assert found.verdict(0.5, is_last=False) is None
    assert found.verdict(0.5, is_last=True) is FleetVerdict.GROWS

"""The level of repeated looks, Holm's order, and the effect that a claim needs."""

import math

import pytest

from reports.gate.comparison import CompareOptions
from reports.gate.decide import Evidence, GateDecision, Levels, decide, nominal_level


def test_level_of_each_look_is_stricter_than_the_level_of_all() -> None:
    looks = CompareOptions().looks

    assert looks == (4, 5, 6, 7, 8, 9, 10, 11, 12)
    assert 0.012 < nominal_level(looks, 0.05) < 0.017
    assert nominal_level(looks, 0.05 / 4) < nominal_level(looks, 0.05) / 4
    assert nominal_level((12,), 0.05) == 0.05


def test_detectable_effect_has_a_power_of_80_percent_above_the_limit() -> None:
    # The normal quantile of 0.8 is 0.8416. The noncentral t distribution with 7 degrees of freedom and noncentrality
    # 2.7666 exceeds its central quantile 1.8946 with a probability of 0.8.
    assert Evidence(0.0, 0.01, 7).detectable(0.05, limit=0.1) == pytest.approx(0.1 + 0.8416 * 0.01, abs=1e-4)
    assert Evidence(0.0, 0.01, 7).detectable(0.05, limit=0.0) == pytest.approx(2.7666 * 0.01, rel=0.005)
    assert Evidence(0.0, 0.0, 7).detectable(0.05, limit=0.1) == 0.1
    assert Evidence(0.0, math.inf, 1).detectable(0.05, limit=0.1) == math.inf


ONE_LOOK = Levels((8,), alpha=0.05, pass_alpha=0.05)
LIMITS = {"first": 0.1, "second": 0.1}


def decisions(**evidence: Evidence) -> dict[str, GateDecision]:
    found = decide(list(evidence), lambda name, _: evidence[name], LIMITS, ONE_LOOK)
    return {name: each.decision for name, each in found.items()}


def test_after_a_regression_the_next_metric_has_the_level_of_those_that_remain() -> None:
    # One-sided p-values of 0.005 and 0.035: the second is above 0.05 / 2 and below 0.05.
    first, second = Evidence(0.5, 0.5 / 2.58, 10_000), Evidence(0.5, 0.5 / 1.81, 10_000)

    assert decisions(first=first, second=second) == dict.fromkeys(LIMITS, GateDecision.REGRESSION)
    assert decisions(first=second, second=second) == {}


def test_an_effect_of_exactly_the_limit_is_a_regression() -> None:
    assert decisions(first=Evidence(0.1, 0.001, 100)) == {"first": GateDecision.REGRESSION}


def test_a_gain_below_the_limit_is_a_pass_and_no_improvement() -> None:
    assert decisions(first=Evidence(-0.05, 0.001, 100)) == {"first": GateDecision.PASS}
    assert decisions(first=Evidence(-0.2, 0.001, 100)) == {"first": GateDecision.IMPROVEMENT}

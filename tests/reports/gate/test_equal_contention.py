"""The adjustment of changes to equal contention: unbiased, at its level, and explained."""

import math

import numpy as np
import pytest

from reports.gate.compare import judge
from reports.gate.comparison import CompareOptions
from reports.gate.decide import Evidence, GateDecision
from reports.gate.side_run import Pair, SideRun

METRIC = "tpot_p50_ms"


def options(*, is_adjusted: bool) -> CompareOptions:
    return CompareOptions(gated=(METRIC,), shown=(), pairs=8, equal_contention=is_adjusted)


def pairs_of(d: np.ndarray, x: np.ndarray) -> list[Pair]:
    """Pairs whose B takes exp(d) as long and has exp(x) times the contention."""
    return [
        Pair(SideRun("A", {METRIC: 10.0}, contention=1.5), SideRun("B", {METRIC: 10.0 * math.exp(each)}, contention=c))
        for each, c in zip(d, 1.5 * np.exp(x), strict=True)
    ]


def test_trust_C5_gate_an_effect_is_estimated_at_equal_contention() -> None:
    random = np.random.default_rng(1)
    x = random.normal(0.1, 0.2, 2_000)

    found = Evidence.adjusted(0.05 + 1.2 * x + random.normal(0, 0.01, 2_000), x)

    assert found.mean == pytest.approx(0.05, abs=0.001)
    assert found.error == pytest.approx(0.01 * math.sqrt((1 + 0.25) / 2_000), rel=0.05)


@pytest.mark.parametrize("pairs", [4, *(pytest.param(pairs, marks=pytest.mark.slow) for pairs in (6, 12))])
def test_trust_C5_gate_the_adjusted_test_keeps_its_level(pairs: int) -> None:
    random = np.random.default_rng(2)
    draws = random.normal(0, 0.2, (4_000, 2, pairs))

    p = [Evidence.adjusted(1.2 * x + 0.3 * noise, x).p_worse for x, noise in draws]

    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=0.012)


def test_too_few_pairs_or_constant_contention_are_judged_without_it() -> None:
    d = np.array([0.01, 0.02, 0.04])

    assert Evidence.adjusted(d, np.array([0.1, 0.0, 0.2])) == Evidence.of_pairs(d)
    assert Evidence.adjusted(np.tile(d, 2), np.zeros(6)) == Evidence.of_pairs(np.tile(d, 2))


def test_trust_C5_gate_contention_that_moves_every_pair_no_longer_hides_equal_servers() -> None:
    random = np.random.default_rng(3)
    x = random.normal(0, 0.3, 8)
    pairs = pairs_of(x + random.normal(0, 0.003, 8), x)

    plain, adjusted = (judge(pairs, options(is_adjusted=each)) for each in (False, True))

    assert plain.verdict is GateDecision.INCONCLUSIVE
    assert adjusted.verdict is GateDecision.PASS
    assert "adjusted to equal contention" in adjusted.notes[0]
    assert "B itself" not in adjusted.notes[0]


def test_trust_C5_gate_a_difference_in_contention_between_the_sides_is_stated() -> None:
    random = np.random.default_rng(4)
    x = random.normal(0.3, 0.05, 8)

    found = judge(pairs_of(x + random.normal(0, 0.003, 8), x), options(is_adjusted=True))

    assert "B itself may cause this difference, and the adjustment removes it" in found.notes[0]


def test_unknown_contention_is_stated_and_changes_nothing() -> None:
    pairs = [Pair(SideRun("A", {METRIC: 10.0}), SideRun("B", {METRIC: 10.0 + each / 100})) for each in range(8)]

    found = judge(pairs, options(is_adjusted=True))

    assert found.metrics == judge(pairs, options(is_adjusted=False)).metrics
    assert "not adjusted to equal contention" in found.notes[0]

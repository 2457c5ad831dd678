"""C5 on the measured mixture: A/A pairs of the bundled server, as measured and scaled to smaller noise."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from benchmarks.reports.gate_power import (
    METRICS,
    Design,
    NoiseMixture,
    outcomes,
    pairs_of,
    verdict,
    with_contention,
)
from reports.gate.compare import judge
from reports.gate.comparison import CompareOptions
from reports.gate.decide import GateDecision
from reports.gate.noise_split import split_noise
from reports.gate.side_run import Pair, SideRun

MEASURED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "gate.json"
NOMINAL = 0.05
SEPARATE, INTERLEAVED = Design("separate", 4, is_interleaved=False), Design("slices", 4, is_interleaved=True)
ADJUSTED = Design("slices, equal contention", 4, is_interleaved=True, is_adjusted=True)


@pytest.fixture(scope="module")
def all_pairs() -> list[Pair]:
    return pairs_of(json.loads(MEASURED.read_text()))


@pytest.fixture(scope="module")
def measured(all_pairs: list[Pair]) -> list[Pair]:
    """The pairs with contention, from which mixtures are drawn."""
    return with_contention(all_pairs)


def upper_bound(alarms: int, comparisons: int) -> float:
    """The one-sided upper 95 % bound of a rate (Clopper and Pearson, 1934)."""
    return float(special.betaincinv(alarms + 1, comparisons - alarms, 0.95))


def test_the_noise_of_many_pairs_of_the_bundled_server_is_measured(all_pairs: list[Pair]) -> None:
    found = split_noise(all_pairs, METRICS)

    assert len(all_pairs) >= 30
    assert [each.name for each in found] == list(METRICS)
    assert all(each.within > 0 for each in found)


@pytest.mark.parametrize("slices", [4, 8])
def test_simulated_pairs_have_the_deviation_of_the_measured_components(measured: list[Pair], slices: int) -> None:
    mixture, random = NoiseMixture.of(measured), np.random.default_rng(1)

    for is_interleaved in (True, False):
        drawn = mixture.differences(random, 40_000, Design("", slices, is_interleaved))
        for column, split in enumerate(split_noise(measured, METRICS)):
            expected = split.interleaved(slices) if is_interleaved else split.separate(slices)
            assert drawn[:, column].std() == pytest.approx(expected, rel=0.05)
            assert drawn[:, column].mean() == pytest.approx(0.0, abs=0.02)


def test_scaled_noise_of_a_separate_run_is_the_given_one(measured: list[Pair]) -> None:
    drawn = NoiseMixture.of(measured, run_noise=0.02).differences(np.random.default_rng(1), 40_000, SEPARATE)

    assert drawn.std(axis=0) == pytest.approx(np.full(len(METRICS) + 1, math.sqrt(2) * 0.02), rel=0.05)


def test_a_simulated_verdict_is_that_of_the_gate() -> None:
    random, options = np.random.default_rng(9), CompareOptions(gated=METRICS, shown=())
    for effect in (0.0, 0.03, 0.06, -0.05):
        d = random.normal(effect, 0.03, (12, 3))
        pairs = [
            Pair(SideRun("a", dict.fromkeys(METRICS, 1.0)), SideRun("b", dict(zip(METRICS, _turned(row), strict=True))))
            for row in d
        ]
        found = judge(pairs, options).verdict
        assert verdict(d, options)[0] is (GateDecision.PASS if found is GateDecision.IMPROVEMENT else found)


def _turned(row: np.ndarray) -> list[float]:
    """Values of B, relative to 1.0 of A; more output tokens are better."""
    return [math.exp(-row[0]), math.exp(row[1]), math.exp(row[2])]


@pytest.mark.slow
def test_trust_C5_gate_few_false_alarms_in_slices_on_the_measured_mixture(measured: list[Pair]) -> None:
    found = outcomes(NoiseMixture.of(measured), INTERLEAVED, 0.0, 300, np.random.default_rng(5))

    assert found.regressions <= 15


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run_noise", [None, 0.02, 0.04])
@pytest.mark.parametrize("design", [SEPARATE, INTERLEAVED, ADJUSTED], ids=lambda design: design.name)
def test_trust_C5_gate_false_alarms_stay_at_the_promise_on_the_measured_mixture(
    measured: list[Pair], design: Design, run_noise: float | None
) -> None:
    mixture = NoiseMixture.of(measured, run_noise=run_noise)

    found = outcomes(mixture, design, 0.0, 2_000, np.random.default_rng(6))

    assert upper_bound(found.regressions, found.comparisons) <= 1.3 * NOMINAL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trust_C5_gate_slices_detect_five_percent_at_least_as_often_as_separate_runs(measured: list[Pair]) -> None:
    for run_noise in (0.02, 0.04):
        mixture = NoiseMixture.of(measured, run_noise=run_noise)
        separate, slices, adjusted = (
            outcomes(mixture, design, 0.05, 1_000, np.random.default_rng(7))
            for design in (SEPARATE, INTERLEAVED, ADJUSTED)
        )
        assert min(slices.regressions, adjusted.regressions) >= separate.regressions - 5
        assert slices.mean_pairs < separate.mean_pairs

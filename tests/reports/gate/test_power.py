"""A regression of the stated size is found in about 80 % of simulated comparisons."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from reports.gate.compare import Array, judge
from reports.gate.comparison import CompareOptions
from reports.gate.decide import Evidence, GateDecision, decide
from reports.gate.noise import noise_of, noise_sentence
from reports.gate.side_run import Pair, SideRun

METRICS = ("ttft_p50_ms", "tpot_p50_ms", "e2e_p50_ms", "ttft_p95_ms")
COMPARISONS = 2_000
PLANS = {"fixed": CompareOptions(shown=(), pairs=12), "looks": CompareOptions(shown=())}
CASES = ((1, 0.02), (1, 0.04), (4, 0.02), (4, 0.04))
# Each plan, number of metrics and noise once; four metrics with looks are a case of fewer pairs.
SHORT = (("fixed", 1, 0.04), ("fixed", 4, 0.02), ("looks", 1, 0.02))


def share_found(options: CompareOptions, noise: float, percent: float) -> float:
    """The share of comparisons that find the first metric as a regression, if it is worse by `percent`.

    noise: standard deviation of the logarithm of a run. The other gated metrics do not change.
    """
    generator = np.random.default_rng(18)
    d = generator.normal(0.0, math.sqrt(2) * noise, (COMPARISONS, options.looks[-1], len(options.gated)))
    d[:, :, 0] += math.log1p(percent / 100)
    means = np.stack([d[:, :look].mean(axis=1) for look in options.looks], axis=1)
    errors = np.stack([d[:, :look].std(axis=1, ddof=1) / math.sqrt(look) for look in options.looks], axis=1)
    limits = {name: options.limit(name) for name in options.gated}
    found = 0
    for mean, error in zip(means, errors, strict=True):

        def evidence(name: str, look: int, mean: Array = mean, error: Array = error) -> Evidence:
            at = options.looks.index(look), options.gated.index(name)
            return Evidence(float(mean[at]), float(error[at]), look - 1)

        first = decide(options.gated, evidence, limits, options.levels).get(options.gated[0])
        found += first is not None and first.decision is GateDecision.REGRESSION
    return found / COMPARISONS


def undecided_pairs(options: CompareOptions, noise: float) -> list[Pair]:
    """Pairs with exactly this noise and a change just below the limit, so that no look decides."""
    count = options.looks[-1]
    spread = math.sqrt(2) * noise * math.sqrt((count - 1) / count)
    change = 0.9 * options.limit(METRICS[0])
    return [
        Pair(
            SideRun("a", dict.fromkeys(METRICS, 20.0)),
            SideRun("b", dict.fromkeys(METRICS, 20.0 * math.exp(change + spread * (-1) ** number))),
        )
        for number in range(count)
    ]


def equal_runs(noise: float) -> list[SideRun]:
    """Two runs with exactly this noise."""
    half = noise / math.sqrt(2)
    return [SideRun("x", dict.fromkeys(METRICS, 20.0 * math.exp(each))) for each in (-half, half)]


@pytest.mark.parametrize(
    ("plan", "gated", "noise"),
    [
        pytest.param(plan, *case, marks=() if (plan, *case) in SHORT else pytest.mark.slow)
        for plan in PLANS
        for case in CASES
    ],
)
def test_a_comparison_states_the_regression_that_80_percent_of_such_comparisons_find(
    plan: str, gated: int, noise: float
) -> None:
    options = replace(PLANS[plan], gated=METRICS[:gated])

    stated = judge(undecided_pairs(options, noise), options).gated[0].smallest_effect

    assert 0.77 <= share_found(options, noise, stated) <= 0.90


@pytest.mark.parametrize(
    ("gated", "noise"), [pytest.param(*case, marks=() if case == (1, 0.04) else pytest.mark.slow) for case in CASES]
)
def test_the_sentence_of_noise_states_the_regression_that_80_percent_of_comparisons_find(
    gated: int, noise: float
) -> None:
    options = CompareOptions(gated=METRICS[:gated], shown=())

    sentence = noise_sentence(noise_of(equal_runs(noise), options), options)

    stated = float(re.findall(r"TTFT p50 ([\d.]+) %", sentence)[0])
    assert 0.77 <= share_found(options, noise, stated) <= 0.90


@pytest.mark.parametrize("pairs", [5, *(pytest.param(pairs, marks=pytest.mark.slow) for pairs in (4, 8))])
def test_the_effects_of_noise_hold_for_comparisons_with_fewer_pairs(pairs: int) -> None:
    options = CompareOptions(gated=METRICS, shown=())

    stated = 100 * noise_of(equal_runs(0.02), options)[0].effects[pairs]

    assert 0.77 <= share_found(replace(options, max_pairs=pairs), 0.02, stated) <= 0.90

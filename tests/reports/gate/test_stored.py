"""Comparison with stored runs: the decisions with and without history."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from reports.gate.comparison import CompareOptions
from reports.gate.decide import GateDecision
from reports.gate.side_run import SideRun
from reports.gate.stored import UNKNOWN, OccasionVariation, judge_stored
from reports.pages.comparison_page import metric_sentence

OPTIONS = CompareOptions(shown=())
KNOWN = OccasionVariation(dict.fromkeys(("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms"), 0.02), 20)
DEVICE = {"device class": "2 × cpu", "driver": None}


def runs(random: np.random.Generator, count: int, slowdown: float = 1.0, noise: float = 0.02) -> tuple[SideRun, ...]:
    def one() -> SideRun:
        speed, ttft, tpot = random.normal(0, noise, 3)
        values: dict[str, float | None] = {
            "output_tokens_per_s": 1000 / slowdown * math.exp(speed),
            "ttft_p50_ms": 50 * slowdown * math.exp(ttft),
            "tpot_p50_ms": 20 * slowdown * math.exp(tpot),
            "error_rate": 0.0,
        }
        return SideRun("main", values, identity={"workload hash": "w"}, device=DEVICE)

    return tuple(one() for _ in range(count))


def test_without_history_a_slowdown_is_inconclusive_and_asks_for_pairs() -> None:
    random = np.random.default_rng(1)

    comparison = judge_stored(runs(random, 5), runs(random, 5, 1.3), OPTIONS, UNKNOWN)

    assert comparison.verdict is GateDecision.INCONCLUSIVE
    assert comparison.exit_code == 3
    assert "run the two sides in pairs" in comparison.notes[-1]
    assert {metric.smallest_effect for metric in comparison.gated} == {math.inf}
    assert not any("80 %" in metric_sentence(metric) for metric in comparison.gated)


def test_without_history_equal_runs_pass() -> None:
    random = np.random.default_rng(2)

    comparison = judge_stored(runs(random, 8, noise=0.005), runs(random, 8, noise=0.005), OPTIONS, UNKNOWN)

    assert comparison.verdict is GateDecision.PASS
    assert comparison.size == "8 runs of B against 8 stored runs of A, not interleaved"


def test_with_history_a_large_slowdown_is_a_regression() -> None:
    random = np.random.default_rng(3)

    comparison = judge_stored(runs(random, 8), runs(random, 8, 1.3), OPTIONS, KNOWN)

    assert comparison.verdict is GateDecision.REGRESSION
    assert comparison.exit_code == 1


def test_shifts_between_occasions_seldom_alarm_when_history_records_them() -> None:
    random = np.random.default_rng(4)
    verdicts: Counter[GateDecision] = Counter()

    for _ in range(200):
        a, b = (runs(random, 5, math.exp(random.normal(0, 0.02))) for _ in range(2))
        verdicts[judge_stored(a, b, OPTIONS, KNOWN).verdict] += 1

    assert verdicts[GateDecision.REGRESSION] <= 10


def test_four_stored_runs_are_too_few() -> None:
    random = np.random.default_rng(5)

    comparison = judge_stored(runs(random, 4), runs(random, 5), OPTIONS)

    assert comparison.exit_code == 2
    assert "side A has 4 stored runs but needs 5" in comparison.refusals[0].message


@pytest.mark.parametrize("changed", [{"device class": "1 × NVIDIA H200"}, {"driver": "570.1"}])
def test_runs_of_another_device_or_driver_are_refused(changed: dict[str, str]) -> None:
    random = np.random.default_rng(6)
    elsewhere = tuple(replace(run, device=DEVICE | changed) for run in runs(random, 5))

    comparison = judge_stored(runs(random, 5), elsewhere, OPTIONS)

    assert comparison.exit_code == 2
    assert f"{next(iter(changed))} differs" in comparison.refusals[0].message


def test_invalid_run_of_b_is_refused() -> None:
    random = np.random.default_rng(7)
    [bad] = runs(random, 1)

    comparison = judge_stored(runs(random, 5), (replace(bad, status="invalid", reasons=("late",)),), OPTIONS)

    assert comparison.exit_code == 4

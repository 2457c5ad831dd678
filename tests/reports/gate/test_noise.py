"""Run-to-run noise of one side, and the regressions that comparisons find."""

import math

import pytest

from reports.gate.comparison import CompareOptions
from reports.gate.noise import noise_json, noise_of, noise_sentence, noise_table
from reports.gate.side_run import SideRun

OPTIONS = CompareOptions(gated=("tpot_p50_ms", "error_rate"), shown=("ttft_p50_ms",))


def runs(*tpot: float) -> list[SideRun]:
    return [SideRun("x", {"tpot_p50_ms": each, "error_rate": 0.0, "ttft_p50_ms": None}) for each in tpot]


def test_deviation_is_of_logarithms_and_effects_are_above_the_limit() -> None:
    tpot, errors, ttft = noise_of(runs(20.0, 20.0 * math.exp(0.02), 20.0 * math.exp(0.04)), OPTIONS)

    assert tpot.deviation == pytest.approx(0.02)
    assert tpot.effects[12] > 0.03
    assert errors.deviation == 0
    assert ttft.deviation is None


def test_sentence_states_the_regression_and_warns_of_high_noise() -> None:
    quiet, noisy = (noise_of(runs(*values), OPTIONS) for values in ((20.0, 20.1, 20.2), (20.0, 24.0, 22.0)))

    assert noise_sentence(quiet, OPTIONS) == (
        "With 12 pairs, 80 % of comparisons find a regression of this size: TPOT p50 3.2 %."
    )
    assert "more than 1.5 times the smallest effect of interest (3 %)" in noise_sentence(noisy, OPTIONS)


def test_table_and_json_have_a_row_per_metric() -> None:
    found = noise_of(runs(20.0, 21.0), OPTIONS)

    assert list(noise_table(found)["metric"]) == ["TPOT p50, ms", "Failed, %", "TTFT p50, ms"]
    assert noise_json("x", runs(20.0, 21.0), found)["metrics"]["ttft_p50_ms"]["deviation"] is None

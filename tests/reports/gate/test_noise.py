"""Run-to-run noise of one side, and the effects that pairs detect."""

import math

import pytest

from reports.gate.compare import CompareOptions
from reports.gate.noise import noise_json, noise_of, noise_sentence, noise_table
from reports.gate.side_run import SideRun

OPTIONS = CompareOptions(gated=("tpot_p50_ms", "error_rate"), shown=("ttft_p50_ms",))


def runs(*tpot: float) -> list[SideRun]:
    return [SideRun("x", {"tpot_p50_ms": each, "error_rate": 0.0, "ttft_p50_ms": None}) for each in tpot]


def test_deviation_is_of_logarithms_and_effects_follow_their_formula() -> None:
    tpot, errors, ttft = noise_of(runs(20.0, 20.0 * math.exp(0.02), 20.0 * math.exp(0.04)), OPTIONS)

    assert tpot.deviation == pytest.approx(0.02)
    assert tpot.effects[8] == pytest.approx(
        math.expm1((1.8946 + 0.8960) * math.sqrt(2) * 0.02 / math.sqrt(8)), abs=1e-4
    )
    assert errors.deviation == 0
    assert ttft.deviation is None


def test_sentence_names_the_metrics_that_the_gate_cannot_detect() -> None:
    quiet, noisy = (noise_of(runs(*values), OPTIONS) for values in ((20.0, 20.1, 20.2), (20.0, 24.0, 22.0)))

    assert noise_sentence(quiet, OPTIONS) == "12 pairs detect a change of 3 % in every gated metric."
    assert noise_sentence(noisy, OPTIONS).startswith(
        "12 pairs do not detect a change of 3 %. The smallest change that they detect: tpot_p50"
    )


def test_table_and_json_have_a_row_per_metric() -> None:
    found = noise_of(runs(20.0, 21.0), OPTIONS)

    assert list(noise_table(found)["metric"]) == ["tpot_p50_ms", "error_rate", "ttft_p50_ms"]
    assert noise_json("x", runs(20.0, 21.0), found)["metrics"]["ttft_p50_ms"]["deviation"] is None

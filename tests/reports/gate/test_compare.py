"""The gate's decisions on simulated metrics, and its refusals."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.gate.compare import judge, metrics_needed
from reports.gate.comparison import DEFAULT_GATED, CompareOptions, Comparison, MetricResult
from reports.gate.decide import GateDecision
from reports.gate.requirements import Requirement
from reports.gate.side_run import Pair, SideRun
from reports.metrics.summary import summarize
from tests.support.samples.gate_side import side
from tests.support.samples.sample_run import SampleLoad, sample_run

NOISE = 0.04
GATED_ONLY = CompareOptions(shown=())


def drawn(random: np.random.Generator, slowdown: float, noise: float = NOISE, failures: float = 0.004) -> SideRun:
    """A run with independent log-normal noise on each metric, and 500 requests that fail at random."""
    speed, ttft, tpot = random.normal(0, noise, 3)
    return side(
        output_tokens_per_s=1000 / slowdown * math.exp(speed),
        ttft_p50_ms=50 * slowdown * math.exp(ttft),
        tpot_p50_ms=20 * slowdown * math.exp(tpot),
        error_rate=random.binomial(500, failures) / 500,
    )


def gate(
    random: np.random.Generator, slowdown: float, options: CompareOptions = GATED_ONLY
) -> tuple[GateDecision, int]:
    """A sequential comparison: draws pairs until every metric is decided."""
    pairs: list[Pair] = []
    while True:
        pairs.append(Pair(drawn(random, 1.0), drawn(random, slowdown)))
        if len(pairs) < options.min_pairs:
            continue
        comparison = judge(pairs, options)
        if comparison.is_decided or len(pairs) == options.max_pairs:
            return comparison.verdict, len(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, 200])
def test_tuning_12_5_at_most_5_percent_false_alarms_in_comparisons_of_equal_servers(count: int) -> None:
    random = np.random.default_rng(11)

    verdicts = Counter(gate(random, 1.0)[0] for _ in range(count))

    assert verdicts[GateDecision.REGRESSION] <= count // 20


@pytest.mark.parametrize("count", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_tuning_12_5_a_ten_percent_slowdown_is_detected_in_95_percent(count: int) -> None:
    random = np.random.default_rng(12)

    verdicts = Counter(gate(random, 1.1)[0] for _ in range(count))

    assert verdicts[GateDecision.REGRESSION] >= 0.95 * count


def test_small_noise_and_a_large_effect_need_few_pairs() -> None:
    random = np.random.default_rng(13)
    pairs = [Pair(drawn(random, 1.0, 0.005, 0.0), drawn(random, 1.2, 0.005, 0.0)) for _ in range(4)]

    comparison = judge(pairs, GATED_ONLY)

    assert comparison.is_decided
    assert comparison.verdict is GateDecision.REGRESSION
    assert comparison.exit_code == 1


def test_equal_runs_pass() -> None:
    comparison = judge([Pair(side("a"), side("b"))] * 4)

    assert (comparison.label_a, comparison.label_b) == ("a", "b")
    assert comparison.verdict is GateDecision.PASS
    assert comparison.exit_code == 0


def result(comparison: Comparison, name: str) -> MetricResult:
    return next(metric for metric in comparison.metrics if metric.name == name)


def pairs_of(name: str, ratios: list[float]) -> list[Pair]:
    base = side().values[name]
    assert base is not None
    return [Pair(side(), side(**{name: base * ratio})) for ratio in ratios]


def test_improvement_is_reported_and_passes() -> None:
    comparison = judge(pairs_of("tpot_p50_ms", [0.90, 0.91, 0.89, 0.90, 0.90]), GATED_ONLY)

    assert result(comparison, "tpot_p50_ms").decision is GateDecision.IMPROVEMENT
    assert comparison.verdict is GateDecision.IMPROVEMENT
    assert comparison.exit_code == 0


def test_significant_effect_below_the_smallest_effect_of_interest_is_no_regression() -> None:
    ratios = [1.019, 1.021, 1.020, 1.020]

    assert judge(pairs_of("tpot_p50_ms", ratios), GATED_ONLY).verdict is GateDecision.PASS
    assert GATED_ONLY.limit("tpot_p50_ms") == pytest.approx(math.log(1.03))
    assert CompareOptions(min_effect=0.01).limit("tpot_p50_ms") == pytest.approx(math.log(1.03))


def test_slower_is_worse_for_rates_and_for_latencies() -> None:
    slower = judge(pairs_of("output_tokens_per_s", [0.90, 0.91, 0.89, 0.90]), GATED_ONLY)
    faster = judge(pairs_of("output_tokens_per_s", [1.10, 1.11, 1.09, 1.10]), GATED_ONLY)

    assert slower.verdict is GateDecision.REGRESSION
    assert result(slower, "output_tokens_per_s").change.value == pytest.approx(-10, abs=0.1)
    assert faster.verdict is GateDecision.IMPROVEMENT


def test_error_rate_is_judged_in_absolute_points() -> None:
    few = [Pair(side(), side(error_rate=0.002 + 0.0001 * (i % 2))) for i in range(4)]
    many = [Pair(side(), side(error_rate=0.012 + 0.0001 * (i % 2))) for i in range(4)]

    assert judge(few, GATED_ONLY).verdict is GateDecision.PASS
    worse = judge(many, GATED_ONLY)
    assert worse.verdict is GateDecision.REGRESSION
    assert result(worse, "error_rate").change.value == pytest.approx(1.205)
    assert result(worse, "error_rate").change_unit == "points"


def test_noisy_pairs_are_inconclusive_with_the_effect_they_could_detect() -> None:
    comparison = judge(pairs_of("ttft_p50_ms", [0.8, 1.3, 1.1, 0.9]), GATED_ONLY)

    assert comparison.verdict is GateDecision.INCONCLUSIVE
    assert not comparison.is_decided
    assert comparison.exit_code == 3
    assert result(comparison, "ttft_p50_ms").smallest_effect > 50


@pytest.mark.parametrize(("choice", "code"), [("report", 3), ("pass", 0), ("fail", 1)])
def test_inconclusive_returns_the_chosen_exit_code(choice: str, code: int) -> None:
    options = CompareOptions(shown=(), inconclusive=choice)

    comparison = judge(pairs_of("ttft_p50_ms", [0.8, 1.3, 1.1, 0.9]), options)

    assert comparison.verdict is GateDecision.INCONCLUSIVE
    assert comparison.exit_code == code


def test_fewer_pairs_than_the_first_look_decide_nothing() -> None:
    assert judge(pairs_of("tpot_p50_ms", [1.5, 1.5, 1.5]), GATED_ONLY).verdict is GateDecision.INCONCLUSIVE


def test_the_first_decision_is_final() -> None:
    early = [1.2, 1.21, 1.19, 1.2]

    comparison = judge(pairs_of("tpot_p50_ms", [*early, 0.8, 0.8, 0.8]), GATED_ONLY)

    assert result(comparison, "tpot_p50_ms").decision is GateDecision.REGRESSION
    assert result(comparison, "tpot_p50_ms").change.value == pytest.approx(20, abs=0.1)


def test_fixed_number_of_pairs_is_one_look() -> None:
    assert CompareOptions(pairs=6).looks == (6,)
    assert judge(pairs_of("tpot_p50_ms", [1.2] * 5), CompareOptions(pairs=6)).verdict is GateDecision.INCONCLUSIVE


def test_invalid_run_is_refused_with_its_reasons() -> None:
    bad = replace(side("b"), status="invalid", reasons=("12 requests completed in the window, 30 are needed",))

    comparison = judge([Pair(side("a"), bad)])

    assert comparison.verdict is GateDecision.NOT_MEASURED
    assert comparison.exit_code == 4
    assert "pair 1, B (b) is invalid: 12 requests completed" in comparison.refusals[0].message


def test_unlike_runs_are_refused_unless_the_difference_is_allowed_by_name() -> None:
    a, b = (replace(side(), identity={"workload hash": name, "model": "m"}) for name in ("w1", "w2"))

    refused = judge([Pair(a, b)] * 4)
    allowed = judge([Pair(a, b)] * 4, CompareOptions(allow=frozenset({"workload hash"})))

    assert refused.exit_code == 2
    assert "workload hash differs: w1 in pair 1, A; w2 in pair 1, B" in refused.refusals[0].message
    assert allowed.verdict is GateDecision.PASS
    assert allowed.notes == ("workload hash differs: w1 in pair 1, A; w2 in pair 1, B (allowed)",)


def test_runs_of_different_models_are_refused_also_for_servers_without_info() -> None:
    sides = []
    for model in ("m1", "m2"):
        run = sample_run(SampleLoad(mode="closed", duration_s=20))
        run.manifest.target |= {"info": {}, "model": model}
        sides.append(SideRun.of(run.manifest, summarize(run), metrics_needed(CompareOptions())))

    refused = judge([Pair(*sides)] * 4)

    assert refused.exit_code == 2
    assert "model differs: m1 in pair 1, A; m2 in pair 1, B" in refused.refusals[0].message


def test_degraded_run_counts_and_is_noted() -> None:
    comparison = judge([Pair(side(), replace(side("b"), status="degraded", reasons=("cpu",)))] * 4)

    assert comparison.verdict is GateDecision.PASS
    assert comparison.notes[0] == "pair 1, B (b) is degraded: cpu"


def test_missing_metric_is_not_measured() -> None:
    comparison = judge([Pair(side(), side(ttft_p50_ms=None))] * 4, GATED_ONLY)

    assert result(comparison, "ttft_p50_ms").decision is GateDecision.NOT_MEASURED
    assert comparison.exit_code == 4


def test_missed_requirement_fails_a_passing_comparison() -> None:
    options = CompareOptions(shown=(), require=("ttft_p50_ms < 40", "error_rate <= 0.01"))

    comparison = judge([Pair(side(), side())] * 4, options)

    assert comparison.verdict is GateDecision.PASS
    assert [(str(each.requirement), each.is_met) for each in comparison.requirements] == [
        ("ttft_p50_ms < 40", False),
        ("error_rate <= 0.01", True),
    ]
    assert comparison.exit_code == 1
    assert "ttft_p50_ms" in metrics_needed(options)
    with pytest.raises(ValueError, match="not a requirement"):
        Requirement.parse("ttft is fast")


def test_side_is_read_from_a_stored_run() -> None:
    run = sample_run(SampleLoad(mode="closed", duration_s=20))
    summary = summarize(run)

    found = SideRun.of(run.manifest, summary, metrics_needed(CompareOptions()))

    assert found.values["output_tokens_per_s"] == summary["rates"]["output_tokens_per_s"]["value"]
    assert found.identity["model"] == "preset:tiny-llama"
    assert set(DEFAULT_GATED) <= set(found.values)
    assert judge([Pair(found, found)] * 4).verdict is GateDecision.PASS


RATIOS = st.lists(st.floats(0.5, 2.0), min_size=4, max_size=12)


@settings(max_examples=30)
@given(RATIOS)
def test_swapped_sides_are_never_both_a_regression(ratios: list[float]) -> None:
    there = judge(pairs_of("tpot_p50_ms", ratios), GATED_ONLY)
    back = judge(pairs_of("tpot_p50_ms", [1 / ratio for ratio in ratios]), GATED_ONLY)

    assert not (there.verdict is GateDecision.REGRESSION and back.verdict is GateDecision.REGRESSION)


@settings(max_examples=30)
@given(RATIOS, st.floats(0.01, 100))
def test_units_do_not_matter(ratios: list[float], scale: float) -> None:
    pairs = pairs_of("tpot_p50_ms", ratios)
    scaled = [Pair(side(tpot_p50_ms=20 * scale), side(tpot_p50_ms=20 * scale * ratio)) for ratio in ratios]

    assert judge(pairs, GATED_ONLY).verdict is judge(scaled, GATED_ONLY).verdict


def test_pages_2_the_change_in_the_last_pair_and_the_mean_of_all_are_two_numbers():
    """The 97.5 % quantile of Student's t with 2 degrees of freedom is 4.302653."""
    pairs = [Pair(side(), side(ttft_p50_ms=50 * factor)) for factor in (1.02, 1.04, 1.09)]
    found = next(each for each in judge(pairs, GATED_ONLY).metrics if each.name == "ttft_p50_ms")

    assert found.last_change == pytest.approx(9.0)
    assert found.running_change.value == pytest.approx(100 * ((1.02 * 1.04 * 1.09) ** (1 / 3) - 1))
    d = [math.log(factor) for factor in (1.02, 1.04, 1.09)]
    half = 4.302653 * float(np.std(d, ddof=1)) / math.sqrt(3)
    assert found.running_change.hi == pytest.approx(100 * math.expm1(sum(d) / 3 + half), rel=1e-5)
    assert found.running_change.lo == pytest.approx(100 * math.expm1(sum(d) / 3 - half), rel=1e-5)


def test_a_throughput_that_fell_is_a_negative_change():
    pairs = [Pair(side(), side(output_tokens_per_s=900.0))]
    found = next(each for each in judge(pairs, GATED_ONLY).metrics if each.name == "output_tokens_per_s")

    assert found.last_change == pytest.approx(-10.0)

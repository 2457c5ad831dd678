"""Quantiles, intervals and tests of stationarity against literal values and properties."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.stats import bootstrap, estimators
from reports.stats.estimators import PERCENTILES

FINITE = st.floats(min_value=0, max_value=1e6)


def test_percentiles_interpolate_between_order_statistics() -> None:
    values = np.array([4.0, 1.0, 3.0, 2.0])

    assert [estimators.quantile(values, p) for p in (0.0, 50.0, 90.0)] == [1.0, 2.5, pytest.approx(3.7)]
    assert math.isnan(estimators.quantile(np.array([]), 50.0))


@settings(max_examples=40)
@given(st.lists(FINITE, min_size=1, max_size=60))
def test_percentiles_are_monotone_and_inside_the_sample(values: list[float]) -> None:
    found = [estimators.quantile(np.array(values), p) for p in PERCENTILES]

    assert all(a <= b + 1e-9 * max(1.0, abs(b)) for a, b in itertools.pairwise(found))
    assert min(values) <= found[0] <= found[-1] <= max(values) + 1e-9


@pytest.mark.parametrize(("percentile", "needed"), [(50.0, 6), (90.0, 36), (95.0, 72), (99.0, 368), (99.9, 3688)])
def test_metrics_7_percentile_needs_this_many_values(percentile: float, needed: int) -> None:
    assert not estimators.is_supported(percentile, needed - 1)
    assert estimators.is_supported(percentile, needed)


def test_failures_raise_percentiles_and_finally_to_infinity() -> None:
    values = np.arange(1.0, 10.0)

    assert estimators.adjusted_quantile(values, 0, 50.0) == 5.0
    assert estimators.adjusted_quantile(values, 1, 50.0) == 5.5
    assert estimators.adjusted_quantile(values, 1, 90.0) is None
    assert estimators.adjusted_quantile(values, 9, 50.0) is None
    assert estimators.adjusted_quantile(np.array([]), 3, 50.0) is None


@settings(max_examples=40)
@given(st.lists(FINITE, min_size=1, max_size=40), st.integers(0, 40), st.sampled_from(PERCENTILES))
def test_adjusted_percentile_is_the_percentile_with_infinities(values: list[float], failures: int, p: float) -> None:
    found = estimators.adjusted_quantile(np.array(values), failures, p)

    if found is None:
        assert failures > 0
    else:
        padded = np.array([*values, *[1e30] * failures])
        assert found == pytest.approx(np.quantile(padded, p / 100), rel=1e-9, abs=1e-9)


def test_bootstrap_interval_of_a_median_has_about_its_nominal_coverage() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(100):
        values = random.exponential(size=150)
        [found] = bootstrap.bootstrap_percentiles(values, np.ones(150, dtype=np.int64), 6, (50.0,), resamples=400)
        covered += found.lo <= math.log(2) <= found.hi

    assert 88 <= covered <= 99


def test_bootstrap_of_dependent_values_is_wider_than_of_the_same_values_shuffled() -> None:
    random = np.random.default_rng(2)
    values = np.repeat(random.exponential(size=60), 10)
    ones = np.ones(600, dtype=np.int64)

    [dependent] = bootstrap.bootstrap_percentiles(values, ones, 1, (50.0,))
    [shuffled] = bootstrap.bootstrap_percentiles(random.permutation(values), ones, 1, (50.0,))

    assert dependent.hi - dependent.lo > 2 * (shuffled.hi - shuffled.lo)


def test_block_of_an_autoregressive_series_is_the_published_optimum() -> None:
    """(1.5 (G / D)^2 n)^(1/3) with G = 2 rho / (1 - rho)^2 and D = (1 + rho) / (1 - rho): 27.7 for rho = 0.5."""
    noise = np.random.default_rng(4).normal(size=8_000)
    series = np.convolve(noise, 0.5 ** np.arange(60))[: len(noise)]

    assert 22 <= bootstrap.choose_block(series, 1) <= 34


def test_few_blocks_widen_an_interval_by_the_published_critical_values() -> None:
    """Bartlett's critical values (Kiefer and Vogelsang, 2005): 4.813 for one block, 2.566 for blocks of a fifth."""
    series = np.arange(20.0)

    assert bootstrap.interval_inflation(series, 20) == pytest.approx(4.813 / 1.96, rel=1e-3)
    assert bootstrap.interval_inflation(series, 4) == pytest.approx(2.566 / 1.96, rel=1e-3)
    longer = np.random.default_rng(6).normal(size=400)
    assert bootstrap.interval_inflation(longer, 80) >= 2.566 / 1.96


def test_bootstrap_interval_of_a_mean_is_two_standard_errors_on_each_side() -> None:
    values = np.random.default_rng(5).normal(size=2_000)
    found = bootstrap.bootstrap_mean(values, np.ones(2_000, dtype=np.int64), 1)

    for side in (found.hi - found.value, found.value - found.lo):
        assert side == pytest.approx(1.96 * values.std() / math.sqrt(2_000), rel=0.1)


def test_pooled_series_is_resampled_by_request() -> None:
    values = np.concatenate([np.full(100, level) for level in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)])

    [median] = bootstrap.bootstrap_percentiles(values, np.full(6, 100, dtype=np.int64), 1, (50.0,))

    assert median.value == 3.5
    assert median.lo < 2.5
    assert median.hi > 4.5


@settings(max_examples=40)
@given(st.lists(FINITE, min_size=3, max_size=50), st.integers(1, 5))
def test_bootstrap_interval_contains_the_value_and_stays_in_the_sample(values: list[float], block: int) -> None:
    sizes = np.ones(len(values), dtype=np.int64)
    block = min(block, len(values))

    for found in bootstrap.bootstrap_percentiles(np.array(values), sizes, block, (50.0, 99.0), resamples=50):
        assert min(values) - 1e-9 <= found.lo <= found.value <= found.hi <= max(values) + 1e-9


def test_bootstrap_of_a_grid_agrees_with_plain_resampling() -> None:
    random = np.random.default_rng(3)
    values = random.lognormal(size=3000)

    [found] = bootstrap.bootstrap_percentiles(values, np.ones(3000, dtype=np.int64), 1, (95.0,))

    draws = [np.quantile(values[random.integers(0, 3000, 3000)], 0.95) for _ in range(1000)]
    lo, hi = np.quantile(draws, (0.025, 0.975))
    assert found.lo == pytest.approx(lo, rel=0.02)
    assert found.hi == pytest.approx(hi, rel=0.02)


def test_block_is_the_concurrency_within_bounds() -> None:
    assert bootstrap.block_length(1000, 3.0) == 10
    assert bootstrap.block_length(1000, 64.0) == 64
    assert bootstrap.block_length(1000, 63.2) == 64
    assert bootstrap.block_length(30, 64.0) == 10
    assert bootstrap.block_length(1, 64.0) == 1


def test_wilson_against_published_values() -> None:
    found = estimators.wilson(81, 263)

    assert (found.lo, found.hi) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))
    assert estimators.wilson(0, 10).lo == 0.0
    assert estimators.wilson(10, 10).hi == 1.0


@settings(max_examples=40)
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_is_inside_the_unit_interval_around_the_proportion(pair: tuple[int, int]) -> None:
    found = estimators.wilson(*pair)

    assert 0 <= found.lo <= found.value <= found.hi <= 1


def test_student_interval_of_batch_means() -> None:
    found = estimators.mean_interval(np.array([9.0, 10.0, 11.0]))

    assert found.value == 10.0
    assert found.hi - found.value == pytest.approx(4.302652729911275 / math.sqrt(3))
    assert math.isnan(estimators.mean_interval(np.array([1.0])).lo)


def test_slope_of_a_line_is_exact() -> None:
    x = np.arange(20.0)

    found = estimators.newey_west_slope(x, 3 + 2 * x)

    assert found is not None
    assert found.value == pytest.approx(2.0)
    assert found.lo > 0
    assert estimators.newey_west_slope(x[:5], x[:5]) is None


def test_newey_west_errors_of_independent_noise_are_those_of_least_squares() -> None:
    random = np.random.default_rng(6)
    x = np.linspace(0, 1, 4000)

    found = estimators.newey_west_slope(x, random.normal(size=4000))

    assert found is not None
    assert found.hi - found.value == pytest.approx(1.96 / math.sqrt(4000 / 12), rel=0.08)


def test_slopes_error_weighs_lags_by_bartletts_kernel() -> None:
    x = np.arange(100.0)
    y = np.random.default_rng(2).normal(size=100)
    centred = x - x.mean()
    scores = centred * (y - y.mean() - (centred @ y) / (centred @ centred) * centred)
    # Scores without positive correlation take the usual four lags at a hundred points.
    lag = np.abs(np.subtract.outer(np.arange(100), np.arange(100)))
    variance = scores @ np.maximum(0.0, 1 - lag / 5) @ scores * 100 / 98

    found = estimators.newey_west_slope(x, y)

    assert scores[1:] @ scores[:-1] < 0
    assert found is not None
    assert (found.hi - found.lo) / 2 == pytest.approx(1.984467 * math.sqrt(variance) / (centred @ centred), rel=1e-5)


def test_slope_of_correlated_noise_is_seldom_significant() -> None:
    random = np.random.default_rng(7)
    alarms = 0
    for _ in range(200):
        noise = np.convolve(random.normal(size=210), np.ones(10) / 10, mode="valid")[:200]
        found = estimators.newey_west_slope(np.arange(200.0), noise)
        alarms += found is not None and (found.lo > 0 or found.hi < 0)

    assert alarms < 45  # least squares that takes the noise for independent: 114


def test_merged_neighbours_hardly_change_the_interval_of_a_long_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(3).exponential(size=4_000)
    ones = np.ones(4_000, dtype=np.int64)
    [alone] = bootstrap.bootstrap_percentiles(values, ones, 16, (90.0,))
    monkeypatch.setattr(bootstrap, "MAX_UNITS", 500)

    [together] = bootstrap.bootstrap_percentiles(values, ones, 16, (90.0,))

    assert together.value == alone.value
    assert together.hi - together.lo == pytest.approx(alone.hi - alone.lo, rel=0.1)

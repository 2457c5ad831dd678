"""The deviation of slice pairs: noise without drift, and drift between the slices of a pair."""

import numpy as np
import pytest

from benchmarks.reports.slice_length import pair_deviation


def test_arrivals_without_drift_have_the_deviation_of_two_poisson_counts() -> None:
    times_s = np.sort(np.random.default_rng(1).uniform(0, 1_000, 100_000))

    for length_s, overhead_s in ((0.5, 0.0), (2.0, 2.0)):
        expected = np.sqrt(2 / (100 * length_s))
        assert pair_deviation(times_s, length_s, overhead_s) == pytest.approx(expected, rel=0.1)


def test_a_longer_overhead_lets_a_drift_into_the_difference() -> None:
    seconds = np.arange(400)
    rates = np.where(seconds // 10 % 2, 80, 120)
    times_s = np.concatenate(
        [start + (np.arange(rate) + 0.5) / rate for start, rate in zip(seconds, rates, strict=True)]
    )

    near, far = pair_deviation(times_s, 1.0, 0.0), pair_deviation(times_s, 1.0, 4.0)

    assert near is not None
    assert far is not None
    assert far > 1.5 * near


def test_a_run_that_is_too_short_for_four_pairs_has_none() -> None:
    assert pair_deviation(np.arange(0, 7.0, 0.1), 1.0, 0.0) is None

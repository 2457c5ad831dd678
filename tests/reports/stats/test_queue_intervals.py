"""The support of an interval: how many requests a percentile needs if they depend on each other."""

import numpy as np
import pytest

from reports.stats.dependence import Dependence
from reports.stats.fraction_intervals import fraction
from reports.stats.queue_intervals import MIN_LIFETIMES, QueueSeries, lifetimes


@pytest.mark.parametrize(
    ("percentile", "needed"),
    [
        # 40 independent requests of 1,000: p90 needs 0.75 * 36 of them, p95 0.7 * 72, p99 1.5 * 368.
        (50.0, None),
        (90.0, None),
        (95.0, 1260),
        (99.0, 13_800),
    ],
)
def test_trust_W3_support_counts_independent_requests(percentile: float, needed: int | None) -> None:
    dependence = Dependence(count=1000, own=10.0, state=25.0, both=25.0)

    assert dependence.effective == 40
    assert dependence.needed_for(percentile) == needed


def test_trust_W3_support_counts_the_dependence_of_the_series_itself() -> None:
    """1.2 * 72 requests that are independent by the series alone; the queue as a whole would need fewer."""
    dependence = Dependence(count=1000, own=25.0, state=2.0, both=25.0)

    assert dependence.needed_for(95.0) == 2160


def test_trust_W3_as_many_requests_that_do_not_depend_on_each_other_support_the_percentile() -> None:
    assert Dependence(count=1000, own=1.0, state=1.0, both=1.0).needed_for(99.0) is None
    assert Dependence(count=300, own=1.0, state=1.0, both=1.0).needed_for(99.0) == 368


def test_trust_W4_a_fraction_without_a_miss_has_the_dependence_of_the_queue() -> None:
    """The indicator is constant and shows no dependence; 1,000 requests of a queue have the information of 38."""
    queue = Dependence(count=1000, own=1.0, state=10.0, both=10.0)
    independent = Dependence(count=1000, own=1.0, state=1.0, both=1.0)
    met = np.ones(1000, dtype=np.bool_)

    assert fraction(met, queue).interval.lo == pytest.approx(0.884, abs=0.005)
    assert fraction(met, independent).interval.lo == pytest.approx(0.996, abs=0.001)


def test_trust_C1_the_time_of_long_requests_is_weighted_by_its_square() -> None:
    """99 requests of 1 s and one of 99 s: (99 + 99 ** 3) / (99 + 99 ** 2) = 98.02 s, 50 times the mean."""
    served_s = np.array([1.0] * 99 + [99.0])

    assert lifetimes(np.arange(100.0), served_s) == pytest.approx(99 / 98.02)
    assert lifetimes(np.array([]), np.array([])) == float("inf")


def test_trust_C1_requests_of_similar_length_have_no_heavy_tail() -> None:
    served_s = np.random.default_rng(1).exponential(1.0, 300)

    assert lifetimes(np.arange(300.0), served_s) == float("inf")


def test_trust_C1_a_run_of_a_few_lifetimes_has_no_interval_of_dependent_latencies() -> None:
    waves = 1 + np.sin(np.arange(4_000) / 10)
    short, long = (QueueSeries.of(waves, lifetimes=times) for times in (MIN_LIFETIMES / 2, MIN_LIFETIMES))

    assert long.mean().is_supported
    assert long.percentile(50.0).is_supported
    assert (short.mean().needed, short.percentile(50.0).needed) == (8_000, 8_000)


def test_trust_C1_a_heavy_tail_has_a_longer_upper_side() -> None:
    waves = 1 + np.sin(np.arange(4_000) / 10)
    usual, heavy = (QueueSeries.of(waves, lifetimes=times).mean().interval for times in (np.inf, 2 * MIN_LIFETIMES))

    assert heavy.lo == usual.lo
    assert heavy.hi - heavy.value == pytest.approx(1.5 * (usual.hi - usual.value))


def test_trust_W3_the_upper_bound_of_a_percentile_may_exceed_the_largest_value() -> None:
    """A run in which the queue was short by chance has not seen the largest waits."""
    waves = 1 + np.sin(np.arange(4_000) / 10)
    independent = np.random.default_rng(1).permutation(waves)

    bounds = QueueSeries.of(waves).percentile(95.0).interval

    assert bounds.lo < bounds.value < waves.max() < bounds.hi
    assert QueueSeries.of(independent).percentile(95.0).interval.hi <= waves.max()


def test_trust_C1_independent_latencies_need_no_lifetimes() -> None:
    independent = np.random.default_rng(1).exponential(1.0, 1_000)

    assert QueueSeries.of(independent, lifetimes=0.1).mean().is_supported

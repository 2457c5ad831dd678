"""The coverage of 95 % intervals over simulated series of known dependence."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from reports.stats.bootstrap import (
    block_length,
    bootstrap_mean,
    bootstrap_percentiles,
    choose_block,
    interval_inflation,
)
from reports.stats.estimators import Interval, autocovariance, mean_interval

Array = npt.NDArray[np.float64]
COUNT = 1_500
CONCURRENCY = 8


def autoregressive(random: np.random.Generator, count: int) -> Array:
    """Log-normal latencies whose logarithms follow an AR(1) process with a correlation of 0.6."""
    noise = random.standard_normal(count + 100) * math.sqrt(1 - 0.6**2)
    return np.exp(0.5 * np.convolve(noise, 0.6 ** np.arange(60))[100 : count + 100])


def bursts(random: np.random.Generator, count: int) -> Array:
    """Bursts of five requests on average; a burst has a common level, like requests in one queue."""
    sizes = random.geometric(0.2, count)
    levels = np.repeat(random.exponential(size=count), sizes)[:count]
    return levels + 0.3 * random.exponential(size=count)


def overlapping(random: np.random.Generator, count: int) -> Array:
    """Each request has the mean load of the last eight, so successive requests are correlated."""
    load = random.exponential(size=count + CONCURRENCY)
    return np.convolve(load, np.ones(CONCURRENCY) / CONCURRENCY, "valid")[:count] + 0.2 * random.exponential(size=count)


PROCESSES = (autoregressive, bursts, overlapping)


def intervals(values: Array, resamples: int) -> dict[str, Interval]:
    ones, block = np.ones(len(values), dtype=np.int64), block_length(len(values), CONCURRENCY)
    p50, p90 = bootstrap_percentiles(values, ones, block, (50.0, 90.0), resamples)
    return {"p50": p50, "p90": p90, "mean": bootstrap_mean(values, ones, block, resamples)}


def covered(process: Callable[[np.random.Generator, int], Array], repeats: int, resamples: int) -> list[bool]:
    whole = process(np.random.default_rng(10**6), 2_000_000)
    truth = {"p50": np.quantile(whole, 0.5), "p90": np.quantile(whole, 0.9), "mean": whole.mean()}
    return [
        bool(found.lo <= truth[name] <= found.hi)
        for seed in range(repeats)
        for name, found in intervals(process(np.random.default_rng(seed), COUNT), resamples).items()
    ]


@pytest.mark.slow
def test_metrics_12_intervals_of_dependent_requests_cover_the_truth_in_95_percent() -> None:
    held = [each for process in PROCESSES for each in covered(process, repeats=50, resamples=200)]

    assert len(held) == 450
    assert 0.92 <= np.mean(held) <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES)
def test_metrics_12_intervals_of_each_process_cover_the_truth(
    process: Callable[[np.random.Generator, int], Array],
) -> None:
    held = np.array(covered(process, repeats=600, resamples=600)).reshape(-1, 3)

    assert ((held.mean(axis=0) >= 0.92) & (held.mean(axis=0) <= 0.98)).all(), held.mean(axis=0)


def test_metrics_12_batch_means_of_dependent_events_cover_the_truth() -> None:
    truth = float(autoregressive(np.random.default_rng(10**6), 2_000_000).mean())
    found = [
        mean_interval(autoregressive(np.random.default_rng(seed), 2_000).reshape(20, 100).mean(axis=1))
        for seed in range(600)
    ]

    assert 0.92 <= np.mean([each.lo <= truth <= each.hi for each in found]) <= 0.98


def test_independent_values_need_no_longer_blocks_and_no_inflation() -> None:
    values = np.random.default_rng(1).exponential(size=2_000)

    assert choose_block(values, 13) == 13
    assert interval_inflation(values, 13) < 1.06


def test_blocks_shorter_than_the_dependence_inflate_the_interval() -> None:
    values = autoregressive(np.random.default_rng(1), 2_000)

    assert interval_inflation(values, 2) > 1.2 * interval_inflation(values, 200)


def test_autocovariance_is_the_sum_of_products() -> None:
    values = np.random.default_rng(1).exponential(size=50)
    centred = values - values.mean()

    found = autocovariance(values)

    assert found[0] == pytest.approx(np.var(values))
    assert found[3] == pytest.approx(centred[3:] @ centred[:-3] / 50)


def test_constant_and_short_series_have_the_minimum_block() -> None:
    assert choose_block(np.ones(100), 4) == 4
    assert choose_block(np.arange(12.0), 2) == 2
    assert interval_inflation(np.ones(100), 4) < 1.1

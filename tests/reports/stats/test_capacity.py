"""The fitted attainment over load, and the interval of the capacity."""

import math

import numpy as np
import pytest

from reports.stats.capacity import Capacity, RunEvidence
from reports.stats.capacity_fit import CapacityFit, LoadShare
from reports.stats.dependence import Dependence
from reports.stats.fraction_intervals import fraction, pooled_fraction

TARGET = 0.95
LOADS = (8.0, 9.0, 10.0, 11.0, 12.0)


def true_share(load: float) -> float:
    """95 % at a load of 10."""
    return 1 / (1 + math.exp(-math.log(19) + 0.5 * (load - 10)))


def drawn(seed: int, size: int) -> list[LoadShare]:
    generator = np.random.default_rng(seed)
    return [LoadShare(load, generator.binomial(size, true_share(load)) / size, size) for load in LOADS]


def test_trust_F1_the_interval_of_the_curve_covers_the_capacity() -> None:
    found = [fit.capacity for seed in range(200) if (fit := CapacityFit.of(drawn(seed, 500), TARGET)) is not None]

    assert np.mean([each.lo <= 10 <= each.hi for each in found]) >= 0.93


def test_trust_F1_many_short_runs_do_not_move_the_capacity() -> None:
    """Runs with the information of 60 independent requests each. The true curve has a logit of 3 at a load of 10."""
    loads = [8 + 0.1 * step for step in range(40)]
    shares = [1 / (1 + math.exp(-(3 - 0.6 * (load - 10)))) for load in loads]

    fit = CapacityFit.of([LoadShare(load, share, 60) for load, share in zip(loads, shares, strict=True)], 0.95)

    assert fit is not None
    assert fit.capacity.value == pytest.approx(10 + (3 - math.log(19)) / 0.6, rel=0.003)


def test_the_interval_narrows_with_the_requests() -> None:
    few, many = (CapacityFit.of(drawn(1, size), TARGET) for size in (300, 30_000))

    assert few is not None
    assert many is not None
    assert many.capacity.hi - many.capacity.lo < 0.2 * (few.capacity.hi - few.capacity.lo)
    assert many.capacity.value == pytest.approx(10, rel=0.02)


def test_shares_that_do_not_fall_have_no_interval() -> None:
    flat = [LoadShare(load, 0.95, 200.0) for load in LOADS]

    found = CapacityFit.of(flat, TARGET)

    assert found is not None
    assert math.isnan(found.capacity.lo)
    assert CapacityFit.of(flat[:2], TARGET) is None


def test_scatter_around_the_curve_widens_the_interval() -> None:
    smooth = [LoadShare(load, true_share(load), 500.0) for load in LOADS]
    rough = [LoadShare(each.load, min(each.share + (-1) ** i * 0.03, 1.0), 500.0) for i, each in enumerate(smooth)]

    fits = [CapacityFit.of(shares, TARGET) for shares in (smooth, rough)]

    widths = [fit.capacity.hi - fit.capacity.lo for fit in fits if fit is not None]
    assert widths[1] > 1.3 * widths[0]


def test_a_short_run_has_no_share() -> None:
    met = np.ones(19, dtype=np.bool_)

    run = RunEvidence.of(4.0, met, Dependence.of(met.astype(np.float64)), 30.0, False)

    assert not run.has_share
    assert run.requests_for(73) == 73


def test_a_load_is_not_overloaded_if_a_higher_load_met_the_target() -> None:
    rising = RunEvidence(9.0, 0.9, 80.0, 33.0, 800, is_overloaded=True)
    kept = RunEvidence(10.0, 0.99, 200.0, 33.0, 900)

    assert Capacity((rising,), TARGET).overloaded_from == 9.0
    assert math.isinf(Capacity((rising, kept), TARGET).overloaded_from)


def test_trust_W4_search_pooled_runs_add_their_independent_requests() -> None:
    generator = np.random.default_rng(5)
    one, two = (generator.random(400) < 0.9 for _ in range(2))
    states = [Dependence.of(generator.random(400)) for _ in range(2)]

    pooled = pooled_fraction([(one, states[0]), (two, states[1])]).interval

    alone = fraction(one, states[0]).interval
    assert pooled.value == pytest.approx((one.sum() + two.sum()) / 800)
    assert 0.6 < (pooled.hi - pooled.lo) / (alone.hi - alone.lo) < 0.8

"""Intervals of rates against their formula."""

import math

import numpy as np
import pytest

from reports.stats.dependence import Dependence, autocorrelation_time
from reports.stats.rate_intervals import throughput


def test_an_interval_of_independent_gaps_is_students_with_19_degrees_of_freedom() -> None:
    """The batches of this sample show less dependence than its autocorrelation, which therefore decides."""
    count = 2_000
    gaps = np.random.default_rng(7).exponential(size=count)
    rest = 1 - gaps * count / gaps.sum()

    found = throughput(np.concatenate(([0.0], np.cumsum(gaps))), Dependence(count, 1.0, 1.0, 1.0)).interval

    error = 2.093 * rest.std() * math.sqrt(autocorrelation_time(rest) * (1 + 20 / count) / count)
    assert (found.lo, found.hi) == pytest.approx((found.value / (1 + error), found.value / (1 - error)), rel=1e-4)

"""The support of an interval: how many requests a percentile needs if they depend on each other."""

import pytest

from reports.stats.queue_intervals import Dependence


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

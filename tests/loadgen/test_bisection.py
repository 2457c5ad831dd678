import pytest

from loadgen.bisection import Bisection


def search(true_limit, **changes):
    """The loads that are tried for a server which keeps its objectives up to `true_limit`."""
    bisection = Bisection(**{"low": 1, "high": 64, "tolerance": 0.05, "is_whole": True} | changes)
    tried = []
    while (load := bisection.next_load()) is not None:
        tried.append(load)
        bisection.tell(load, is_within=load <= true_limit)
    return bisection, tried


@pytest.mark.parametrize("limit", [1, 2, 7, 20, 63])
def test_users_are_found_to_the_last_one(limit):
    found, tried = search(limit, tolerance=0.001)

    assert (found.within, found.beyond) == (limit, limit + 1)
    assert len(tried) <= 11


def test_rates_are_found_within_the_tolerance():
    found, _ = search(10.3, is_whole=False)

    assert found.within <= 10.3 < found.beyond <= found.within * 1.05


def test_both_ends_are_tried_first():
    assert search(1_000)[1] == [1, 64]
    assert search(0)[1] == [1]

"""Edges of a space: rounding at its bounds, raised bounds, chained comparisons, and combinations that coincide."""

from tuner.space.expression import parse
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace


def test_rounding_stays_above_a_lower_bound_that_is_no_multiple() -> None:
    assert Parameter("p", "int", low=100, high=1000, multiple_of=64).rounded(1) == 128


def test_a_chained_comparison_compares_neighbours() -> None:
    assert not parse("1 < p < 2").evaluate({"p": 3})
    assert parse("3 > p < 4").evaluate({"p": 2})
    assert not parse("1 < p <= 2 < q").evaluate({"p": 2, "q": 2})
    assert not parse("1 < 5 < p").evaluate({"p": 4})


def test_a_grid_has_one_point_for_combinations_that_differ_in_an_inactive_setting() -> None:
    caching = Parameter("caching", "bool")
    size = Parameter("size", "choice", values=(1, 2, 3), when=parse("caching"))

    points = SearchSpace((caching, size)).grid({})

    assert len(points) == 4
    assert points[0] == {"caching": False}

"""The best value of a setting at each load, from rates with known intervals."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from reports.pages.best_by_load import best_by_load, best_sentence, best_table


@dataclass
class Point:
    load: float
    rate: tuple[float, float, float] | None
    is_valid: bool = True
    first: SimpleNamespace = field(init=False)

    def __post_init__(self):
        value, lo, hi = self.rate or (None, None, None)
        self.first = SimpleNamespace(summary={"rates": {"output_tokens_per_s": {"value": value, "lo": lo, "hi": hi}}})


def facet(value, *rates, spread=5.0, **more):
    points = [
        Point(load, rate and (rate, rate - spread, rate + spread), **more)
        for load, rate in zip((1, 4, 16), rates, strict=True)
    ]
    return value, SimpleNamespace(points=points)


def test_drafts_that_pay_at_small_loads_are_named_with_their_gain():
    found = best_by_load(
        [facet("0", 100.0, 300.0, 800.0), facet("4", 150.0, 330.0, 700.0), facet("8", 180.0, 290.0, 500.0)]
    )

    assert [(each.load, each.value) for each in found] == [(1, "8"), (4, "4"), (16, "0")]
    assert [each.gain for each in found] == pytest.approx([0.8, 0.1, 0.0])
    assert best_sentence(found, "speculate", "users") == (
        "Best speculate: 8 at 1 users (up to +80.0 %), 4 at 4 users (up to +10.0 %), 0 at 16 users."
    )
    assert best_table(found, "speculate", "users")["best speculate"].tolist() == ["8", "4", "0"]


def test_a_difference_within_the_intervals_is_no_gain():
    found = best_by_load([facet("0", 100.0, 100.0, 100.0), facet("4", 108.0, 109.9, 111.0)])

    assert [each.value for each in found] == ["0", "0", "4"]


def test_points_that_are_not_valid_are_left_out():
    assert (
        best_by_load([facet("0", None, 100.0, 100.0), facet("4", 500.0, 500.0, 500.0, is_valid=False)])[0].value == "0"
    )
    assert len(best_by_load([facet("0", None, 100.0, 100.0), facet("4", 500.0, 500.0, 500.0)])) == 2

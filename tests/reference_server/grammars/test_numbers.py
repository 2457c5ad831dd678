"""Bounds as digits: every match is within them, and every integer within them matches."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.grammars.numbers import Bounds, integer_regex, number_regex

ends = st.none() | st.integers(-2500, 2500).map(Fraction) | st.fractions(-30, 30, max_denominator=4)


@given(ends, ends, st.booleans(), st.booleans())
def test_integers_match_exactly_within_their_bounds(low, high, no_low, no_high):
    bounds = Bounds(low, high, no_low, no_high)
    regex = integer_regex(bounds)

    for value in edge_values(low, high):
        assert bool(regex and re.fullmatch(regex, str(value))) == is_within(Fraction(value), bounds)


@given(ends, ends, st.booleans(), st.booleans(), st.integers(-9999, 9999), st.integers(0, 4))
def test_numbers_match_only_within_their_bounds(low, high, no_low, no_high, digits, places):
    bounds = Bounds(low, high, no_low, no_high)
    regex = number_regex(bounds)
    text = f"{'-' if digits < 0 else ''}{abs(digits) // 10**places}"
    text += f".{abs(digits) % 10**places:0{places}}" if places else ""

    if regex and re.fullmatch(regex, text):
        assert is_within(Fraction(text), bounds)


@pytest.mark.parametrize(
    ("bounds", "matched", "unmatched"),
    [
        (Bounds(Fraction(0), Fraction(1)), ["0", "0.25", "1", "1.0"], ["-0.5", "1.01", "01"]),
        (Bounds(Fraction(0), Fraction(1), True, True), ["0.25"], ["0", "0.0", "1", "1.0"]),
        (Bounds(Fraction(-3, 2), Fraction(5, 2)), ["-1", "1.75", "2", "-1.0"], ["-1.75", "2.75", "-2"]),
        (Bounds(Fraction(5)), ["5", "5.5", "99.9", "1000"], ["4.9", "-6"]),
        (Bounds(None, Fraction(-2)), ["-2", "-2.5", "-100"], ["-1.5", "2"]),
    ],
)
def test_numbers_between_bounds(bounds: Bounds, matched: list[str], unmatched: list[str]):
    regex = number_regex(bounds)

    assert regex is not None
    assert [text for text in matched + unmatched if re.fullmatch(regex, text)] == matched


def test_no_number_lies_between_bounds_that_cross():
    assert integer_regex(Bounds(Fraction(3), Fraction(2))) is None
    assert number_regex(Bounds(Fraction(1, 4), Fraction(1, 2))) is None


def edge_values(low: Fraction | None, high: Fraction | None) -> set[int]:
    """Around the bounds, around where a digit is gained, and some between."""
    edges = [0, 9, 10, 99, 100, 999, 1000, *(int(bound) for bound in (low, high) if bound is not None)]
    near = {sign * edge + step for sign in (-1, 1) for edge in edges for step in range(-2, 3)}
    return near | set(range(-2600, 2600, 97))


def is_within(value: Fraction, bounds: Bounds) -> bool:
    return (bounds.low is None or value > bounds.low or (value == bounds.low and not bounds.excludes_low)) and (
        bounds.high is None or value < bounds.high or (value == bounds.high and not bounds.excludes_high)
    )

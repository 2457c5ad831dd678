"""Levels of repeated looks, and the effect that pairs can show."""

import math

import pytest

from reports.compare import CompareOptions
from reports.sequential import nominal_level, smallest_effect


def test_repeated_looks_widen_the_bounds() -> None:
    looks = CompareOptions().looks

    assert looks == (4, 5, 6, 7, 8, 9, 10, 11, 12)
    assert 0.012 < nominal_level(looks, 0.05) < 0.017
    assert nominal_level(looks, 0.05 / 4) < nominal_level(looks, 0.05) / 4
    assert nominal_level((12,), 0.05) == 0.05


def test_smallest_effect_follows_its_formula() -> None:
    assert smallest_effect(0.04, 8) == pytest.approx((1.8946 + 0.8960) * 0.04 / math.sqrt(8), abs=1e-4)
    assert smallest_effect(0.04, 1) == math.inf

"""`minimum` and `maximum` as digits: regexes of the decimal numbers between two bounds.

Integers are matched exactly. Of other numbers, those whose integer part lies between the bounds' are, with any
fraction, and so every match is within the bounds although not everything within them matches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

_ANY_FRACTION = r"(\.[0-9]+)?"
_NO_FRACTION = r"(\.0+)?"
_SOME_FRACTION = r"\.[0-9]*[1-9][0-9]*"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and greatest value, None where there is none, and whether they are themselves left out."""

    low: Fraction | None = None
    high: Fraction | None = None
    excludes_low: bool = False
    excludes_high: bool = False

    def mirrored(self) -> "Bounds":
        return Bounds(_negated(self.high), _negated(self.low), self.excludes_high, self.excludes_low)


def integer_regex(bounds: Bounds) -> str | None:
    """The integers within `bounds`; None if there are none."""
    low = None if bounds.low is None else _ceil(bounds.low) + _is_hit(bounds.low, bounds.excludes_low)
    high = None if bounds.high is None else _floor(bounds.high) - _is_hit(bounds.high, bounds.excludes_high)
    return _either([*_signed("-", _naturals(*_below_zero(low, high))), *_signed("", _naturals(*_from_zero(low, high)))])


def number_regex(bounds: Bounds) -> str | None:
    """Numbers within `bounds`; None if no number that this can write is."""
    return _either([*_signed("-", _decimals(bounds.mirrored(), 1)), *_signed("", _decimals(bounds, 0))])


def _decimals(bounds: Bounds, least: int) -> Iterator[str]:
    """Numbers within `bounds` that are not negative; below 1 too only if `least` is 0."""
    if bounds.high is not None and bounds.high < 0:
        return
    if bounds.low is None or bounds.low < 0:
        first, skips_first = least, False
    else:
        first, skips_first = _ceil(bounds.low), bounds.excludes_low and bounds.low.denominator == 1
        if first < least:
            first, skips_first = least, False
    last = None if bounds.high is None else _floor(bounds.high)
    if last is not None and first > last:
        return
    if skips_first and (last is None or first < last):
        yield f"{first}{_SOME_FRACTION}"
    for integers in _naturals(first + skips_first, None if last is None else last - 1):
        yield f"{integers}{_ANY_FRACTION}"
    if last is None or bounds.high is None:
        return
    is_left_out = (bounds.excludes_high and bounds.high == last) or (skips_first and first == last)
    if not is_left_out:
        yield f"{last}{_NO_FRACTION}"


def _naturals(low: int | None, high: int | None) -> Iterator[str]:
    """Regexes of the integers from `low`, at least 0, to `high`, without leading zeros. A `low` of None: nothing."""
    if low is None or (high is not None and low > high):
        return
    if high is None:
        digits = len(str(low))
        yield from _naturals(low, 10**digits - 1)
        yield f"[1-9][0-9]{{{digits},}}"
        return
    while low <= high:
        # Up to the last number that has as many digits.
        top = min(high, 10 ** len(str(low)) - 1)
        yield from _same_length(str(low), str(top))
        low = top + 1


def _same_length(low: str, high: str) -> Iterator[str]:
    """Digit strings between two of one length.

    >>> list(_same_length("17", "42"))
    ['1[7-9]', '[2-3][0-9]', '4[0-2]']
    """
    if len(low) == 1:
        yield _digits(low, high)
    elif low[0] == high[0]:
        yield from (low[0] + rest for rest in _same_length(low[1:], high[1:]))
    elif set(low[1:]) == {"0"} and set(high[1:]) == {"9"}:
        yield _digits(low[0], high[0]) + _any_digits(len(low) - 1)
    elif set(low[1:]) != {"0"}:
        yield from (low[0] + rest for rest in _same_length(low[1:], "9" * (len(low) - 1)))
        yield from _same_length(str(int(low[0]) + 1) + "0" * (len(low) - 1), high)
    else:
        yield _digits(low[0], str(int(high[0]) - 1)) + _any_digits(len(low) - 1)
        yield from (high[0] + rest for rest in _same_length("0" * (len(low) - 1), high[1:]))


def _digits(low: str, high: str) -> str:
    return low if low == high else f"[{low}-{high}]"


def _any_digits(count: int) -> str:
    return "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def _from_zero(low: int | None, high: int | None) -> tuple[int | None, int | None]:
    """What of a range is not negative."""
    return (None, None) if high is not None and high < 0 else (max(low or 0, 0), high)


def _below_zero(low: int | None, high: int | None) -> tuple[int | None, int | None]:
    """What of a range is negative, without its sign."""
    if low is not None and low >= 0:
        return None, None
    return 1 if high is None or high >= 0 else -high, None if low is None else -low


def _signed(sign: str, regexes: Iterator[str]) -> Iterator[str]:
    return (sign + regex for regex in regexes)


def _either(regexes: list[str]) -> str | None:
    return f"({'|'.join(regexes)})" if regexes else None


def _is_hit(bound: Fraction, excludes: bool) -> int:
    return int(excludes and bound.denominator == 1)


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _floor(value: Fraction) -> int:
    return value.numerator // value.denominator


def _negated(value: Fraction | None) -> Fraction | None:
    return None if value is None else -value

"""Tests whether a condition can be true and can be false, at the values or the range ends of each setting."""

import ast
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.space.expression import Expression

# Limit of tested combinations; conditions usually read two or three settings.
MAX_COMBINATIONS = 20_000


def outcomes(expression: Expression, ranges: Mapping[str, Sequence[Any]]) -> set[bool]:
    """The truth values of an expression over `ranges`, which has the values of each setting or its range ends.

    Numbers of the expression that are inside a range are tested too. Empty if a setting has no range. Raises
    ExpressionError if the expression cannot be computed, for example if it compares a string with a number.

    >>> from tuner.space.expression import parse
    >>> outcomes(parse("slots > 100"), {"slots": (1, 64)})
    {False}
    """
    literals = [node.value for node in ast.walk(expression.tree) if isinstance(node, ast.Constant)]
    names = sorted(expression.names)
    choices = [_with_literals(ranges[name], literals) for name in names]
    found: set[bool] = set()
    for values in itertools.islice(itertools.product(*choices), MAX_COMBINATIONS):
        found.add(bool(expression.evaluate(dict(zip(names, values, strict=True)))))
    return found


def _with_literals(values: Sequence[Any], literals: Sequence[Any]) -> list[Any]:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) != 2 or len(values) != 2:
        return list(values)
    low, high = numbers
    inside = [each for each in literals if type(each) in (int, float) and low < each < high]
    return [low, *inside, high]

"""Whether a condition can hold and can fail, by trying the ends and values of each setting's range."""

import ast
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.space.expression import Expression

# Combinations tried at most; a condition reads two or three settings.
MOST = 20_000


def outcomes(expression: Expression, ranges: Mapping[str, Sequence[Any]]) -> set[bool]:
    """The truth values that an expression takes over `ranges`: values of each setting, or the ends of its range.

    Numbers of the expression that are inside a range are tried as well. Empty if a setting has no range. Raises
    ExpressionError if the expression cannot be computed, such as a comparison of a text with a number.

    >>> from tuner.space.expression import parse
    >>> outcomes(parse("slots > 100"), {"slots": (1, 64)})
    {False}
    """
    literals = [node.value for node in ast.walk(expression.tree) if isinstance(node, ast.Constant)]
    names = sorted(expression.names)
    choices = [_with_literals(ranges[name], literals) for name in names]
    found: set[bool] = set()
    for values in itertools.islice(itertools.product(*choices), MOST):
        found.add(bool(expression.evaluate(dict(zip(names, values, strict=True)))))
    return found


def _with_literals(values: Sequence[Any], literals: Sequence[Any]) -> list[Any]:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) != 2 or len(values) != 2:
        return list(values)
    low, high = numbers
    inside = [each for each in literals if type(each) in (int, float) and low < each < high]
    return [low, *inside, high]

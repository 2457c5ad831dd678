"""The expressions of `when` and `forbid`: names, literals, comparisons, `in`, `and/or/not`, `+ - * /`.

They are parsed once and every node is checked. `eval` is not used.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class ExpressionError(ValueError):
    """An expression that does not parse, uses an unsupported node, or reads an unknown name."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression. `names` are the settings it reads."""

    text: str
    tree: ast.expr
    names: frozenset[str]

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """The value of the expression. Raises ExpressionError for a name that `values` lacks."""
        return _evaluate(self.tree, values, self.text)


def parse(text: str) -> Expression:
    """Parse an expression. Raises ExpressionError.

    >>> parse("not prefill_chunking").evaluate({"prefill_chunking": False})
    True
    >>> parse("quantize in ['none', 'fp8'] and budget / 2 < 10").evaluate({"quantize": "fp8", "budget": 12})
    True
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ExpressionError(f"`{text}` is not an expression: {error.msg}") from None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif not isinstance(node, _ALLOWED):
            raise ExpressionError(
                f"`{text}` uses {type(node).__name__}; an expression has names, literals, comparisons, in, "
                "and/or/not, + - * /"
            )
    return Expression(text, tree, frozenset(names))


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ALLOWED = (
    *(ast.Constant, ast.List, ast.Tuple, ast.Load, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub),
    *(ast.BinOp, ast.Compare),
    *_BINARY,
    *_COMPARE,
)


def _evaluate(node: ast.expr, values: Mapping[str, Any], text: str) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            if name not in values:
                raise ExpressionError(f"`{text}` reads `{name}`, which is not a setting of this space")
            return values[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item, values, text) for item in items]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, values, text)
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, values, text)
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_evaluate(part, values, text) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_evaluate(part, values, text) for part in parts)
        case ast.BinOp(left=left, op=binary, right=right):
            return _apply(_BINARY[type(binary)], _evaluate(left, values, text), _evaluate(right, values, text), text)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            current = _evaluate(left, values, text)
            for op, right in zip(ops, rights, strict=True):
                following = _evaluate(right, values, text)
                if not _apply(_COMPARE[type(op)], current, following, text):
                    return False
                current = following
            return True
    raise AssertionError(f"unchecked node {type(node).__name__}")


def _apply(function: Callable[[Any, Any], Any], left: Any, right: Any, text: str) -> Any:
    try:
        return function(left, right)
    except (TypeError, ZeroDivisionError) as error:
        raise ExpressionError(f"`{text}` cannot be computed for {left!r} and {right!r}: {error}") from None

"""Whether a value of one schema can be a value of another: `oneOf` allows exactly one.

Only what is certain counts: types apart, listed values apart, or objects apart in a property that both require.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any] | bool
#: Follows references.
Resolve = Callable[[Schema], Schema]

_TYPES = frozenset(("string", "number", "integer", "array", "object", "boolean", "null"))


def are_apart(one: Schema, other: Schema, resolve: Resolve) -> bool:
    """No value is valid against both, for certain."""
    one, other = resolve(one), resolve(other)
    if isinstance(one, bool) or isinstance(other, bool):
        return False
    listed = values_of(one), values_of(other)
    if listed[0] is not None and listed[1] is not None:
        return listed[0].isdisjoint(listed[1])
    if types_of(one).isdisjoint(types_of(other)):
        return True
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    if types_of(one) != {"object"} or types_of(other) != {"object"}:
        return False
    mine, theirs = one.get("properties", {}), other.get("properties", {})
    return any(are_apart(mine[name], theirs[name], resolve) for name in shared & mine.keys() & theirs.keys())


def values_of(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The only values that are valid, as canonical JSON; None where they are not listed."""
    if "const" in schema:
        return frozenset((canonical(schema["const"]),))
    if "enum" in schema:
        return frozenset(map(canonical, schema["enum"]))
    return None


def canonical(value: Any) -> str:
    """Equal for what JSON Schema calls equal: 1 is 1.0, and true is neither.

    >>> canonical(1.0), canonical(True)
    ('1', 'true')
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a valid value may have."""
    listed = values_of(schema)
    if listed is not None:
        return frozenset().union(*(type_names(json.loads(value)) for value in listed))
    asked = schema.get("type", ())
    names = {asked} if isinstance(asked, str) else set(asked)
    if "number" in names:
        names.add("integer")
    return frozenset(names) or _TYPES


def type_names(value: Any) -> frozenset[str]:
    """What a scalar's `type` may be called."""
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("integer", "number") if value.is_integer() else ("number",))
        case str():
            return frozenset(("string",))
        case list():
            return frozenset(("array",))
        case _:
            return frozenset(("object",))

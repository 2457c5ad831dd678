"""Whether two schemas of a `oneOf` can share a value.

Schemas are disjoint if their types are, their listed values are, or the schemas of a property that both require are.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from reference_server.grammars.references import Schema

#: Follows references.
Resolve = Callable[[Schema], Schema]

_TYPES = frozenset(("string", "number", "integer", "array", "object", "boolean", "null"))


def are_disjoint(one: Schema, other: Schema, resolve: Resolve) -> bool:
    """Whether certainly no value is valid against both."""
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
    left, right = one.get("properties", {}), other.get("properties", {})
    return any(are_disjoint(left[name], right[name], resolve) for name in shared & left.keys() & right.keys())


def values_of(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The listed values as canonical JSON; None without `const` and `enum`."""
    if "const" in schema:
        return frozenset((canonical(schema["const"]),))
    if "enum" in schema:
        return frozenset(map(canonical, schema["enum"]))
    return None


def canonical(value: Any) -> str:
    """JSON that is equal for values equal in JSON Schema: 1 equals 1.0, but not true.

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
    declared = schema.get("type", ())
    names = {declared} if isinstance(declared, str) else set(declared)
    if "number" in names:
        names.add("integer")
    return frozenset(names) or _TYPES


def type_names(value: Any) -> frozenset[str]:
    """The values of `type` that fit a value."""
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

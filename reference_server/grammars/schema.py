"""A JSON schema -> llguidance's grammar: limits, a few rewritten keywords, and refusals by name.

Annotations are ignored, as in every validator. `uniqueItems` is ignored too, because a grammar cannot compare values.
Any other keyword that narrows the valid values is refused if llguidance does not support it, so a complete output is
valid.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from typing import Any, NoReturn

import jsonschema_rs
import llguidance

from reference_server.errors import ValidationError
from reference_server.grammars.overlap import are_disjoint
from reference_server.grammars.references import Resource, Schema, SchemaError

MAX_SCHEMA_BYTES = 262_144
MAX_DEPTH = 64
MAX_ONE_OF = 256
#: Building an object's rules takes time with the square of its optional properties: 50 ms for 450.
MAX_OPTIONAL_PROPERTIES = 450
#: An automaton has a state for each remainder.
MAX_MULTIPLE = 1000
#: Integers have an end: a longer one is read as a float or not at all.
LARGEST_INTEGER = 10**18

#: White space as in TGI's regexes: at most one space. `oneOf` has been checked by then.
_OPTIONS = {"whitespace_pattern": "[ ]", "coerce_one_of": True}
_DIALECT = jsonschema_rs.Draft202012Validator({"$ref": "https://json-schema.org/draft/2020-12/schema"})

_UNSUPPORTED = (
    "not", "if", "contains", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties")
_UNIONS = ("anyOf", "oneOf")
#: Keywords with which a schema describes properties of an object.
_DESCRIBES_PROPERTIES = ("properties", "patternProperties", "additionalProperties", "$ref", "allOf", *_UNIONS)

#: Formats that llguidance enforces; any other is an annotation.
FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
#: llguidance allows a leap second in every minute and a leap day in every year; here there is none.
_COMMON_DATE = "[0-9]{4}-(0[13-9]-..|1.-..|02-[01].|02-2[0-8])"
_COMMON_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_COMMON = {"date": f"^{_COMMON_DATE}", "time": f"^{_COMMON_TIME}", "date-time": f"^{_COMMON_DATE}.{_COMMON_TIME}"}


def schema_grammar(schema: Any) -> str:
    """llguidance's grammar of what `read_schema` returned, which is changed. Raises ValidationError."""
    try:
        _prepare(schema)
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)  # type: ignore[arg-type]
    except SchemaError as error:
        raise schema_error(str(error)) from error
    except RecursionError as error:
        raise schema_error("too complex (references nested too deeply)") from error


def read_schema(text: str) -> Any:
    """Parse and validate a JSON schema. Raises ValidationError."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SCHEMA_BYTES:
        raise schema_error(f"too complex (more than {MAX_SCHEMA_BYTES} bytes)")
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise schema_error(f"too complex (deeper than {MAX_DEPTH} levels)") from error
    except ValueError as error:
        raise ValidationError(f"grammar is not valid: {error}") from error
    if _depth(schema) > MAX_DEPTH:
        raise schema_error(f"too complex (deeper than {MAX_DEPTH} levels)")
    _check_dialect(schema)
    return schema


def schema_error(detail: str) -> ValidationError:
    """The refusal of a schema, in TGI's words."""
    return ValidationError(f"cannot compile regex from schema: {detail}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _depth(value: Any) -> int:
    """Levels of objects and arrays."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _check_dialect(schema: Any) -> None:
    try:
        _DIALECT.validate(schema)
    except ValueError as error:
        raise ValidationError(f"grammar is not valid: {getattr(error, 'message', error)}") from error


def _prepare(root: Any) -> None:
    """Rewrite in place what llguidance would refuse, or would let grow without end. Raises SchemaError."""
    schemas: dict[int, dict[str, Any]] = {}
    is_open: dict[int, bool] = {}
    pending: list[tuple[Schema, Resource, bool]] = [(root, Resource(root), False)] if isinstance(root, dict) else []
    while pending:
        schema, resource, is_joined = pending.pop()
        if not isinstance(schema, dict) or is_open.get(id(schema), False) or (id(schema) in is_open and not is_joined):
            continue
        resource = resource.entering(schema)
        if id(schema) not in schemas:
            _check_keywords(schema)
            _check_one_of(schema, resource)
            schemas[id(schema)] = schema
        is_open[id(schema)] = is_joined = is_joined or _num_parts(schema) > 1
        pending.extend((each, resource, is_joined) for each in _subschemas(schema))
        if "$ref" in schema:
            resource.resolved(schema)
            target = resource.target(schema["$ref"])
            if id(target) not in schemas:
                _check_dialect(target)
            pending.append((target, resource, is_joined))
    _check_size(schemas.values())
    for key, schema in schemas.items():
        _rewrite(schema, is_open[key])


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Schema]:
    for keyword in _MAPS_OF_SCHEMAS:
        yield from schema.get(keyword, {}).values()
    for keyword in _LISTS_OF_SCHEMAS:
        yield from schema.get(keyword, ())
    yield from (schema[keyword] for keyword in _SCHEMAS if keyword in schema)


def _num_parts(schema: Mapping[str, Any]) -> int:
    """The number of places that describe one object's properties together. Several cannot be closed one by one."""

    def describes(part: Schema) -> bool:
        return isinstance(part, dict) and any(keyword in part for keyword in _DESCRIBES_PROPERTIES)

    parts = sum(map(describes, schema.get("allOf", ())))
    parts += sum(any(map(describes, schema.get(keyword, ()))) for keyword in _UNIONS)
    return parts + ("properties" in schema) + ("$ref" in schema)


def _check_keywords(schema: Mapping[str, Any]) -> None:
    for keyword in _UNSUPPORTED:
        if keyword in schema:
            raise SchemaError(f"`{keyword}` is not supported")
    for value in (*schema.get("enum", ()), schema.get("const")):
        if isinstance(value, int) and int(float(value)) != value:
            raise SchemaError(f"{value} in `enum` or `const` has more digits than a float holds")


def _check_one_of(schema: dict[str, Any], resource: Resource) -> None:
    """Refuse `oneOf` unless its schemas are disjoint, and so mean the same as in `anyOf`."""
    branches: Sequence[Schema] = schema.get("oneOf", ())
    if len(branches) > MAX_ONE_OF:
        raise SchemaError(f"too complex ({len(branches)} of {MAX_ONE_OF} schemas in `oneOf`)")
    if _all_disjoint(branches, resource):
        return
    # pydantic does not require a tag that has a default. With the tag in each branch, they are disjoint.
    discriminator = schema.get("discriminator")
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    tagged = [_with_tag(resource.resolved(branch), tag) for branch in branches]
    if not _all_disjoint(tagged, resource):
        raise SchemaError("`oneOf` whose schemas may share a value is not supported; `anyOf` is")
    schema["oneOf"] = [_with_tag(branch, tag) for branch in branches]


def _all_disjoint(branches: Sequence[Schema], resource: Resource) -> bool:
    return all(are_disjoint(one, other, resource.resolved) for one, other in combinations(branches, 2))


def _with_tag(branch: Schema, tag: object) -> Schema:
    """`branch` with the property required that OpenAPI's `discriminator` names."""
    if isinstance(branch, bool) or not isinstance(tag, str):
        return branch
    return {**branch, "required": [*branch.get("required", ()), tag]}


def _check_size(schemas: Collection[Mapping[str, Any]]) -> None:
    optional = [len(schema.get("properties", {}).keys() - set(schema.get("required", ()))) for schema in schemas]
    if sum(count * count for count in optional) > MAX_OPTIONAL_PROPERTIES**2:
        raise SchemaError(f"too complex ({max(optional)} optional properties, of {MAX_OPTIONAL_PROPERTIES})")
    multiple = math.lcm(*(_significand(schema["multipleOf"]) for schema in schemas if "multipleOf" in schema))
    if multiple > MAX_MULTIPLE:
        raise SchemaError(f"too complex (`multipleOf` {multiple} in all, of {MAX_MULTIPLE})")


def _significand(number: float) -> int:
    """The digits of a number without its zeros at the end.

    >>> _significand(0.25), _significand(1500)
    (25, 15)
    """
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)))


def _rewrite(schema: dict[str, Any], is_open: bool) -> None:
    for keyword in ("$schema", "x-guidance", "uniqueItems"):
        schema.pop(keyword, None)
    _rewrite_format(schema)
    if schema.get("unevaluatedProperties") is True:
        del schema["unevaluatedProperties"]
    if "unevaluatedProperties" in schema:
        if is_open:
            raise SchemaError("`unevaluatedProperties` together with schemas of the same object is not supported")
        schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
    if "properties" in schema:
        # As TGI: an object with the listed properties only, unless the schema allows more.
        schema.setdefault("type", "object")
        is_closed = not is_open and "patternProperties" not in schema
        if is_closed and schema["properties"].keys() >= set(schema.get("required", ())):
            schema.setdefault("additionalProperties", False)
    names = schema.get("type", ())
    if "integer" in names and "number" not in names:
        if "exclusiveMinimum" not in schema:
            schema.setdefault("minimum", -LARGEST_INTEGER)
        if "exclusiveMaximum" not in schema:
            schema.setdefault("maximum", LARGEST_INTEGER)


def _rewrite_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if name not in FORMATS:
        schema.pop("format", None)
    elif name in _COMMON:
        schema.setdefault("pattern", _COMMON[name])

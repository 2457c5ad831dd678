"""A JSON schema -> a regex whose every match is valid JSON and valid against the schema.

outlines-core builds it. It ignores some keywords, joins others wrongly and escapes neither names nor patterns
(docs/grammars.md), so it is given a plainer schema that it reads rightly: references followed, unions spelled out,
and in the place of leaves that it gets wrong a constant, whose text gives way to our regex afterwards.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

from outlines_core.json_schema import NUMBER, build_regex_from_schema

from reference_server.grammars.keywords import (
    ANNOTATIONS,
    BESIDE_TYPE,
    SchemaError,
    check_keywords,
    refuse_others,
    shape_of,
)
from reference_server.grammars.numbers import Bounds, integer_regex, number_regex
from reference_server.grammars.overlap import Schema, are_apart, canonical, type_names
from reference_server.grammars.patterns import FORMATS, PatternError, literal, string_regex
from reference_server.grammars.references import Place

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_PROPERTIES = 5_000
#: A bound of more digits is nobody's.
_MOST_DIGITS = 18
_LARGEST_BOUND = 10**_MOST_DIGITS

ANY = {"anyOf": [{"type": name} for name in ("boolean", "null", "number", "string", "array", "object")]}
#: outlines-core's number without those that a reader takes for infinity.
_FINITE_NUMBER = r"(-)?(0|[1-9][0-9]{0,17})(\.[0-9]+)?([eE][+-][0-9]{1,2})?"
#: What `{"type": "object"}` allows.
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def regex_of_schema(schema: Mapping[str, Any]) -> str:
    """Raises `SchemaError`."""
    plainer = _Plainer(schema)
    plain = plainer.plain(schema, Place(schema))
    try:
        regex = build_regex_from_schema(json.dumps(plain, ensure_ascii=False))
    except (ValueError, TypeError, RuntimeError) as error:
        raise SchemaError(str(error).partition("\n")[0]) from error
    return plainer.with_leaves(regex.replace(NUMBER, _FINITE_NUMBER))


class _Plainer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._leaves: list[str] = []
        self._num_nodes = 0
        # No text of the schema can be taken for a leaf's place.
        self._mark = "leaf"
        text = json.dumps(root)
        while self._mark in text:
            self._mark += "f"

    def plain(self, schema: Schema, place: Place) -> dict[str, Any]:
        """The plainer schema of one place."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise SchemaError(f"too complex (more than {MAX_NODES} schemas once references are followed)")
        if isinstance(schema, bool):
            if not schema:
                raise SchemaError("`false`, which no value fits, is not supported")
            return ANY
        place = place.entering(schema)
        shape = shape_of(schema)
        if shape is None:
            return ANY
        check_keywords(schema, shape)
        return self._shapes[shape](self, schema, place)

    def with_leaves(self, regex: str) -> str:
        """`regex` with every constant that stands for a leaf replaced."""
        return re.sub(f'"{self._mark}([0-9]+)"', lambda found: self._leaves[int(found[1])], regex)

    def _leaf(self, regex: str) -> dict[str, Any]:
        self._leaves.append(regex)
        return {"const": f"{self._mark}{len(self._leaves) - 1}"}

    def _properties(self, schema: Mapping[str, Any], place: Place) -> dict[str, Any]:
        _check_type(schema, "object", "properties")
        properties, required = schema["properties"], schema.get("required", [])
        if len(properties) > MAX_PROPERTIES:
            raise SchemaError(f"too complex ({len(properties)} of {MAX_PROPERTIES} properties)")
        unknown = next((name for name in required if name not in properties), None)
        if unknown is not None:
            raise SchemaError(f"the required property {json.dumps(unknown)} is not among `properties`")
        if schema.get("minProperties", 0) > len(set(required)):
            raise SchemaError("`minProperties` above the number of required properties is not supported")
        if schema.get("maxProperties", len(properties)) < len(properties):
            raise SchemaError("`maxProperties` below the number of properties is not supported")
        return {
            "type": "object",
            "properties": {_name(name): self.plain(each, place) for name, each in properties.items()},
            "required": [_name(name) for name in required],
        }

    def _all_of(self, schema: Mapping[str, Any], place: Place) -> dict[str, Any]:
        if len(schema["allOf"]) != 1:
            raise SchemaError("`allOf` of more than one schema is not supported")
        return self.plain(schema["allOf"][0], place)

    def _any_of(self, schema: Mapping[str, Any], place: Place) -> dict[str, Any]:
        return {"anyOf": [self.plain(branch, place) for branch in _branches(schema, "anyOf")]}

    def _one_of(self, schema: Mapping[str, Any], place: Place) -> dict[str, Any]:
        branches = _branches(schema, "oneOf")
        if not _are_all_apart(branches, place):
            # pydantic does not require a tag that has a default; where every branch writes its own, they are apart.
            branches = [_with_tag(place.resolved(branch), schema.get("discriminator")) for branch in branches]
            if not _are_all_apart(branches, place):
                raise SchemaError("`oneOf` whose schemas may share a value is not supported; `anyOf` is")
        return {"anyOf": [self.plain(branch, place) for branch in branches]}

    def _prefix_items(self, schema: Mapping[str, Any], place: Place) -> dict[str, Any]:
        _check_type(schema, "array", "prefixItems")
        _check_unique(schema)
        count = len(schema["prefixItems"])
        if not schema.get("minItems", 0) <= count <= schema.get("maxItems", count):
            raise SchemaError("`minItems` or `maxItems` beside `prefixItems` has to allow exactly those")
        return {"prefixItems": [self.plain(item, place) for item in schema["prefixItems"]]}

    def _enum(self, schema: Mapping[str, Any], _: Place) -> dict[str, Any]:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if "enum" in schema and "const" in schema and canonical(schema["const"]) not in map(canonical, schema["enum"]):
            raise SchemaError("`const` is not among `enum`")
        if any(isinstance(value, dict | list) for value in values):
            raise SchemaError("an object or array in `enum` or `const` is not supported")
        if "type" in schema:
            asked = schema["type"]
            names = {asked} if isinstance(asked, str) else set(asked)
            values = [value for value in values if not names.isdisjoint(type_names(value))]
        if not values:
            raise SchemaError("no value of `enum` or `const` has the `type`")
        return self._leaf(f"({'|'.join(map(_scalar, values))})")

    def _reference(self, schema: Mapping[str, Any], place: Place) -> dict[str, Any]:
        reference = schema["$ref"]
        if reference in place.references:
            raise SchemaError(f"`$ref` {reference}, which leads back to itself, is not supported")
        return self.plain(place.target(reference), place.following(reference))

    def _type(self, schema: Mapping[str, Any], place: Place) -> dict[str, Any]:
        asked = schema["type"]
        if isinstance(asked, str):
            return self._types[asked](self, schema, place)
        understood = frozenset[str]().union(*(BESIDE_TYPE[name] for name in asked), ("type",))
        refuse_others(schema, understood, f"`type: {json.dumps(asked)}`")
        return {
            "anyOf": [
                self.plain({key: schema[key] for key in schema if key in BESIDE_TYPE[name]} | {"type": name}, place)
                for name in asked
            ]
        }

    def _string(self, schema: Mapping[str, Any], _: Place) -> dict[str, Any]:
        asked = [name for name in ("minLength", "maxLength", "pattern", "format") if name in schema]
        if not asked:
            return {"type": "string"}
        if asked[0].endswith("Length"):
            if asked[-1] in ("pattern", "format"):
                raise SchemaError(f"`{asked[-1]}` beside `{asked[0]}` is not supported")
            lengths = {name: int(schema[name]) for name in asked}
            _check_order(lengths, "minLength", "maxLength")
            return {"type": "string", **lengths}
        if len(asked) > 1:
            raise SchemaError(f"`{asked[1]}` beside `{asked[0]}` is not supported")
        if asked == ["format"]:
            return self._leaf(f'"{_format(schema["format"])}"')
        try:
            return self._leaf(f'"{string_regex(schema["pattern"])}"')
        except PatternError as error:
            raise SchemaError(f"`pattern` with {error} is not supported") from error

    def _integer(self, schema: Mapping[str, Any], _: Place) -> dict[str, Any]:
        bounds = _bounds(schema)
        if bounds is None:
            digits = {name: schema[name] for name in ("minDigits", "maxDigits") if name in schema}
            return {"type": "integer", **(digits or {"maxDigits": _MOST_DIGITS})}
        if "minDigits" in schema or "maxDigits" in schema:
            raise SchemaError("`minDigits` and `maxDigits` beside bounds are not supported")
        return self._bounded(integer_regex(_closed(bounds)), "integer")

    def _number(self, schema: Mapping[str, Any], _: Place) -> dict[str, Any]:
        bounds = _bounds(schema)
        if bounds is None:
            return {"type": "number"}
        return self._bounded(number_regex(_closed(bounds)), "number")

    def _bounded(self, regex: str | None, name: str) -> dict[str, Any]:
        if regex is None:
            raise SchemaError(f"bounds of `type: {name}` without a whole number between them are not supported")
        return self._leaf(regex)

    def _array(self, schema: Mapping[str, Any], place: Place) -> dict[str, Any]:
        _check_unique(schema)
        lengths = {name: int(schema[name]) for name in ("minItems", "maxItems") if name in schema}
        _check_order(lengths, "minItems", "maxItems")
        items = schema.get("items", True)
        if items is False:
            if lengths.get("minItems"):
                raise SchemaError("`items: false` beside `minItems` fits no value")
            return {"type": "array", "maxItems": 0, "items": {"type": "null"}}
        if lengths.get("maxItems") == 0:
            # outlines-core would still let one in.
            return {"type": "array", "maxItems": 0, "items": {"type": "null"}}
        is_free = items is True or (isinstance(items, Mapping) and not items.keys() - ANNOTATIONS)
        return {"type": "array", **lengths, **({} if is_free else {"items": self.plain(items, place)})}

    def _object(self, schema: Mapping[str, Any], place: Place) -> dict[str, Any]:
        """A map from any name to a value. A name may come twice, and the last one counts, so there may be fewer."""
        for name in ("required", "maxProperties"):
            if schema.get(name):
                raise SchemaError(f"`{name}` beside `type: object` without `properties` is not supported")
        if schema.get("minProperties", 0) > 1:
            raise SchemaError("`minProperties` above 1 without `properties` is not supported")
        values = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        fewest = {"minProperties": 1} if schema.get("minProperties") else {}
        if values is False or schema.get("maxProperties") == 0:
            if fewest:
                raise SchemaError("`minProperties` of an object that may have no properties fits no value")
            return self._leaf(r"\{[ ]?\}")
        is_free = values is True or not values.keys() - ANNOTATIONS
        return {"type": "object", **fewest, **({} if is_free else {"additionalProperties": self.plain(values, place)})}

    def _same(self, schema: Mapping[str, Any], _: Place) -> dict[str, Any]:
        return {"type": schema["type"]}

    _shapes: Mapping[str, Callable[["_Plainer", Mapping[str, Any], Place], dict[str, Any]]] = {
        "anyOf": _any_of,
        "oneOf": _one_of,
        "properties": _properties,
        "allOf": _all_of,
        "prefixItems": _prefix_items,
        "enum": _enum,
        "const": _enum,
        "$ref": _reference,
        "type": _type,
    }
    _types: Mapping[str, Callable[["_Plainer", Mapping[str, Any], Place], dict[str, Any]]] = {
        "string": _string,
        "integer": _integer,
        "number": _number,
        "array": _array,
        "object": _object,
        "boolean": _same,
        "null": _same,
    }


def _branches(schema: Mapping[str, Any], keyword: str) -> Sequence[Schema]:
    """The alternatives, each with what stands beside them all; refuses what cannot be said of each alone."""
    beside = {key: value for key, value in schema.items() if key not in ANNOTATIONS | {keyword}}
    branches: Sequence[Schema] = schema[keyword]
    if not beside:
        return branches
    merged = []
    for branch in branches:
        own = set() if isinstance(branch, bool) else branch.keys() - ANNOTATIONS
        if isinstance(branch, bool) or own & beside.keys() - {"type", "required"}:
            raise SchemaError(f"`{keyword}` beside keywords of its own schemas is not supported")
        if not (own <= {"required"} or beside.keys() <= {"type"}):
            raise SchemaError(f"`{next(iter(beside.keys() - {'type'}))}` beside `{keyword}` is not supported")
        if branch.get("type", beside.get("type")) != beside.get("type", branch.get("type")):
            raise SchemaError(f"`type` beside `{keyword}` of other types is not supported")
        required = [*beside.get("required", ()), *branch.get("required", ())]
        merged.append({**beside, **branch, **({"required": required} if required else {})})
    return merged


def _are_all_apart(branches: Sequence[Schema], place: Place) -> bool:
    return all(are_apart(one, other, place.resolved) for one, other in combinations(branches, 2))


def _with_tag(branch: Schema, discriminator: object) -> Schema:
    """`branch` with the property required that OpenAPI's `discriminator` names."""
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if not isinstance(tag, str) or isinstance(branch, bool) or tag not in branch.get("properties", {}):
        return branch
    return {**branch, "required": [*branch.get("required", ()), tag]}


def _closed(bounds: Bounds) -> Bounds:
    """With both ends: a number without end may be too large for its reader, and a model may never end it."""
    low = Fraction(-_LARGEST_BOUND) if bounds.low is None else bounds.low
    high = Fraction(_LARGEST_BOUND) if bounds.high is None else bounds.high
    return replace(bounds, low=low, high=high)


def _bounds(schema: Mapping[str, Any]) -> Bounds | None:
    def number(name: str) -> Fraction | None:
        if name not in schema:
            return None
        value = Fraction(str(schema[name]))
        if abs(value) > _LARGEST_BOUND or value.denominator > _LARGEST_BOUND:
            raise SchemaError(f"`{name}` of more than 18 digits is not supported")
        return value

    low, high = number("minimum"), number("maximum")
    above, below = number("exclusiveMinimum"), number("exclusiveMaximum")
    if low is high is above is below is None:
        return None
    excludes_low = above is not None and (low is None or above >= low)
    excludes_high = below is not None and (high is None or below <= high)
    return Bounds(above if excludes_low else low, below if excludes_high else high, excludes_low, excludes_high)


def _check_type(schema: Mapping[str, Any], name: str, keyword: str) -> None:
    if schema.get("type", name) not in (name, [name]):
        raise SchemaError(f"`{keyword}` beside another `type` is not supported")


def _check_unique(schema: Mapping[str, Any]) -> None:
    if schema.get("uniqueItems"):
        raise SchemaError("`uniqueItems` is not supported")


def _check_order(limits: Mapping[str, int], least: str, most: str) -> None:
    if limits.get(least, 0) > limits.get(most, limits.get(least, 0)):
        raise SchemaError(f"`{least}` is {limits[least]}, but `{most}` is {limits[most]}")


def _format(name: str) -> str:
    if name not in FORMATS:
        raise SchemaError(f"Format {name} is not supported: {', '.join(FORMATS)} are")
    return FORMATS[name]


def _name(name: str) -> str:
    """A property's name as JSON writes it: outlines-core does not."""
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _scalar(value: Any) -> str:
    return f'"{literal(value)}"' if isinstance(value, str) else literal_json(value)


def literal_json(value: Any) -> str:
    """A number or a word as JSON writes it."""
    return re.escape(json.dumps(value))

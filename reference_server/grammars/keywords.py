"""Which keywords of JSON Schema are served, and which go together.

What says nothing about values is left aside. A keyword that would be ignored, although it narrows what is valid, is
refused by name: what a grammar lets through has to be valid.
"""

from collections.abc import Mapping
from typing import Any

#: The keywords that decide what a schema is, in the order in which the first one present does (http-api.md 3.6).
SHAPES = ("anyOf", "oneOf", "properties", "allOf", "prefixItems", "enum", "const", "$ref", "type")

ANNOTATIONS = frozenset(
    (
        # TGI's tool grammars keep what they refer to in `$functions`.
        "$functions",
        "$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "$vocabulary",
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
        "name", "strict", "discriminator", "contentMediaType", "contentEncoding", "contentSchema",
    )
)  # fmt: skip

_STRING = frozenset(("minLength", "maxLength", "pattern", "format"))
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_ARRAY = frozenset(("items", "minItems", "maxItems", "uniqueItems"))
_OBJECT = frozenset(("required", "additionalProperties", "unevaluatedProperties", "minProperties", "maxProperties"))

#: Beside each shape, what is understood. anyOf and oneOf judge their own.
BESIDE_SHAPE: Mapping[str, frozenset[str]] = {
    "properties": _OBJECT | {"type"},
    "allOf": frozenset(),
    "prefixItems": _ARRAY | {"type"},
    "enum": frozenset(("type", "const")),
    "const": frozenset(("type",)),
    "$ref": frozenset(),
}

#: Beside `type`, by its value.
BESIDE_TYPE: Mapping[str, frozenset[str]] = {
    "string": _STRING,
    "integer": _BOUNDS | {"minDigits", "maxDigits"},
    "number": _BOUNDS,
    "array": _ARRAY,
    "object": _OBJECT,
    "boolean": frozenset(),
    "null": frozenset(),
}


class SchemaError(ValueError):
    """A schema that no regex is made of; the text names what is in the way."""


def shape_of(schema: Mapping[str, Any]) -> str | None:
    """The keyword that decides; None for a schema that any value fits."""
    shape = next((keyword for keyword in SHAPES if keyword in schema), None)
    if shape is None:
        refuse_others(schema, frozenset(), "a schema without `type`")
    return shape


def check_keywords(schema: Mapping[str, Any], shape: str) -> None:
    """Raise `SchemaError` naming a keyword that is not understood where it stands."""
    if shape in BESIDE_SHAPE:
        refuse_others(schema, BESIDE_SHAPE[shape] | {shape}, f"`{shape}`")
    elif shape == "type" and isinstance(schema["type"], str):
        refuse_others(schema, BESIDE_TYPE[schema["type"]] | {shape}, f"`type: {schema['type']}`")


def refuse_others(schema: Mapping[str, Any], understood: frozenset[str], beside: str) -> None:
    unknown = next((keyword for keyword in schema if keyword not in understood | ANNOTATIONS), None)
    if unknown is not None:
        raise SchemaError(f"`{unknown}` beside {beside} is not supported")

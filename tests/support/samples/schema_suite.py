# ruff: noqa: E501  # one line each, so that the suite can be read as a table
"""JSON schemas that are served, by the keywords they use, and schemas that are refused, with a part of the refusal."""

from typing import Any

Schema = dict[str, Any]


def one(schema: Any, **more: Any) -> Schema:
    """An object with the one required property `v`."""
    return {"type": "object", "properties": {"v": schema}, "required": ["v"], **more}


def string(**more: Any) -> Schema:
    return {"type": "string", **more}


def integer(**more: Any) -> Schema:
    return {"type": "integer", **more}


def number(**more: Any) -> Schema:
    return {"type": "number", **more}


def array(items: Any = None, **more: Any) -> Schema:
    return {"type": "array", **({} if items is None else {"items": items}), **more}


NULL, BOOLEAN = {"type": "null"}, {"type": "boolean"}
POINT = {"type": "object", "properties": {"x": number(), "y": number()}, "required": ["x", "y"]}

SERVED: dict[str, Schema] = {
    # scalars
    "string": one(string()), "integer": one(integer()), "number": one(number()), "boolean": one(BOOLEAN),
    "null": one(NULL), "any": one({}), "true": one(True), "described": one({"description": "anything", "title": "T"}),
    "type_list": one({"type": ["string", "null"]}), "type_list_of_one": one({"type": ["integer"]}),
    "type_list_bounds": one({"type": ["integer", "string"], "minimum": 3, "maxLength": 2}),
    # objects
    "no_properties": {"properties": {}}, "order": {"properties": {"z": NULL, "a": NULL, "m": NULL}},
    "all_optional": {"properties": {"a": integer(), "b": BOOLEAN, "c": string(maxLength=3)}},
    "forty_optional": {"properties": {f"field_{i}": string() for i in range(40)}},
    "first_required": {"properties": {"a": integer(), "b": BOOLEAN}, "required": ["a"]},
    "last_required": {"properties": {"a": integer(), "b": BOOLEAN}, "required": ["b"]},
    "middle_required": {"properties": {"a": NULL, "b": NULL, "c": NULL}, "required": ["b"]},
    "closed": one(integer(), additionalProperties=False), "open": one(integer(), additionalProperties=True),
    "extra_typed": one(integer(), additionalProperties={"type": "string"}),
    "unevaluated": one(integer(), unevaluatedProperties=False), "no_type": {"properties": {"v": NULL}, "required": ["v"]},
    "counted_properties": one(integer(), minProperties=1, maxProperties=4),
    "draft": one(integer(), **{"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://x/y"}),
    "nested": one(one(one(one(integer())))), "nested_closed": one(one(BOOLEAN, additionalProperties=False)),
    "nested_siblings": {"properties": {"a": POINT, "b": POINT, "c": one(POINT)}, "required": ["a", "c"]},
    "any_map": one({"type": "object"}), "map_of_integers": one({"type": "object", "additionalProperties": integer()}),
    "map_of_objects": one({"type": "object", "additionalProperties": POINT}),
    "map_not_empty": one({"type": "object", "additionalProperties": BOOLEAN, "minProperties": 1}),
    "map_closed": one({"type": "object", "additionalProperties": False}),
    "many": {"properties": {f"p{i}": integer(minimum=0, maximum=9) for i in range(12)},
             "required": [f"p{i}" for i in range(12)]},
    # names
    "quoted_name": {"properties": {'a"b': NULL}, "required": ['a"b']},
    "backslash_name": {"properties": {"a\\b": NULL}, "required": ["a\\b"]},
    "newline_name": {"properties": {"a\nb": NULL, "\t": NULL}, "required": ["a\nb", "\t"]},
    "syntax_name": {"properties": {"a.*(b)[c]{2}|^$+?": NULL}, "required": ["a.*(b)[c]{2}|^$+?"]},
    "unicode_name": {"properties": {"größe": NULL, "名前": NULL, "😀": NULL}, "required": ["größe", "名前", "😀"]},
    "empty_name": {"properties": {"": NULL}, "required": [""]},
    "keyword_names": {"properties": {"type": NULL, "properties": NULL, "$ref": NULL, "enum": NULL}},
    "marked_name": {"properties": {"leaf0": {"const": 5}, "leaff0": {"const": "leaf1"}}, "required": ["leaf0"]},
    # listed values
    "enum_strings": one({"enum": ["red", "green", "blue"]}), "enum_typed": one(string(enum=["a", "b"])),
    "enum_mixed": one({"enum": [1, "1", None, True, 1.5, -3]}), "enum_filtered": one(integer(enum=[1, "a", 2])),
    "enum_one": one({"enum": ["only"]}), "enum_quotes": one({"enum": ['say "hi"', "back\\slash", "new\nline", "\x01"]}),
    "enum_unicode": one({"enum": ["é", "日本語", "😀", "\u200b"]}), "enum_syntax": one({"enum": ["a.b", "(c)", "d|e", "[f]"]}),
    "enum_prefixes": one({"enum": ["a", "ab", "abc", "abcd"]}), "enum_many": one({"enum": [f"id-{i}" for i in range(300)]}),
    "enum_numbers": one({"enum": [0, -1, 1e100, 1234567890123456, 0.1]}),
    "enum_object": one({"enum": [{"a": 1}]}), "const_list": one({"const": [1]}),
    "const": one({"const": "fixed"}), "const_number": one({"const": 42}), "const_null": one({"const": None}),
    "const_typed": one({"const": "x", "type": "string"}), "const_enum": one({"const": "x", "enum": ["x", "y"]}),
    # strings
    "min_length": one(string(minLength=3)), "max_length": one(string(maxLength=4)),
    "lengths": one(string(minLength=2, maxLength=3)), "length_exact": one(string(minLength=5, maxLength=5)),
    "empty_string": one(string(maxLength=0)), "long": one(string(maxLength=2000)),
    "date": one(string(format="date")), "time": one(string(format="time")), "uuid": one(string(format="uuid")),
    "date_time": one(string(format="date-time")),
    # patterns
    "pattern": one(string(pattern="^[a-z]{2,5}$")), "pattern_unanchored": one(string(pattern="[0-9]+")),
    "pattern_dot": one(string(pattern="^a.b.c$")), "pattern_star": one(string(pattern=".*")),
    "pattern_negated": one(string(pattern="^[^abc]{3}$")), "pattern_quote": one(string(pattern='^"[a-z]"$')),
    "pattern_backslash": one(string(pattern=r"^\\[a-z]\\$")), "pattern_digits": one(string(pattern=r"^\d{3}-\d{4}$")),
    "pattern_word": one(string(pattern=r"^\w+ \w+$")), "pattern_not_space": one(string(pattern=r"^\S{4}$")),
    "pattern_alternatives": one(string(pattern="^(yes|no)$|^maybe$")), "pattern_unicode": one(string(pattern="^[à-ü日本]{2}$")),
    "pattern_escaped": one(string(pattern=r"^\u0041\x42\t$")), "pattern_mail": one(string(pattern=r"^[\w.]+@[\w.]+\.com$")),
    "pattern_slash": one(string(pattern=r"^\/v\d\/$")), "pattern_phone": one(string(pattern=r"^(\+\d{1,2} )?\d{3}$")),
    # numbers
    "minimum": one(integer(minimum=10)), "maximum": one(integer(maximum=-5)), "range": one(integer(minimum=1, maximum=5)),
    "range_signs": one(integer(minimum=-12, maximum=105)), "range_one": one(integer(minimum=7, maximum=7)),
    "exclusive": one(integer(exclusiveMinimum=0, exclusiveMaximum=3)), "range_large": one(integer(minimum=999, maximum=12345)),
    "bounds_both": one(integer(minimum=2, exclusiveMinimum=3, maximum=9, exclusiveMaximum=9)),
    "bounds_fraction": one(integer(minimum=0.5, maximum=2.5)), "number_range": one(number(minimum=0, maximum=1)),
    "number_negative": one(number(minimum=-2.5, maximum=-1)), "number_exclusive": one(number(exclusiveMinimum=0, maximum=10)),
    "number_minimum": one(number(minimum=3)), "number_maximum": one(number(maximum=3.5)),
    # arrays
    "array": one(array(integer())), "array_any": one(array()), "array_true": one(array(True)),
    "array_of_strings": one(array(string(maxLength=3), minItems=2)), "array_lengths": one(array(BOOLEAN, minItems=1, maxItems=3)),
    "array_exact": one(array(NULL, minItems=2, maxItems=2)), "array_empty": one(array(integer(), maxItems=0)),
    "array_none": one(array(False)), "array_of_arrays": one(array(array(integer(minimum=0, maximum=3), maxItems=2), maxItems=2)),
    "array_of_objects": one(array(POINT, maxItems=2)), "array_of_enums": one(array({"enum": ["é", "日本"]}, maxItems=4)),
    "array_of_unions": one(array({"anyOf": [integer(), NULL]}, maxItems=3)), "tuple": one({"prefixItems": [integer(), string()]}),
    "tuple_typed": one({"type": "array", "prefixItems": [NULL, BOOLEAN], "items": False, "minItems": 2, "maxItems": 2}),
    "not_unique": one(array(integer(), uniqueItems=False)),
    # unions
    "any_of": one({"anyOf": [string(maxLength=2), integer()]}), "nullable": one({"anyOf": [POINT, NULL]}),
    "any_of_objects": one({"anyOf": [one({"const": "a"}), one({"const": "b"})]}), "any_of_one": one({"anyOf": [integer()]}),
    "any_of_nested": one({"anyOf": [{"anyOf": [NULL, BOOLEAN]}, integer()]}),
    "any_of_required": {"type": "object", "properties": {"a": NULL, "b": NULL}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one_of_types": one({"oneOf": [string(), integer(), NULL]}),
    "one_of_enums": one({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c"]}, {"const": 1}]}),
    "one_of_tagged": one({"oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, "v": value}, "required": ["kind", "v"]}
        for kind, value in (("a", integer()), ("b", BOOLEAN), ("c", string(maxLength=2)))
    ]}),
    "one_of_tag_with_default": one(
        {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
         "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}}},
        **{"$defs": {
            name.title(): {"type": "object", "properties": {"kind": {"const": name, "default": name}, "age": integer(maximum=30)}}
            for name in ("cat", "dog")
        }},
    ),
    "one_of_typed": one({"type": "object", "oneOf": [one({"const": 1}), one({"const": 2})]}),
    "all_of_one": one({"allOf": [integer(minimum=1)], "description": "as pydantic writes it"}),
    # references
    "ref": one({"$ref": "#/$defs/P"}, **{"$defs": {"P": POINT}}), "ref_definitions": one({"$ref": "#/definitions/I"}, definitions={"I": integer()}),
    "ref_twice": {"properties": {"a": {"$ref": "#/$defs/P"}, "b": {"$ref": "#/$defs/P"}}, "required": ["a", "b"], "$defs": {"P": POINT}},
    "ref_chain": one({"$ref": "#/$defs/A"}, **{"$defs": {"A": {"$ref": "#/$defs/B"}, "B": array({"$ref": "#/$defs/C"}, maxItems=2), "C": BOOLEAN}}),
    "ref_escaped": one({"$ref": "#/$defs/a~1b~0c%20d"}, **{"$defs": {"a/b~c d": NULL}}),
    "ref_property": {"properties": {"a": integer(maximum=9), "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]},
    "ref_in_union": one({"anyOf": [{"$ref": "#/$defs/P"}, NULL]}, **{"$defs": {"P": POINT}}),
    "ref_described": one({"$ref": "#/$defs/P", "description": "a point"}, **{"$defs": {"P": POINT}}),
    "ref_by_id": {"$id": "urn:x", "properties": {"v": {"$ref": "urn:x#/$defs/B"}}, "required": ["v"], "$defs": {"B": BOOLEAN}},
    "ref_one_of": one({"oneOf": [{"$ref": "#/$defs/S"}, {"$ref": "#/$defs/N"}]}, **{"$defs": {"S": string(maxLength=2), "N": integer()}}),
    "ref_inner": one(
        {"$id": "urn:inner", "type": "object", "required": ["a", "b"],
         "properties": {"a": {"$ref": "#/$defs/T"}, "b": {"$ref": "urn:inner#/$defs/T"}}, "$defs": {"T": BOOLEAN}},
        **{"$defs": {"T": NULL}},
    ),
    # as clients send them
    "tgi_guidance": {
        "type": "object", "required": ["location", "activity", "animals_seen", "animals"],
        "properties": {"location": string(), "activity": string(), "animals_seen": integer(minimum=1, maximum=5),
                       "animals": array(string())},
    },
    "weather_tool": {
        "type": "object", "required": ["location", "format"], "additionalProperties": False,
        "properties": {"location": string(description="The city and state"), "format": string(enum=["celsius", "fahrenheit"])},
    },
    "pydantic_model": {
        "title": "Order", "type": "object", "required": ["id", "lines"],
        "$defs": {"Line": {"title": "Line", "type": "object", "required": ["sku"],
                           "properties": {"sku": string(title="Sku", pattern="^[A-Z]{3}$"), "count": integer(default=1, minimum=1)}}},
        "properties": {"id": string(format="uuid"), "lines": array({"$ref": "#/$defs/Line"}, maxItems=2),
                       "note": {"anyOf": [string(maxLength=8), NULL], "default": None}},
    },
    "nested_lists": one(array({"type": "object", "properties": {"t": array(string(maxLength=2), maxItems=2)}, "required": ["t"]}, maxItems=2)),
}  # fmt: skip

# Schemas that tools generated from OpenAPI contain, and what else only our own shard takes.
SERVED |= {
    "int32": one(integer(format="int32")), "password": one(string(format="password")), "float": one(number(format="float")),
    "annotated": one(string(nullable=True, example="x", xml={"name": "y"}, **{"x-order": 1}), propertyOrdering=["v"]),
    "unique": one(array({"enum": [1, 2]}, maxItems=1, uniqueItems=True)),
    "pattern_properties": one({"type": "object", "patternProperties": {"^x-": integer()}, "additionalProperties": False}),
    "recursive": {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, NULL]}}, "required": ["n"]},
    "tree": {"properties": {"name": string(maxLength=3), "children": array({"$ref": "#"}, maxItems=2)}, "required": ["name"]},
    "multiple_of": one(integer(multipleOf=3, minimum=0, maximum=50)), "multiple_of_cents": one(number(multipleOf=0.01, maximum=9, minimum=0)),
    "all_of": one({"allOf": [integer(), {"minimum": 3}]}),
    "all_of_objects": one({"allOf": [POINT, {"type": "object", "properties": {"z": number()}, "required": ["z"]}]}),
    "all_of_inherited": one(
        {"allOf": [{"$ref": "#/$defs/Pet"}, {"type": "object", "properties": {"bark": BOOLEAN}, "required": ["bark"]}]},
        **{"$defs": {"Pet": {"type": "object", "properties": {"name": string(maxLength=3)}, "required": ["name"]}}},
    ),
    "ref_elsewhere": one({"$ref": "#/components/schemas/P"}, components={"schemas": {"P": POINT}}),
    "ref_beside": one({"$ref": "#/$defs/A", "minimum": 3}, **{"$defs": {"A": integer()}}),
    "sixty_optional": {"properties": {f"field_{i}": string(maxLength=3) for i in range(60)}},
    "pattern_and_length": one(string(pattern="^a+b*$", minLength=3, maxLength=6)),
    "format_and_length": one(string(format="date", maxLength=10)), "hostname": one(string(format="hostname", maxLength=9)),
    "ipv4": one(string(format="ipv4")), "duration": one(string(format="duration")),
    "required_unknown": {"properties": {"a": NULL}, "required": ["b"]}, "map_counted": one({"type": "object", "maxProperties": 2}),
    "map_two": one({"type": "object", "additionalProperties": NULL, "minProperties": 2}), "no_shape": one({"maxLength": 3}),
    "any_of_beside": one({"anyOf": [integer()], "minimum": 3}), "bounds_narrow": one(number(minimum=0.1, maximum=0.9)),
    "tuple_lengths": one({"prefixItems": [NULL], "minItems": 2}), "unknown": one(integer(sometimes=1)),
}  # fmt: skip

REFUSED: dict[str, tuple[Schema, str]] = {
    "not": (one({"not": NULL}), "`not`"), "contains": (one(array(contains=integer())), "`contains`"),
    "if": (one({"if": NULL, "then": NULL}), "`if`"), "property_names": (one({"propertyNames": string()}), "`propertyNames`"),
    "dependent": (one(integer(), dependentRequired={"v": ["w"]}), "`dependentRequired`"),
    "unevaluated": (one({"allOf": [POINT, POINT], "unevaluatedProperties": False}), "`unevaluatedProperties`"),
    "look_ahead": (one(string(pattern="(?!a)b")), "look-ahead"), "back_reference": (one(string(pattern=r"(a)\1")), "backreferences"),
    "one_of_overlap": (one({"oneOf": [integer(), number()]}), "`oneOf`"), "one_of_any": (one({"oneOf": [{}, NULL]}), "`oneOf`"),
    "one_of_no_tag": (
        one({"oneOf": [{"properties": {"a": NULL}}, {"properties": {"a": NULL}}], "discriminator": {"propertyName": "a"}}), "may share a value",
    ),
    "one_of_odd_tag": (one({"oneOf": [{"properties": {"a": NULL}}, {}], "discriminator": "a"}), "may share a value"),
    "one_of_tag_list": (one({"oneOf": [{"properties": {"a": NULL}}, {}], "discriminator": {"propertyName": []}}), "may share a value"),
    "one_of_elsewhere": (
        one({"oneOf": [{"$id": "urn:a", "$ref": "#/$defs/T", "$defs": {"T": string()}}, {"$ref": "#/$defs/U"}]},
            **{"$defs": {"T": NULL, "U": string()}}),
        "may share a value",
    ),
    "enum_digits": (one({"enum": [123456789012345678901234567890]}), "more digits"),
    "ref_missing": (one({"$ref": "#/$defs/X"}), "leads nowhere"), "ref_url": (one({"$ref": "http://x/y"}), "only references into"),
    "ref_outer": (one({"$id": "urn:inner", "properties": {"a": {"$ref": "#/$defs/T"}}}, **{"$defs": {"T": NULL}}), "leads nowhere"),
    "ref_circle": (one({"$ref": "#/$defs/A"}, **{"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}), "leads back"),
    **{
        name: (one(schema), "nsatisfiable") for name, schema in {
            "false": False, "enum_no_value": string(enum=[1, 2]), "const_not_listed": {"const": 1, "enum": [2]},
            "lengths_crossed": string(minLength=3, maxLength=2), "bounds_crossed": integer(minimum=3, maximum=2),
            "items_crossed": array(NULL, minItems=3, maxItems=2), "format_and_pattern": string(pattern="a", format="date"),
        }.items()
    },
}  # fmt: skip

"""JSON schemas for our own shard: every match is valid; a schema that cannot be enforced is refused."""

import json

import jsonschema_rs
import pytest

from reference_server.errors import ValidationError
from reference_server.grammars.compile import compile_grammar
from reference_server.grammars.schema import FORMATS, MAX_OPTIONAL_PROPERTIES, read_schema
from reference_server.messages import Grammar, GrammarType
from tests.support.samples.grammar_samples import accepts, finite_json, sample
from tests.support.samples.schema_suite import REFUSED, SERVED, array, integer, one, string


def compiled(schema: object) -> Grammar:
    return compile_grammar("schema", json.dumps(schema))


def test_the_suite_is_large():
    assert len(SERVED) >= 130
    assert len(REFUSED) >= 20


def check_matches(name: str, count: int) -> None:
    schema = SERVED[name]
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    grammar = compiled(schema)
    assert grammar == Grammar(json.dumps(schema), GrammarType.JSON)
    for text in sample(grammar, seed=len(name), count=count):
        validator.validate(finite_json(text))


@pytest.mark.parametrize("name", SERVED)
def test_every_match_is_valid(name: str):
    check_matches(name, 4)


@pytest.mark.slow
def test_forty_matches_of_every_schema_are_valid():
    for name in SERVED:
        check_matches(name, 40)


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(name: str):
    schema, named = REFUSED[name]

    with pytest.raises(ValidationError) as caught:
        compiled(schema)

    assert caught.value.detail.startswith("cannot compile regex from schema: ")
    assert named in caught.value.detail


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tgi_guidance", '{ "location": "Paris", "activity": "run", "animals_seen": 5, "animals": ["cat", "dog"] }'),
        ("weather_tool", '{"location":"Rome, \\"IT\\"","format":"celsius"}'),
        ("all_optional", "{}"), ("all_optional", '{"c":"ü"}'), ("any", '{"v":[{"a":[]}]}'), ("any", '{"v":-1.5e+3}'),
        ("order", '{"z":null,"a":null,"m":null}'), ("number_range", '{"v":0.731}'), ("enum_unicode", '{"v":"日本語"}'),
        ("any_of_required", '{"b":null}'), ("quoted_name", '{"a\\"b":null}'), ("type_list", '{"v":null}'),
        ("minimum", '{"v":1000}'), ("pattern_quote", '{"v":"\\"q\\""}'), ("date", '{"v":"2024-02-28"}'),
        ("number", '{"v":6.02e23}'), ("closed", '{"v":1}'), ("open", '{"v":1,"w":2}'),
    ],
)  # fmt: skip
def test_valid_text_is_accepted(name: str, text: str):
    assert accepts(compiled(SERVED[name]), text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tgi_guidance", '{"location":"x","activity":"x","animals_seen":6,"animals":[]}'),
        ("order", '{"a":null,"z":null}'), ("weather_tool", '{"location":"x","format":"kelvin"}'),
        ("integer", '{"v": 01}'), ("integer", '{"v":  1}'), ("integer", '{"v":1}\n'), ("string", '{"v":"\x1f"}'),
        ("no_type", "null"), ("integer", '{"v":1,"w":2}'), ("unevaluated", '{"v":1,"w":2}'),
    ],
)  # fmt: skip
def test_invalid_text_and_unlisted_properties_are_not(name: str, text: str):
    assert not accepts(compiled(SERVED[name]), text)


def test_an_integer_ends_after_nineteen_digits():
    grammar = compiled(one(integer()))

    assert accepts(grammar, '{"v":' + "9" * 18 + "}")
    assert not accepts(grammar, '{"v":1' + "0" * 19 + "}")


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("int32", ['{"v":5}'], ['{"v":"5"}']),
        ("annotated", ['{"v":"x"}'], ['{"v":null}']),
        ("unique", ['{"v":[1]}'], ['{"v":[3]}']),
        ("pattern_properties", ['{"v":{"x-a":1}}', '{"v":{}}'], ['{"v":{"a":1}}', '{"v":{"x-a":null}}']),
        ("recursive", ['{"n":null}', '{"n":{"n":{"n":null}}}'], ['{"n":1}', '{"n":{}}']),
        ("multiple_of", ['{"v":0}', '{"v":48}'], ['{"v":4}', '{"v":51}']),
        ("multiple_of_cents", ['{"v":1.25}'], ['{"v":1.255}']),
        ("all_of", ['{"v":3}'], ['{"v":2}', '{"v":null}']),
        ("all_of_objects", ['{"v":{"x":1,"y":2,"z":3}}'], ['{"v":{"x":1,"y":2}}', '{"v":{"z":3}}']),
        ("all_of_inherited", ['{"v":{"name":"Rex","bark":true}}'], ['{"v":{"name":"Rex"}}']),
        ("pattern_and_length", ['{"v":"aab"}'], ['{"v":"ab"}', '{"v":"aaaaabb"}']),
        ("format_and_length", ['{"v":"2024-02-28"}'], ['{"v":"2023-02-29"}']),
        ("sixty_optional", ["{}", '{"field_3":"a","field_59":"b"}'], ['{"field_59":"b","field_3":"a"}']),
    ],
)
def test_hardening_R18_schemas_of_openapi_are_enforced(name: str, valid: list[str], invalid: list[str]):
    grammar = compiled(SERVED[name])

    assert [text for text in valid + invalid if accepts(grammar, text)] == valid


def test_hardening_R18_an_option_of_llguidance_in_a_schema_is_ignored():
    schema = one(integer(), **{"x-guidance": {"lenient": True, "whitespace_pattern": "-"}})

    assert accepts(compiled(schema), '{ "v": 1}')
    assert not accepts(compiled(schema), '{-"v":1}')


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_llguidance_knows_every_format_that_is_not_an_annotation(name: str):
    assert compiled(one(string(format=name))).type is GrammarType.JSON


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        pytest.param(one({"description": "x" * 262_144}), "bytes", id="Q9_bytes"),
        pytest.param(
            json.loads('{"properties":{"a":' * 40 + '{"type":"null"}' + "}}" * 40), "64 levels", id="Q9_depth"
        ),
        pytest.param(
            {"properties": {f"p{i}": {"type": "null"} for i in range(MAX_OPTIONAL_PROPERTIES + 1)}}, "optional",
            id="Q9_optional",
        ),
        pytest.param(
            {"properties": {f"p{i}": {"properties": {f"q{j}": {} for j in range(200)}} for i in range(10)}}, "optional",
            id="Q9_optional_nested",
        ),
        pytest.param(one({"allOf": [{"multipleOf": prime} for prime in (7, 11, 13)]}), "multipleOf", id="lcm"),
        pytest.param(one(integer(multipleOf=999_983)), "multipleOf", id="multiple"),
        pytest.param(one({"oneOf": [{"const": i} for i in range(257)]}), "oneOf", id="oneOf"),
        pytest.param(one({"enum": [f"value{i}" for i in range(15_000)]}), "too big", id="Q10_enum"),
        pytest.param(
            one({"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": k}}} for k in range(2)]} for i in range(16)]}),
            "schema too large", id="product_of_unions",
        ),
        pytest.param(
            one(string(pattern="".join(f"[{letter}-z]?" for letter in "abcdefgh" * 300))), "states", id="Q13_pattern"
        ),
    ],
)  # fmt: skip
def test_reliability_4_5_61_too_complex_schemas_are_refused(schema: object, limit: str):
    with pytest.raises(ValidationError) as caught:
        compiled(schema)

    assert caught.value.detail.startswith("cannot compile regex from schema: too complex (")
    assert limit in caught.value.detail


@pytest.mark.parametrize(
    "schema",
    [
        one({"$ref": "#/$defs/a0"}, **{"$defs": {
            **{f"a{i}": {"prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 10} for i in range(9)}, "a9": {},
        }}),
        one(string(maxLength=1_000_000)),
        one(array({"type": "null"}, minItems=1_000_000)),
        one({"$ref": "#"}),
        one({"$ref": "#/$defs/A"}, **{"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}}),
    ],
    ids=["fan_out", "long_string", "many_items", "endless", "left_recursive"],
)  # fmt: skip
def test_reliability_4_5_61_schemas_that_only_look_large_are_served(schema: object):
    assert compiled(schema).type is GrammarType.JSON


def test_reliability_4_5_61_depth_28_is_served():
    schema = {"type": "null"}
    for _ in range(28):
        schema = one(schema)

    assert accepts(compiled(schema), '{"v":' * 28 + "null" + "}" * 28)


def test_a_reference_to_an_invalid_schema_is_refused():
    with pytest.raises(ValidationError, match="grammar is not valid"):
        compiled(one({"$ref": "#/x-models/A"}, **{"x-models": {"A": {"properties": 5}}}))


def test_a_schema_is_read_strictly():
    with pytest.raises(ValidationError, match="NaN is not JSON"):
        read_schema('{"properties": {"a": {"const": NaN}}}')

"""JSON schemas as regexes: whatever a regex lets through parses and is valid; what cannot be promised is refused."""

import json

import jsonschema_rs
import pytest

from reference_server.errors import ValidationError
from reference_server.grammars.compile import compile_grammar
from reference_server.grammars.schema import MAX_PROPERTIES
from tests.support.regex_samples import accepts, sample
from tests.support.schema_suite import REFUSED, SERVED, one


def compiled(schema: object) -> str:
    return compile_grammar("schema", json.dumps(schema))


def test_the_suite_is_large():
    assert len(SERVED) >= 100
    assert len(REFUSED) >= 30


@pytest.mark.parametrize("name", SERVED)
def test_every_match_is_valid(name: str):
    schema = SERVED[name]
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)

    for text in sample(compiled(schema), seed=len(name), count=12):
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    "bounds", [{}, {"minimum": 0}, {"exclusiveMaximum": 10**18}, {"minDigits": 1, "maxDigits": 18}]
)
def test_an_integer_ends_after_eighteen_digits(bounds: dict[str, int]):
    regex = compiled(one({"type": "integer", **bounds}))

    assert accepts(regex, '{"v":' + "9" * 18 + "}")
    assert not accepts(regex, '{"v":1' + "0" * 17 + "1}")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_promised_is_refused_by_name(name: str):
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
    ],
)  # fmt: skip
def test_what_is_meant_is_let_through(name: str, text: str):
    assert accepts(compiled(SERVED[name]), text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tgi_guidance", '{"location":"x","activity":"x","animals_seen":6,"animals":[]}'),
        ("order", '{"a":null,"z":null}'), ("weather_tool", '{"location":"x","format":"kelvin"}'),
        ("integer", '{"v": 01}'), ("integer", '{"v":  1}'), ("integer", '{"v":1}\n'), ("string", '{"v":"\x1f"}'),
    ],
)  # fmt: skip
def test_what_is_not_meant_is_not(name: str, text: str):
    assert not accepts(compiled(SERVED[name]), text)


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        pytest.param(one({"description": "x" * 262_144}), "bytes", id="Q9_bytes"),
        pytest.param(
            json.loads('{"properties":{"a":' * 40 + '{"type":"null"}' + "}}" * 40), "64 levels", id="Q9_depth"
        ),
        pytest.param(
            {"properties": {f"p{i}": {"type": "null"} for i in range(MAX_PROPERTIES + 1)}}, "properties", id="Q9"
        ),
        pytest.param(
            one({"$ref": "#/$defs/a0"}, **{"$defs": {
                **{f"a{i}": {"prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 10} for i in range(9)},
                "a9": {"type": "null"},
            }}),
            "schemas once references are followed", id="Q9_nodes",
        ),
        pytest.param({"properties": {f"p{i}": {"type": "null"} for i in range(400)}}, "length", id="Q10_length"),
        pytest.param(one({"type": "string", "maxLength": 20_000}), "counted repetitions", id="Q10_repetitions"),
        pytest.param(
            one({"$ref": "#/$defs/a0"}, **{"$defs": {
                **{f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(900)}, "a900": {"type": "null"},
            }}),
            "references nested too deeply", id="deep_references",
        ),
    ],
)  # fmt: skip
def test_reliability_4_5_61_too_complex_schemas_are_refused(schema: object, limit: str):
    with pytest.raises(ValidationError) as caught:
        compiled(schema)

    assert caught.value.detail.startswith("cannot compile regex from schema: too complex (")
    assert limit in caught.value.detail


def test_reliability_4_5_61_depth_28_is_served():
    schema = {"type": "null"}
    for _ in range(28):
        schema = one(schema)

    assert accepts(compiled(schema), '{"v":' * 28 + "null" + "}" * 28)

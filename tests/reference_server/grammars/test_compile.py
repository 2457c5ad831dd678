"""JSON schemas for a shard that takes regexes: the regex that TGI's router would send."""

import json

import pytest

from reference_server.errors import ValidationError
from reference_server.grammars.compile import compile_grammar
from reference_server.messages import GrammarType
from tests.support.samples.grammar_samples import accepts
from tests.support.samples.schema_suite import SERVED, one


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("tgi_guidance", '{"location":"x","activity":"y","animals_seen":1,"animals":["z"]}', "{}"),
        ("weather_tool", '{ "location": "Rome", "format": "celsius" }', '{"location":"x","format":"kelvin"}'),
        ("ref_twice", '{"a":{"x":1,"y":2},"b":{"x":1,"y":2}}', '{"a":1,"b":2}'),
    ],
)
def test_a_foreign_shard_gets_a_regex(name: str, valid: str, invalid: str):
    grammar = compile_grammar("schema_regex", json.dumps(SERVED[name]))

    assert grammar.type is GrammarType.REGEX
    assert accepts(grammar, valid)
    assert not accepts(grammar, invalid)


def test_a_foreign_shard_gets_a_regex_for_any_object():
    grammar = compile_grammar("object_regex", "")

    assert (accepts(grammar, '{"a":[1]}'), accepts(grammar, "[]")) == (True, False)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object"}, "grammar is not valid: Grammar must have a 'properties' field"),
        (one({"not": {}}), "cannot compile regex from schema: Unsupported"),
        pytest.param(
            {"properties": {f"p{i}": {} for i in range(400)}},
            "cannot compile regex from schema: too complex (length",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_schema_without_a_regex_is_refused(schema: object, named: str):
    with pytest.raises(ValidationError) as caught:
        compile_grammar("schema_regex", json.dumps(schema))

    assert caught.value.detail.startswith(named)

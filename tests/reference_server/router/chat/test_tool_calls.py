import json
import uuid
from itertools import pairwise
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.errors import ToolError
from reference_server.grammars.compile import compile_grammar
from reference_server.router.chat.tool_calls import CallReader, ToolCall, next_call_id, parse_call
from reference_server.router.chat.tools import offer_of
from reference_server.router.schemas.openai import ChatMessage, ChatRequest
from tests.support.samples.grammar_samples import finite_json, sample

JSON_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | JSON_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(JSON_TEXT, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(JSON_TEXT.filter(lambda name: name != "_name"), VALUES, max_size=4)


def read(*texts: str) -> tuple[CallReader, list[str]]:
    reader = CallReader()
    return reader, [reader.add(text) for text in texts]


@given(arguments=ARGUMENTS, name=JSON_TEXT, cuts=st.lists(st.integers(0, 200), max_size=12), is_ascii=st.booleans())
def test_http_E10_deltas_are_the_models_own_json_wherever_its_tokens_end(
    arguments: dict[str, Any], name: str, cuts: list[int], is_ascii: bool
):
    spelled = json.dumps(arguments, ensure_ascii=is_ascii, separators=(",", ": "))
    inner = f", {spelled[1:]}" if arguments else "}"
    text = f'{{"function": {{"_name": {json.dumps(name, ensure_ascii=is_ascii)}{inner}}}'
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reader, deltas = read(*(text[start:end] for start, end in pairwise(places)))

    assert "".join(deltas) == (f"{{ {spelled[1:]}" if arguments else "{}")
    assert reader.is_complete
    assert (reader.name, json.loads("".join(deltas))) == (name, json.loads(parse_call(text).arguments))


SCHEMAS = {
    "order": {
        "type": "object",
        "properties": {
            "note": {"type": "string", "maxLength": 6},
            "sum": {"type": "number"},
            "paid": {"type": "boolean"},
            "lines": {"type": "array", "items": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        },
        "required": ["sum"],
    },
    "color": {"properties": {"name": {"enum": ["}", 'r"ed', "\\", "é"]}}, "required": ["name"]},
    "now": {},
}


def test_every_text_of_the_grammar_is_a_call_that_its_schema_allows():
    tools = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]
    offer = offer_of(ChatRequest.model_validate({"messages": [], "tools": tools}))
    assert offer is not None
    grammar = compile_grammar("schema", json.dumps(offer.grammar().value))
    called = set()

    for text in sample(grammar, seed=1, count=120):
        call = parse_call(text)
        reader, deltas = read(*text)

        assert (reader.is_complete, reader.name) == (True, call.name)
        assert json.loads("".join(deltas)) == json.loads(call.arguments)
        jsonschema_rs.validate(
            {"additionalProperties": False, **SCHEMAS.get(call.name, {})}, finite_json(call.arguments)
        )
        called.add(call.name)
    assert called == {*SCHEMAS, "no_tool"}


@pytest.mark.parametrize(
    ("texts", "deltas"),
    [
        pytest.param(
            ('{"function": {"_name": "get_w', '",', ' "', "city", '":', ' "', "Rome", '"}}'),
            ["", "{", ' "', "city", '":', ' "', "Rome", '"}'],
            id="H54",
        ),
        pytest.param(('{"function":{"_name":"f"', "}", "}"), ["", "{}", ""], id="no_arguments"),
        pytest.param(('{"function":{"_name":"f","a":"}', '"}', "}", " "), ['{"a":"}', '"}', "", ""], id="one_token"),
        pytest.param(('{"function":{"_name":"f","a":"\\', '"}"}}'), ['{"a":"\\', '"}"}'], id="escape_across_tokens"),
        pytest.param(('{"function":{"_name":"f" ', ", ", '"a":1}}'), ["", "{ ", '"a":1}'], id="spaces"),
    ],
)
def test_http_4_9_each_token_adds_its_part_of_the_arguments(texts: tuple[str, ...], deltas: list[str]):
    reader, added = read(*texts)

    assert (added, reader.name is not None, reader.is_complete) == (deltas, True, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "{}",
        '{"function": 5}',
        '{"function": {"_name": 5}}',
        '{"function": {"_name": "f", "a": NaN}}',
        '{"function": {"_name": "f", "a": "\\ud800"}}',
        '{"function": {"_name": "f", "a": ' + "[" * 5000 + "]" * 5000 + "}}",
        '{"function": {"_name": "f", "a": 1}',
        '{"function": {"_name": "f", "a": [}}',
        '{"function": {"_name": "f"}} and more',
    ],
)
def test_http_4_7_texts_that_are_not_calls(text: str):
    reader, _ = read(text)

    assert not reader.is_complete
    with pytest.raises(ToolError, match="Tool error: Failed to parse generated text: "):
        parse_call(text)


@pytest.mark.parametrize("number", ["1.50", "-0", "1e+99999", "12345678901234567890123", "9" * 5000])
def test_arguments_keep_the_spelling_of_their_numbers(number: str):
    text = f'{{"function": {{"_name": "f", "a": [ {number} ]}}}}'

    assert parse_call(text) == ToolCall("f", f'{{"a":[{number}]}}')


def test_arguments_are_compact_and_in_the_models_order():
    text = '{ "function": { "_name": "f", "b": { "y": "é \\" x" }, "a": null } }'

    assert parse_call(text).arguments == '{"b":{"y":"é \\" x"},"a":null}'


@pytest.mark.parametrize(("ids", "expected"), [([], "0"), (["0"], "1"), (["7", "3"], "8")], ids=str)
def test_http_4_9_ids_count_on(ids: list[str], expected: str):
    assert next_call_id([calling(each) for each in ids]) == expected


@pytest.mark.parametrize("other", ["call_1", "-1", "", "1.0", "²", "9" * 5000])
def test_http_4_9_after_ids_that_are_not_numbers_the_next_is_random(other: str):
    made = {next_call_id([calling("0"), calling(other)]) for _ in range(2)}

    assert len(made) == 2
    assert {uuid.UUID(each).version for each in made} == {4}


def calling(call_id: str) -> ChatMessage:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {}}}
    return ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})

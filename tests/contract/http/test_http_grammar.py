"""Acceptance examples of grammars over HTTP."""

import asyncio
import json
from typing import Any

import pytest

from reference_server.messages import GrammarType
from reference_server.router.validation.request_rules import GenerationLimits
from tests.support.samples.grammar_samples import accepts, grammar_of
from tests.support.samples.grammars import CompilingHere, compiler
from tests.support.servers.serving import Served, endless, serve

SCHEMA = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


def refused(text: str) -> dict[str, str]:
    return {"error": f"Input validation error: {text}", "error_type": "validation"}


async def chat(served: Served, **body: Any) -> Any:
    body = {"model": "tgi", "messages": [{"role": "user", "content": "hi"}], **body}
    return await served.client.post("/v1/chat/completions", json=body)


async def test_http_H37_a_schema_needs_properties():
    async with serve(compile_grammar=compiler().compile) as served:
        response = await served.generate(grammar={"type": "json", "value": {"type": "object"}})

    assert response.status_code == 422
    assert response.json() == refused("grammar is not valid: Grammar must have a 'properties' field")


@pytest.mark.parametrize("accepts_schemas", [True, False])
@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA, "strict": True}},
    ],
    ids=["json", "json_object", "text", "json_schema"],
)
async def test_http_H38_the_model_server_gets_the_schema_or_a_regex(grammar: dict[str, Any], accepts_schemas: bool):
    async with serve(compile_grammar=compiler(accepts_schemas=accepts_schemas).compile) as served:
        response = await served.generate(grammar=grammar)
        (request,) = served.requests

    assert response.status_code == 200
    assert request.parameters.grammar_type is (GrammarType.JSON if accepts_schemas else GrammarType.REGEX)
    texts = ('{"a":1}', '{ "a" : 1 }', '{"a":"1"}', '{"a":1,"b":2}')
    assert [accepts(grammar_of(request), text) for text in texts] == [True, True, False, False]


async def test_http_H39_grammars_can_be_switched_off():
    async with serve() as served:
        for grammar in ({"type": "json", "value": SCHEMA}, {"type": "regex", "value": "a+"}):
            response = await served.generate(grammar=grammar)

            assert response.status_code == 422
            assert response.json() == refused("grammar is not supported")


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": False}},
        {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
    ],
    ids=["openai", "tgi_json_schema", "tgi_json", "tgi_json_object"],
)
async def test_http_H50_a_response_format_is_the_grammar(response_format: dict[str, Any]):
    async with serve(compile_grammar=compiler().compile) as served:
        response = await chat(served, response_format=response_format, tools=[])
        (request,) = served.requests

    assert response.status_code == 200
    assert accepts(grammar_of(request), '{"a":1}')
    assert not accepts(grammar_of(request), '{"a":null}')


async def test_http_4_10_any_json_object():
    async with serve(compile_grammar=compiler().compile) as served:
        assert (await chat(served, response_format={"type": "json_object"})).status_code == 200
        (request,) = served.requests

    texts = ("{}", '{"any": [1, {"x": null}]}', "[]", "1")
    assert [accepts(grammar_of(request), text) for text in texts] == [True, True, False, False]


async def test_http_4_10_text_is_no_grammar():
    async with serve(compile_grammar=compiler().compile) as served:
        assert (await chat(served, response_format={"type": "text"})).status_code == 200
        (request,) = served.requests

    assert (request.parameters.grammar, request.parameters.grammar_type) == ("", GrammarType.NONE)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        pytest.param({"type": "json", "value": 5}, "grammar is not supported", id="row_22_number"),
        pytest.param({"type": "json", "value": None}, "grammar is not supported", id="row_22_null"),
        pytest.param({"type": "json", "value": [1]}, "grammar is not supported", id="row_22_list"),
        pytest.param({"type": "json", "value": "{"}, "grammar is not valid: Expecting property name", id="row_23"),
        pytest.param(
            {"type": "json", "value": {"properties": {"a": {"type": "strin"}}}}, 'grammar is not valid: "strin" is not',
            id="row_24",
        ),
        pytest.param(
            {"type": "json_schema", "value": {"schema": 5}}, "grammar is not valid: 5 is not", id="row_24_json_schema"
        ),
        pytest.param(
            {"type": "json_schema", "value": {"schema": {}}}, "grammar is not valid: Grammar must have", id="row_25"
        ),
        pytest.param(
            {"type": "json", "value": {"properties": {"a": {"not": {}}}}},
            "cannot compile regex from schema: `not` is not supported",
            id="row_26",
        ),
        pytest.param(
            {"type": "regex", "value": "(a{200}){200}"}, "grammar is not valid: too complex (counted", id="Q10"
        ),
    ],
)  # fmt: skip
async def test_reliability_4_5_59_a_wrong_grammar_is_refused_with_the_reason(grammar: dict[str, Any], text: str):
    async with serve(compile_grammar=compiler().compile) as served:
        response = await served.generate(grammar=grammar)

    assert response.status_code == 422
    assert response.json()["error"].startswith(f"Input validation error: {text}")


@pytest.mark.parametrize("regex", ["(", "(?=a)b", r"(a)\1", "[z-a]", "a\\"])
async def test_reliability_4_5_55_a_regex_that_does_not_parse_never_reaches_a_batch(regex: str):
    async with serve(compile_grammar=compiler().compile) as served:
        bad, good = await asyncio.gather(
            served.generate(grammar={"type": "regex", "value": regex}), served.generate("mate")
        )

        assert (bad.status_code, bad.json()["error_type"]) == (424, "generation")
        assert good.status_code == 200
        assert len(served.requests) == 1


async def test_a_continuation_sends_the_length_of_its_grammar_prefix():
    limits = GenerationLimits(max_input_tokens=4000, max_total_tokens=4096)
    async with serve(script=endless, compile_grammar=compiler().compile, limits=limits) as served:
        await served.generate(max_new_tokens=2100, grammar={"type": "regex", "value": "( x)+"})
        await served.generate(max_new_tokens=1030)

    parameters = [request.parameters for request in served.requests]
    assert [each.grammar_prefix_chars for each in parameters] == [0, 2048, 4096, 0, 0]
    assert served.requests[2].text == "hello" + " x" * 2048


async def test_a_long_prompt_is_reported_before_a_bad_grammar():
    async with serve(compile_grammar=compiler().compile) as served:
        response = await served.generate(" ".join(["word"] * 1100), grammar={"type": "regex", "value": "("})

    assert "must have less than 1024 tokens" in response.json()["error"]


async def test_reliability_4_5_62_a_grammar_of_many_clients_is_compiled_once():
    pool = CompilingHere()
    async with serve(compile_grammar=compiler(pool).compile) as served:
        grammar = {"type": "json", "value": SCHEMA}
        responses = await asyncio.gather(*(served.generate(grammar=grammar) for _ in range(60)))

    assert {response.status_code for response in responses} == {200}
    assert len(pool.jobs) == 1

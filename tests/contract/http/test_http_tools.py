"""Acceptance examples of tools over HTTP."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from reference_server.messages import Request
from tests.support.samples.grammar_samples import accepts, grammar_of
from tests.support.samples.grammars import compiler
from tests.support.servers.serving import Served, endless, events_of, serve, usage_json
from tests.support.wire.scripted_shard import Reply, say

USER = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GET_W = {"type": "function", "function": {"name": "get_w", "description": "Weather", "parameters": CITY}}
PING = {"type": "function", "function": {"name": "ping"}}
CALL = '{"function": {"_name": "get_w", "city":"Rome"}}'
#: Script J of H54.
J = ('{"function": {"_name": "get_w', '",', ' "', "city", '":', ' "', "Rome", '"}}')
#: Eleven tokens, and end-of-sequence.
DECLINED = ("{", '"function"', ":", " {", '"_', "name", '":', ' "', "no_tool", '"', "}}")


async def chat(served: Served, **body: Any) -> httpx.Response:
    return await served.client.post("/v1/chat/completions", json={"messages": [USER], "tools": [GET_W], **body})


def serve_tools(*texts: str, **changes: Any) -> Any:
    return serve(script=say(*texts), compile_grammar=compiler().compile, **changes)


def declining(then: Callable[[Request], Reply]) -> Callable[[Request], Reply]:
    """A model that selects no tool, and then answers with text."""
    return lambda request: Reply(DECLINED) if request.parameters.grammar else then(request)


def calls_of(events: list[Any], index: int = 0) -> list[dict[str, Any]]:
    """The tool calls of a stream's deltas."""
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return [call for choice in choices for call in choice["delta"].get("tool_calls", [])]


def arguments_of(events: list[Any], index: int = 0) -> str:
    return "".join(call["function"]["arguments"] for call in calls_of(events, index))


async def test_http_H53_a_call():
    async with serve_tools(CALL) as served:
        body = (await chat(served, tool_choice="auto")).json()

    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "0",
                        "type": "function",
                        "function": {"description": None, "name": "get_w", "arguments": '{"city":"Rome"}'},
                    }
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]
    assert body["usage"]["completion_tokens"] == 2


async def test_http_H54_a_call_streamed():
    async with serve_tools(*J) as served:
        events = events_of((await chat(served, stream=True, stream_options={"include_usage": True})).text)

    *deltas, last, usage, done = events
    first = deltas[0]["choices"][0]
    assert first == {
        "index": 0,
        "delta": {
            "role": "assistant",
            "tool_calls": [
                {"index": 0, "id": "0", "type": "function", "function": {"name": "get_w", "arguments": "{"}}
            ],
        },
        "logprobs": None,
        "finish_reason": None,
    }
    assert [call["function"]["name"] for call in calls_of(events)] == ["get_w"] + [None] * 6
    assert arguments_of(events) == '{ "city": "Rome"}'
    assert {chunk["choices"][0]["finish_reason"] for chunk in deltas} == {None}
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["usage"]["completion_tokens"], done) == (9, "[DONE]")


async def test_hardening_R19_every_chunk_of_a_call_has_a_part_of_it():
    async with serve_tools(*J) as served:
        whole = events_of((await chat(served, stream=True)).text)[:-1]
        cut = events_of((await chat(served, stream=True, max_tokens=4)).text)[:-1]

    for chunks, reason in ((whole, "tool_calls"), (cut, "length")):
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert all(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + [reason]


async def test_http_H55_no_tool_is_answered_by_a_run_without_tools():
    async with serve(script=declining(endless), compile_grammar=compiler().compile) as served:
        response = await chat(served, max_tokens=20, logprobs=True, seed=3)
        first, second = served.requests
        counts = [await served.metric(name) for name in ("tgi_request_count", "tgi_request_success")]

    (choice,) = response.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": " x" * 20}
    assert (choice["finish_reason"], len(choice["logprobs"]["content"])) == ("length", 20)
    assert response.json()["usage"] == usage_json(1, 20)
    assert (second.text, second.parameters.grammar) == ("<|user|>hi<|assistant|>", "")
    assert (first.parameters.seed, second.parameters.seed) == (3, 3)
    assert (response.headers["x-prompt-tokens"], response.headers["x-compute-characters"]) == ("1", "23")
    assert response.headers["x-generated-tokens"] == "20"
    assert counts == ["3", "2"]


async def test_http_H55_a_stream_contains_nothing_of_the_first_run():
    async with serve(script=declining(endless), compile_grammar=compiler().compile, permits=1) as served:
        body = {"stream": True, "max_tokens": 12, "stream_options": {"include_usage": True}}
        *chunks, last, usage, done = events_of((await chat(served, **body)).text)
        counts = [await served.metric(name) for name in ("tgi_request_count", "tgi_request_success")]

    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == [" x"] * 11
    assert last["choices"][0]["delta"] == {"role": "assistant", "content": " x"}
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["usage"] == usage_json(1, 12)
    assert done == "[DONE]"
    assert counts == ["3", "1"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["nope", {"type": "function", "function": {"name": "nope"}}], ids=str)
async def test_http_H56_a_tool_that_is_not_offered(choice: Any, stream: bool):
    async with serve_tools(CALL) as served:
        response = await chat(served, tool_choice=choice, stream=stream)

    assert response.status_code == 422
    assert response.json() == {"error": "Tool error: Tool with name nope not found", "error_type": "tool_error"}


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"type": "function"},
        {"type": "custom", "function": {"name": "get_w"}},
        {"type": None, "function": {"name": "get_w"}},
        {"function": {}},
        {"function": "get_w"},
        {"name": "get_w"},
        ["get_w"],
        True,
    ],
    ids=str,
)
async def test_http_4_6_other_choices_are_refused(choice: Any):
    async with serve_tools(CALL) as served:
        response = await chat(served, tool_choice=choice)

    assert (response.status_code, response.json()["error_type"]) == (422, "validation")
    assert "tool_choice" in response.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_http_H50_grammar_and_tools(stream: bool):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {}}}}}
    async with serve_tools(CALL) as served:
        response = await chat(served, response_format=schema, stream=stream)

    assert response.status_code == 422
    assert response.json() == {
        "error": "Tool error: Grammar and tools are mutually exclusive",
        "error_type": "tool_error",
    }


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("auto", ["get_w", "ping", "no_tool"]),
        (None, ["get_w", "ping", "no_tool"]),
        ("required", ["get_w", "ping"]),
        ("ping", ["ping"]),
        ({"type": "function", "function": {"name": "get_w"}}, ["get_w"]),
        # TGI refuses it, but huggingface_hub's ChatCompletionInputToolChoiceClass sends it.
        ({"function": {"name": "get_w"}}, ["get_w"]),
    ],
    ids=str,
)
async def test_http_4_6_the_grammar_holds_the_answer_to_the_tools_of_the_choice(choice: Any, called: list[str]):
    texts = {
        "get_w": '{"function": {"_name": "get_w", "city": "Rome"}}',
        "ping": '{ "function": {"_name": "ping"} }',
        "no_tool": '{"function":{"_name":"no_tool"}}',
    }
    async with serve_tools(CALL) as served:
        await chat(served, tools=[GET_W, PING], tool_choice=choice)
        grammar = grammar_of(served.requests[0])

    assert [name for name, text in texts.items() if accepts(grammar, text)] == called
    refused = ("{}", '{"function": {"_name": "get_w"}}', '{"function": {"_name": "ping", "x": 1}}', "hello")
    assert not any(accepts(grammar, text) for text in refused)


async def test_http_4_6_none_is_plain_chat():
    async with serve_tools(" a", " b") as served:
        body = (await chat(served, tool_choice="none")).json()
        (request,) = served.requests

    assert body["choices"][0]["message"] == {"role": "assistant", "content": " a b"}
    assert (request.text, request.parameters.grammar) == ("<|user|>hi<|assistant|>", "")


async def test_http_4_6_a_choice_without_tools_has_no_effect():
    async with serve_tools(" a") as served:
        for body in ({"tools": []}, {"tools": None}, {"tools": None, "tool_choice": "nope"}):
            assert (await chat(served, **body)).json()["choices"][0]["message"]["content"] == " a"


@pytest.mark.parametrize("stream", [False, True])
async def test_http_H39_without_grammars_there_are_no_tools(stream: bool):
    async with serve(script=say(CALL)) as served:
        response = await chat(served, stream=stream)

    assert "Input validation error: grammar is not supported" in response.text
    assert response.status_code == (200 if stream else 422)


async def test_http_4_5_the_prompt_describes_the_tools():
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    async with serve_tools(CALL, template=template) as served:
        body = {"messages": [USER], "tools": [PING], "tool_choice": "required", "tool_prompt": "Call!"}
        text = (await served.client.post("/chat_tokenize", json=body)).json()["templated_text"]
        await chat(served, **body)
        prompt = served.requests[0].text

    tools = [{"type": "function", "function": {"description": None, "name": "ping", "arguments": NO_ARGUMENTS}}]
    assert text == f"[hi\n---\n{json.dumps(tools, separators=(',', ':'))}\nCall!]"
    assert prompt == text


NO_ARGUMENTS = '{"type":"object","properties":{}}'


async def test_http_4_2_a_conversation_with_calls_and_their_results():
    call = {"id": "4", "type": "function", "function": {"name": "get_w", "arguments": '{"city":"Rome"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "4", "content": "sunny"},
    ]
    async with serve_tools(*J) as served:
        events = events_of((await chat(served, messages=messages, stream=True, tool_prompt="T")).text)
        prompt = served.requests[0].text

    assert prompt.startswith('<|user|>hi<|assistant|>[{"id":"4","type":"function","function":{"description":null,')
    assert "<|tool|>sunny\n---\n[" in prompt
    assert prompt.endswith("\nT<|assistant|>")
    assert {call["id"] for call in calls_of(events)} == {"5"}


@pytest.mark.parametrize("texts", [(*J[:-1],), ("{}",), ("hello",), ('{"function": {"city": "Rome"}}',)], ids=str)
async def test_reliability_4_4_54_a_text_that_is_no_call(texts: tuple[str, ...]):
    async with serve_tools(*texts) as served:
        single = await chat(served)
        *deltas, last, done = events_of((await chat(served, stream=True)).text)

    assert single.status_code == 422
    assert single.json()["error_type"] == "tool_error"
    assert single.json()["error"].startswith("Tool error: Failed to parse generated text: ")
    assert json.dumps("".join(texts)) in single.json()["error"]
    assert all("tool_calls" in chunk["choices"][0]["delta"] for chunk in deltas)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert [call["function"]["arguments"] for call in calls_of([last, done])] == ([""] if deltas else [])
    assert done == "[DONE]"


async def test_http_4_9_a_truncated_call_has_the_finish_reason_length():
    async with serve_tools(*J) as served:
        single = await chat(served, max_tokens=5)
        events = events_of((await chat(served, max_tokens=5, stream=True)).text)

    assert single.status_code == 422
    assert arguments_of(events) == '{ "city":'
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_http_4_11_a_complete_call_is_a_call_with_every_finish_reason():
    async with serve_tools(*J) as served:
        single = (await chat(served, max_tokens=len(J))).json()
        events = events_of((await chat(served, max_tokens=len(J), stream=True)).text)

    assert single["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert arguments_of(events) == '{ "city": "Rome"}'


async def test_http_4_9_logprobs_are_of_the_token_that_triggers_a_delta():
    async with serve_tools(*J) as served:
        events = events_of((await chat(served, stream=True, logprobs=True)).text)

    tokens = [event["choices"][0]["logprobs"]["content"][0]["token"] for event in events[:-1]]
    assert tokens == [*J[1:]]


async def test_http_E11_each_choice_calls_for_itself():
    declines = {6: DECLINED}

    def script(request: Request) -> Reply:
        if not request.parameters.grammar:
            return Reply((" a", " b"))
        return Reply(declines.get(request.parameters.seed, J))

    async with serve(script=script, compile_grammar=compiler().compile) as served:
        single = (await chat(served, n=2, seed=5)).json()
        events = events_of((await chat(served, n=2, seed=5, stream=True)).text)

    assert [choice["finish_reason"] for choice in single["choices"]] == ["tool_calls", "stop"]
    assert single["choices"][1]["message"] == {"role": "assistant", "content": " a b"}
    assert single["usage"]["completion_tokens"] == 9 + 3
    assert arguments_of(events, 0) == '{ "city": "Rome"}'
    texts = [event["choices"][0]["delta"].get("content") for event in events[:-1] if event["choices"][0]["index"]]
    assert texts == [" a", " b", ""]


async def test_http_1_5_vertex_gives_the_raw_text_of_a_call():
    async with serve_tools(CALL) as served:
        instance = {"messages": [USER], "tools": [GET_W]}
        response = await served.client.post("/vertex", json={"instances": [instance]})
        (request,) = served.requests

    assert response.json() == {"predictions": [CALL]}
    assert accepts(grammar_of(request), CALL)


async def test_a_stream_whose_run_without_tools_fails_reports_it_and_ends():
    script = declining(lambda _: Reply((" a", " b"), fail_after=1))
    async with serve(script=script, compile_grammar=compiler().compile) as served:
        events = events_of((await chat(served, stream=True)).text)
        free = served.services.infer.permits.free

    assert [event["choices"][0]["delta"]["content"] for event in events[:-2]] == [" a"]
    assert events[-2]["error"]["message"].startswith("Request failed during generation")
    assert (events[-1], free) == ("[DONE]", 128)


async def test_http_4_6_a_tools_references_are_into_its_own_parameters():
    """As pydantic writes nested models. TGI refuses them."""

    def tool(name: str, point: Any) -> Any:
        properties = {"to": {"$ref": "#/$defs/Point"}, "via": {"type": "array", "items": {"$ref": "#/$defs/Point"}}}
        parameters = {"type": "object", "properties": properties, "required": ["to"], "$defs": {"Point": point}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    flat = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    async with serve_tools(CALL) as served:
        response = await chat(served, tools=[tool("go", flat), tool("see", {"enum": ["here"]})])
        (request,) = served.requests

    def accepted(arguments: str) -> bool:
        return accepts(grammar_of(request), '{"function":{' + arguments + "}}")

    assert response.status_code == 200
    assert accepted('"_name":"go","to":{"x":1},"via":[{"x":2},{"x":3}]')
    assert accepted('"_name":"see","to":"here"')
    assert not accepted('"_name":"go","to":"here"')
    assert not accepted('"_name":"see","to":{"x":1}')


@pytest.mark.parametrize(
    ("tools", "status", "error"),
    [
        pytest.param([PING, PING], 422, "Tool error: `tools` may have a function only once", id="twice"),
        pytest.param(
            [{"type": "function", "function": {"name": "no_tool"}}], 422, "Tool error: `tools` may not", id="no_tool"
        ),
        *(
            pytest.param(
                [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
                422,
                f"Input validation error: cannot compile regex from schema: {text}",
                id=f"51_{text}",
            )
            for parameters, text in [
                (5, "function f: `parameters` is not an object"),
                ({"properties": []}, "function f: `properties` is not an object"),
                ({"properties": {}, "required": "a"}, "function f: `required` is not a list"),
                ({"properties": {"_name": {}}}, "function f: the argument name `_name` is reserved"),
                ({"properties": {"a": {"not": {}}}}, "`not` is not supported"),
                ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"B": {}}}, "`$ref` #/$defs/A leads nowhere"),
            ]
        ),
    ],
)
async def test_reliability_4_4_51_tools_that_cannot_be_offered(tools: list[Any], status: int, error: str):
    async with serve_tools(CALL) as served:
        response = await chat(served, tools=tools)

        assert response.status_code == status
        assert response.json()["error"].startswith(error)
        assert (await chat(served)).status_code == 200


async def test_reliability_4_4_51_as_many_tools_as_may_be():
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(512)]
    async with serve_tools('{"function": {"_name": "f9"}}') as served:
        response = await chat(served, tools=tools)

    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f9"


async def test_reliability_T8_a_tools_name_is_only_text():
    name = 'a.*"}\\/~1é{{ 7 * 7 }}'
    tools = [{"type": "function", "function": {"name": name, "description": "{{ 7 * 7 }}"}}]
    text = json.dumps({"function": {"_name": name}}, ensure_ascii=False)
    async with serve_tools(text) as served:
        body = (await chat(served, tools=tools, tool_choice=name)).json()
        (request,) = served.requests

    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == name
    assert accepts(grammar_of(request), text)
    assert not accepts(grammar_of(request), '{"function": {"_name": "abc"}}')
    assert "{{ 7 * 7 }}" in request.text


async def test_hardening_R20_no_tools_beside_a_response_format_is_the_format():
    schema = {"type": "json_object", "value": {"type": "object", "properties": {}}}

    async with serve_tools("{}") as served:
        empty = await chat(served, tools=[], response_format=schema)
        both = await chat(served, response_format=schema)

    assert (empty.status_code, both.status_code) == (200, 422)
    assert empty.json()["choices"][0]["message"]["content"] == "{}"

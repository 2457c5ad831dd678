"""Acceptance examples of chat without tools."""

from typing import Any

import httpx
import pytest

from tests.support.servers.serving import Served, events_of, serve, usage_json

USER = {"role": "user", "content": "hi"}
GET_W = {"type": "function", "function": {"name": "get_w", "parameters": {"type": "object", "properties": {}}}}


async def chat(served: Served, **body: Any) -> httpx.Response:
    return await served.client.post("/v1/chat/completions", json={"messages": [USER], **body})


async def prompt_of(served: Served, messages: list[dict[str, Any]]) -> str:
    response = await served.client.post("/chat_tokenize", json={"messages": messages})
    return str(response.json()["templated_text"])


async def test_http_H47_one_answer():
    async with serve() as served:
        response = await chat(served, model="tgi", max_tokens=2, seed=1)
        (request,) = served.requests

    body = response.json()
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " a b"},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("chat.completion", "m", "0.0.0-native")
    assert body["usage"] == usage_json(1, 2)
    assert (request.text, request.add_special_tokens, request.parameters.seed) == (
        "<|user|>hi<|assistant|>",
        False,
        1,
    )


async def test_http_H48_another_model_and_logprobs():
    async with serve() as served:
        body = (await chat(served, model="other", logprobs=True, top_logprobs=1)).json()
        (request,) = served.requests

    content = body["choices"][0]["logprobs"]["content"]
    assert (body["model"], request.adapter_id) == ("other", "other")
    assert [entry["token"] for entry in content] == [" a", " b", " c", " d", " e", "</s>"]
    assert content[0] == {"token": " a", "logprob": -0.5, "top_logprobs": [{"token": " a", "logprob": -0.5}]}


async def test_http_H49_a_stream_with_usage():
    async with serve() as served:
        response = await chat(served, stream=True, stream_options={"include_usage": True})

    *content, last, usage, done = events_of(response.text)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in content] == [" a", " b", " c", " d", " e"]
    assert all(chunk["usage"] is None for chunk in content)
    assert last["choices"][0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 6, "[DONE]")


#: Each is the default of some client, or of OpenAI's API.
ASKS_NOTHING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1},
    {"frequency_penalty": 0, "presence_penalty": 0},
    {"n": 1},
    {"n": None},
    {"seed": None},
    {"stop": []},
    {"stop": None},
    {"stream": None},
    {"user": "somebody"},
    {"store": False},
    {"store": None},
    {"metadata": {}},
    {"metadata": {"team": "a"}},  # a label of the request
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"service_tier": None},
]


@pytest.mark.parametrize(
    "body",
    [
        {"tools": []},
        {"tools": None},
        {"tools": [GET_W], "tool_choice": "none"},
        {"tool_choice": None},
        {"response_format": {"type": "text"}},
        {"stream_options": None},
        {"logit_bias": {}},
        {"logit_bias": []},
        {"stop": "x"},
        {"stop": ["x"]},
        {"max_tokens": 2, "max_completion_tokens": 2},
        {"presence_penalty": 0.0, "temperature": 0},
        *ASKS_NOTHING,
        {"logprobs": False},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},  # there is one call at most
        {"stream_options": {"include_usage": False}},
    ],
    ids=str,
)
async def test_openai_fields_without_effect_are_accepted(body: dict[str, Any]):
    async with serve() as served:
        assert (await chat(served, **body)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        *ASKS_NOTHING,
        {"suffix": None},
        {"suffix": ""},
        {"echo": False},
        {"echo": None},
        {"logprobs": None},
        {"logprobs": False},
        {"logprobs": 0},
        {"best_of": 1},
        {"best_of": None},
        {"best_of": 2, "n": 2},
        {"stream_options": {"include_usage": False}},
    ],
    ids=str,
)
async def test_completions_accept_fields_that_request_nothing(body: dict[str, Any]):
    async with serve() as served:
        assert (await served.client.post("/v1/completions", json={"prompt": "p", **body})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"store": True}, "`store` is not supported: answers are not stored. Given: true"),
        ({"service_tier": "flex"}, "`service_tier` must be `auto` or `default`. Given: flex"),
    ],
    ids=str,
)
async def test_unsupported_fields_are_refused_by_name(body: dict[str, Any], error: str, stream: bool):
    async with serve() as served:
        response = await chat(served, stream=stream, **body)

    assert response.status_code == 422
    assert response.json() == {"error": f"Input validation error: {error}", "error_type": "validation"}


async def test_http_H51_a_model_without_a_template():
    async with serve(template=None) as served:
        response = await chat(served)

    assert response.status_code == 422
    assert response.json() == {"error": "Template error: template not found", "error_type": "template_error"}


@pytest.mark.parametrize("stream", [False, True])
async def test_http_H52_a_template_that_refuses(stream: bool):
    async with serve(template="{{ raise_exception('bad roles') }}") as served:
        response = await chat(served, stream=stream)
        failures = await served.metric('tgi_request_failure{err="template"}')

    assert response.status_code == 422
    assert response.json()["error"] == "Template error: syntax error: bad roles (in <string>:1)"
    assert failures == "1"


async def test_http_H57_a_last_assistant_turn_is_continued():
    async with serve() as served:
        text = await prompt_of(served, [USER, {"role": "assistant", "content": "the elephant"}])

    assert text.endswith("the elephant")


async def test_http_H58_images_become_markdown():
    parts = [
        {"type": "text", "text": "A"},
        {"type": "image_url", "image_url": {"url": "http://h/i.png"}},
        {"type": "text", "text": "B"},
    ]
    async with serve() as served:
        text = await prompt_of(served, [{"role": "user", "content": parts}])

    assert text == "<|user|>A![](http://h/i.png)B<|assistant|>"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "audio"}]},
        {"role": "user", "content": "a", "role ": 1, "name": 5},
        {
            "role": "assistant",
            "tool_calls": [{"id": 1, "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
    ],
    ids=str,
)
async def test_messages_of_the_wrong_shape(message: dict[str, Any]):
    async with serve() as served:
        response = await chat(served, messages=[message])

    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"


async def test_tool_calls_in_the_history_are_rendered_as_json():
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {"b": 1}, "description": None}}
    async with serve() as served:
        text = await prompt_of(served, [{"role": "assistant", "content": None, "tool_calls": [call]}, USER])

    assert text == (
        '<|assistant|>[{"id":"0","type":"function","function":'
        '{"description":null,"name":"f","arguments":"{\\"b\\":1}"}}]<|user|>hi<|assistant|>'
    )


async def test_both_spellings_of_a_tools_parameters_are_a_duplicate():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}, "arguments": {}}}
    async with serve() as served:
        response = await chat(served, tools=[tool])

    assert "duplicate field `parameters`" in response.json()["error"]


async def test_choices_are_generations_of_their_own():
    async with serve() as served:
        response = await chat(served, n=2, seed=5, max_tokens=2)
        streamed = events_of((await chat(served, n=2, max_tokens=2, stream=True)).text)
        seeds = [request.parameters.seed for request in served.requests[:2]]

    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"] == usage_json(1, 4)
    assert (response.headers["x-prompt-tokens"], response.headers["x-generated-tokens"]) == ("1", "4")
    assert seeds == [5, 6]
    assert [chunk["choices"][0]["index"] for chunk in streamed[:-1]] == [0, 1, 0, 1]
    assert [chunk["choices"][0]["finish_reason"] for chunk in streamed[:-1]] == [None, None, "length", "length"]


async def test_a_stream_fails_in_openais_form_and_still_ends_with_done():
    async with serve() as served:
        events = events_of((await chat(served, stream=True, temperature=-1.0)).text)

    message = "Input validation error: `temperature` must be strictly positive"
    assert events == [{"error": {"message": message, "http_status_code": 422}}, "[DONE]"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("top_p", [1, 1.0, 0.99999999])
async def test_http_4_1_a_top_p_of_1_is_off(path: str, top_p: float):
    # TGI refuses 1, as the native API does. OpenAI's default is 1, and LangChain sends it.
    body = {"messages": [USER]} if "chat" in path else {"prompt": "p"}
    async with serve() as served:
        response = await served.client.post(path, json={**body, "top_p": top_p, "max_tokens": 1})
        (request,) = served.requests

    assert response.status_code == 200
    assert (request.parameters.top_p, request.parameters.do_sample) == (1.0, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("top_p", [0.0, -0.5, 1.1, 2.0])
async def test_http_4_1_other_top_ps_are_refused(path: str, top_p: float, stream: bool):
    body = {"messages": [USER]} if "chat" in path else {"prompt": "p"}
    async with serve() as served:
        response = await served.client.post(path, json={**body, "top_p": top_p, "stream": stream})
        failures = await served.metric('tgi_request_failure{err="validation"}')

    message = f"Input validation error: `top_p` must be > 0.0 and <= 1.0. Given: {top_p}"
    assert (response.status_code, response.json()) == (422, {"error": message, "error_type": "validation"})
    assert failures == "1"


async def test_http_4_1_a_temperature_of_0_is_greedy_beside_a_top_p():
    # TGI samples at a temperature of 1 then, since a `top_p` is there.
    async with serve() as served:
        response = await chat(served, temperature=0, top_p=0.9)
        (request,) = served.requests

    assert response.status_code == 200
    assert (request.parameters.do_sample, request.parameters.temperature, request.parameters.top_p) == (False, 1.0, 1.0)


async def test_presence_penalty_is_openais():
    async with serve() as served:
        accepted = await chat(served, presence_penalty=1.5, max_tokens=1)
        refused = await chat(served, presence_penalty=2.5)
        (request,) = served.requests

    assert accepted.status_code == 200
    assert (request.parameters.presence_penalty, request.parameters.repetition_penalty) == (1.5, 1.0)
    assert refused.json()["error"] == "Input validation error: `presence_penalty` must be >= -2.0 and <= 2.0"


async def test_chat_takes_the_extensions():
    async with serve() as served:
        body = (await chat(served, max_tokens=9, ignore_eos_token=True, min_new_tokens=7)).json()
        (request,) = served.requests

    assert body["usage"]["completion_tokens"] == 9
    assert (request.stopping.ignore_eos_token, request.stopping.min_new_tokens) == (True, 7)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("names", "tokens"),
    [
        ({"ignore_eos": True}, 9),
        ({"ignore_eos": True, "ignore_eos_token": True}, 9),
        ({"ignore_eos": None, "ignore_eos_token": True}, 9),
        ({"ignore_eos": True, "ignore_eos_token": None}, 9),
        ({"ignore_eos": False}, 6),
        ({"ignore_eos": None}, 6),
    ],
    ids=str,
)
async def test_ignore_eos_is_another_name_of_ignore_eos_token(path: str, names: dict[str, Any], tokens: int):
    body = {"messages": [USER]} if "chat" in path else {"prompt": "p"}
    async with serve() as served:
        answer = (await served.client.post(path, json={**body, **names, "max_tokens": 9})).json()

    assert answer["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_both_names_of_ignore_eos_token_must_agree(path: str, stream: bool):
    body = {"messages": [USER]} if "chat" in path else {"prompt": "p"}
    names = {"ignore_eos_token": False, "ignore_eos": True}
    async with serve() as served:
        response = await served.client.post(path, json={**body, **names, "stream": stream})

    message = "`ignore_eos_token` and `ignore_eos` must be equal when both are given. Given: false and true"
    assert response.status_code == 422
    assert response.json() == {"error": f"Input validation error: {message}", "error_type": "validation"}

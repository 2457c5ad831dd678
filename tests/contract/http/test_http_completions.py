"""Acceptance examples of `/v1/completions`."""

from typing import Any

import httpx
import pytest

from tests.support.servers.serving import Served, events_of, serve, usage_json


async def complete(served: Served, **body: Any) -> httpx.Response:
    return await served.client.post("/v1/completions", json={"model": "tgi", **body})


async def test_http_H40_one_prompt():
    async with serve() as served:
        response = await complete(served, prompt="hi", max_tokens=2, temperature=0)
        (request,) = served.requests

    body = response.json()
    assert (body["object"], body["id"], body["model"]) == ("text_completion", "", "m")
    assert body["choices"] == [{"index": 0, "text": " a b", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == usage_json(2, 2)
    assert "x-compute-time" not in response.headers
    assert (request.adapter_id, request.parameters.do_sample) == (None, False)


async def test_http_H41_without_a_limit_it_stops_at_the_end_of_sequence():
    async with serve() as served:
        body = (await complete(served, prompt="hi")).json()

    assert body["choices"][0] == {"index": 0, "text": " a b c d e", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == 6


async def test_http_H42_a_list_of_prompts_in_order():
    async with serve() as served:
        response = await complete(served, prompt=["p", "q", "r", "s"], max_tokens=1)

    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2, 3]
    assert response.json()["usage"] == usage_json(8, 4)
    assert response.headers["x-prompt-tokens"] == "8"


@pytest.mark.parametrize(
    ("body", "error", "error_type"),
    [
        (
            {"prompt": list("pqrst")},
            "Number of prompts exceeds the maximum allowed batch size of 4",
            "batch size exceeded",
        ),
        (
            {"prompt": "p", "suffix": "x"},
            "Suffix is not supported and can be achieved by preprocessing the prompt.",
            "suffix not supported",
        ),
        (
            {"prompt": "p", "logit_bias": [1]},
            "Input validation error: `logit_bias` is not supported",
            "validation",
        ),
        ({"prompt": "p", "n": 3}, "Input validation error: `n` must be > 0 and <= 2. Given: 3", "validation"),
        ({"prompt": "p", "n": 0}, "Input validation error: `n` must be > 0 and <= 2. Given: 0", "validation"),
        (
            {"prompt": "p", "max_tokens": 1, "max_completion_tokens": 2},
            "Input validation error: `max_tokens` and `max_completion_tokens` must be equal when both are given. "
            "Given: 1 and 2",
            "validation",
        ),
        # TGI ignores these three; a client that sends them would misread the answer.
        (
            {"prompt": "p", "echo": True},
            "Input validation error: `echo` is not supported: the answer does not repeat the prompt. Given: true",
            "validation",
        ),
        (
            {"prompt": "p", "logprobs": 5},
            "Input validation error: `logprobs` must be 0 here; /v1/chat/completions supports them. Given: 5",
            "validation",
        ),
        (
            {"prompt": "p", "best_of": 3, "n": 2},
            "Input validation error: `best_of` must be <= `n`, since every choice is returned; /generate supports it. "
            "Given: 3 and 2",
            "validation",
        ),
    ],
    ids=["H43", "H44", "E2", "E11", "E11_zero", "E3", "2_6_echo", "2_6_logprobs", "2_6_best_of"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_http_H43_H44_refusals(body: dict[str, Any], error: str, error_type: str, stream: bool):
    async with serve() as served:
        response = await complete(served, stream=stream, **body)

    assert response.status_code == 422
    assert response.json() == {"error": error, "error_type": error_type}


async def test_http_H45_streams_of_two_prompts_interleave():
    async with serve() as served:
        events = events_of((await complete(served, prompt=["p", "q"], stream=True)).text)

    choices = [event["choices"][0] for event in events[:-1]]
    finals = [event for event in events[:-1] if "usage" in event]
    assert events[-1] == "[DONE]"
    assert [choice["index"] for choice in choices] == [0, 1] * 6
    assert [choice["finish_reason"] for choice in choices] == [None] * 10 + ["stop"] * 2
    assert ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)] == [
        " a b c d e"
    ] * 2
    assert [final["choices"][0]["text"] for final in finals] == ["", ""]
    assert finals[0]["usage"] == usage_json(2, 6)


async def test_a_stream_cut_by_length_keeps_its_last_text():
    async with serve() as served:
        events = events_of((await complete(served, prompt="p", max_tokens=2, stream=True)).text)

    assert [event["choices"][0]["text"] for event in events[:-1]] == [" a", " b"]
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_http_H46_empty_lists_and_plain_stop_strings():
    async with serve() as served:
        empty = await complete(served, prompt=[])
        stopped = (await complete(served, prompt="hi", stop=" c")).json()

    assert empty.status_code == 422
    assert stopped["choices"][0]["text"] == " a b c"
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 3


async def test_a_bad_prompt_fails_in_its_own_stream_only():
    async with serve() as served:
        events = events_of((await complete(served, prompt=["", "q"], max_tokens=1, stream=True)).text)

    error, token, done = events
    assert error == {"error": {"message": "Input validation error: `inputs` cannot be empty", "http_status_code": 422}}
    assert token["choices"][0]["index"] == 1
    assert done == "[DONE]"


async def test_choices_of_each_prompt_have_their_own_seeds_and_share_the_prompts_count():
    async with serve() as served:
        body = (await complete(served, prompt=["p", "q"], n=2, seed=7, max_tokens=1)).json()
        seeds = [request.parameters.seed for request in served.requests]

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == usage_json(4, 4)
    assert seeds == [7, 8, 7, 8]


async def test_extensions_work_here_too():
    async with serve() as served:
        body = (await complete(served, prompt="p", max_tokens=9, ignore_eos_token=True, min_new_tokens=9)).json()

    assert body["usage"]["completion_tokens"] == 9

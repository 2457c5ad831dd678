"""Acceptance examples of refused requests and their error texts."""

import asyncio
import json
from typing import Any

import pytest

from reference_server.router.validation.request_rules import GenerationLimits
from tests.support.servers.serving import endless, events_of, serve
from tests.support.wire.scripted_shard import ScriptedShard

JSON = {"content-type": "application/json"}


def assert_refused(response: Any, text: str) -> None:
    assert response.status_code == 422
    assert response.json() == {"error": f"Input validation error: {text}", "error_type": "validation"}


def words(count: int) -> str:
    return " ".join(["word"] * count)


async def test_http_H19_empty_inputs():
    async with serve() as served:
        assert_refused(await served.generate(""), "`inputs` cannot be empty")


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        pytest.param({"temperature": 0}, "`temperature` must be strictly positive", id="H20"),
        pytest.param({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0", id="H21"),
        pytest.param({"top_p": 0.99999999}, "`top_p` must be > 0.0 and < 1.0", id="H21_narrowed"),
        pytest.param({"top_k": 0}, "`top_k` must be strictly positive", id="H22_top_k"),
        pytest.param({"typical_p": 1}, "`typical_p` must be > 0.0 and < 1.0", id="H22_typical_p"),
        pytest.param({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive", id="H22_repetition"),
        pytest.param({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0", id="H23_frequency"),
        pytest.param({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5", id="H24"),
        pytest.param({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6", id="H25"),
        pytest.param({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive", id="H26"),
        pytest.param(
            {"truncate": 1025}, "`truncate` must be strictly positive and less than 1024. Given: 1025", id="H27"
        ),
        pytest.param(
            {"truncate": 0}, "`truncate` must be strictly positive and less than 1024. Given: 0", id="H27_zero"
        ),
        pytest.param({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3", id="H32"),
        pytest.param({"best_of": 2}, "you must use sampling when `best_of` is > 1", id="H33_greedy"),
        pytest.param(
            {"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1", id="H33_seed"
        ),
        pytest.param(
            {"min_new_tokens": 5, "max_new_tokens": 4},
            "`min_new_tokens` must be <= `max_new_tokens`. Given: 5 and 4",
            id="row_12a",
        ),
        pytest.param({"stop": ["x" * 1025]}, "`stop` sequences must have at most 1024 characters", id="Q14"),
    ],
)
async def test_http_H20_to_H33_rules(parameters: dict[str, Any], text: str):
    async with serve() as served:
        assert_refused(await served.generate(**parameters), text)


@pytest.mark.parametrize(
    "parameters",
    [{"frequency_penalty": 2.0}, {"truncate": 1024}, {"best_of": 0}, {"seed": 0}, {"grammar": None}],
    ids=["H23", "H27", "best_of_0", "seed_0", "null_grammar"],
)
async def test_http_H23_H27_limits_are_inclusive(parameters: dict[str, Any]):
    async with serve() as served:
        assert (await served.generate(max_new_tokens=1, **parameters)).status_code == 200


async def test_http_H28_a_prompt_that_is_too_long():
    async with serve() as served:
        response = await served.generate(words(1100), max_new_tokens=10)

    assert_refused(response, "`inputs` must have less than 1024 tokens. Given: 1101")


async def test_http_H29_truncate_makes_it_fit():
    async with serve() as served:
        response = await served.generate(words(1100), max_new_tokens=10, truncate=100)

    assert response.status_code == 200
    assert response.headers["x-prompt-tokens"] == "100"


async def test_http_H30_the_total_is_judged_first_and_with_a_segment():
    async with serve() as served:
        response = await served.generate(words(1500), max_new_tokens=5000)

    assert_refused(
        response,
        "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 1501 `inputs` tokens and 1024 `max_new_tokens`",
    )


async def test_http_H31_long_generations_run_in_segments():
    limits = GenerationLimits(max_input_tokens=2000, max_total_tokens=4096)
    async with serve(script=endless, limits=limits) as served:
        body = (await served.generate(max_new_tokens=1500, details=True, do_sample=True)).json()
        first, second = served.requests

    assert (body["details"]["generated_tokens"], body["details"]["finish_reason"]) == (1500, "length")
    assert (first.stopping.max_new_tokens, second.stopping.max_new_tokens) == (1024, 476)
    assert second.text == "hello" + " x" * 1024
    assert first.parameters.seed == second.parameters.seed == body["details"]["seed"]
    assert len(body["details"]["tokens"]) == 1500
    assert body["generated_text"] == " x" * 1500


async def test_http_H31_a_segment_that_no_longer_fits_ends_the_generation():
    async with serve(script=endless) as served:
        body = (await served.generate(max_new_tokens=5000, details=True)).json()

    assert (body["details"]["generated_tokens"], body["details"]["finish_reason"]) == (1024, "length")


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": "x", "parameters": None},
        {"inputs": 5},
        {"inputs": ["x", "y"]},
        {},
        None,
        [],
        {"inputs": "x", "parameters": {"stop": None}},
        {"inputs": "x", "parameters": {"max_new_tokens": 20.0}},
        {"inputs": "x", "parameters": {"max_new_tokens": -1}},
        {"inputs": "x", "parameters": {"max_new_tokens": 2**32}},
        {"inputs": "x", "parameters": {"max_new_tokens": True}},
        {"inputs": "x", "parameters": {"top_k": "5"}},
        {"inputs": "x", "parameters": {"temperature": "1"}},
        {"inputs": "x", "parameters": {"temperature": 1e39}},
        {"inputs": "x", "parameters": {"seed": 2**64}},
        {"inputs": "x", "parameters": {"do_sample": 1}},
        {"inputs": "x", "parameters": {"grammar": {"type": "lark", "value": ""}}},
        {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": None}}},
        {"inputs": "x", "parameters": {"grammar": {"type": "json_schema", "value": {"name": "x"}}}},
    ],
    ids=str,
)
async def test_http_H34_a_body_of_the_wrong_shape(body: Any):
    async with serve() as served:
        response = await served.client.post("/generate", content=json.dumps(body), headers=JSON)

    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert response.json()["error"].startswith("Failed to deserialize the JSON body into the target type: ")


async def test_http_H34_a_list_of_inputs_is_refused_with_the_route_to_use():
    async with serve() as served:
        response = await served.generate(["x", "y"])

    assert response.json()["error"].endswith("; use /v1/completions with a list of prompts")


@pytest.mark.parametrize(
    ("content", "headers", "status", "text"),
    [
        (b'{"inputs":', JSON, 400, "Failed to parse the request body as JSON: "),
        (b"", JSON, 400, "Failed to parse the request body as JSON: "),
        (b'{"inputs":"\\ud800"}', JSON, 400, "Failed to parse the request body as JSON: "),
        (b'{"inputs":"\xff"}', JSON, 400, "Failed to parse the request body as JSON: "),
        (b'{"inputs":"x"}', {}, 415, "Expected request with `Content-Type: application/json`"),
        (b'{"inputs":"x"}', {"content-type": "text/plain"}, 415, "Expected request with"),
        (b'{"inputs":"x"}', JSON | {"content-encoding": "gzip"}, 415, "Expected request with"),
        (b'{"inputs":"' + b"x" * 2_000_001 + b'"}', JSON, 413, "Failed to buffer the request body: length limit"),
        (b'{"inputs":"x","inputs":"y"}', JSON, 422, "Failed to deserialize the JSON body"),
    ],
    ids=["400", "empty", "surrogate", "utf8", "no_type", "text", "gzip", "413", "duplicate"],
)
async def test_http_H35_transport_refusals(content: bytes, headers: dict[str, str], status: int, text: str):
    async with serve() as served:
        response = await served.client.post("/generate", content=content, headers=headers)

    assert response.status_code == status
    assert response.json()["error"].startswith(text)
    assert response.json()["error_type"] == "validation"


async def test_http_H35_a_body_of_exactly_the_limit_is_read():
    padding = b'{"inputs":"","x":"' + b"x" * (2_000_000 - 20) + b'"}'
    async with serve() as served:
        response = await served.client.post("/generate", content=padding, headers=JSON)

    assert len(padding) == 2_000_000
    assert_refused(response, "`inputs` cannot be empty")


async def test_http_H36_no_permit_is_429_or_one_event():
    held = asyncio.Event()

    async def hold(method: str) -> None:
        if method == "prefill":
            await held.wait()

    async with serve(shard=ScriptedShard(gate=hold), permits=1) as served:
        first = asyncio.create_task(served.generate())
        while served.services.infer.permits.free:  # noqa: ASYNC110  # until the first one holds it
            await asyncio.sleep(0)
        single = await served.generate("")
        streamed = await served.client.post("/generate_stream", json={"inputs": "hello"})
        held.set()
        ended = await first
        failures = await served.metric('tgi_request_failure{err="overloaded"}')

    overloaded = {"error": "Model is overloaded", "error_type": "overloaded"}
    assert (single.status_code, single.json()) == (429, overloaded)
    assert (streamed.status_code, events_of(streamed.text)) == (200, [overloaded])
    assert ended.status_code == 200
    assert failures == "2"


async def test_extension_parameters_reach_the_model_server():
    async with serve() as served:
        response = await served.generate(ignore_eos_token=True, min_new_tokens=8, max_new_tokens=9, details=True)
        (request,) = served.requests

    assert (request.stopping.ignore_eos_token, request.stopping.min_new_tokens) == (True, 8)
    assert response.json()["details"]["generated_tokens"] == 9

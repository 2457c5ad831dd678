"""Acceptance examples of the native routes."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from reference_server.errors import ShardError
from reference_server.messages import Request
from tests.support.servers.serving import events_of, serve
from tests.support.wire.scripted_shard import Reply, ScriptedShard


async def test_http_H1_generate_answers_text_and_headers():
    async with serve() as served:
        response = await served.generate(max_new_tokens=2)

    headers = response.headers
    assert response.json() == {"generated_text": " a b"}
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("2", "2")
    assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("gpu+optimized", "5")
    assert float(headers["x-compute-time"]) > 0
    for name in ("total-time", "validation-time", "queue-time", "inference-time", "time-per-token"):
        assert headers[f"x-{name}"].isdigit()


async def test_http_H2_details_hold_every_token_and_nothing_that_was_not_asked_for():
    async with serve() as served:
        response = await served.generate(max_new_tokens=20, details=True)

    body = response.json()
    details = body["details"]
    assert body["generated_text"] == " a b c d e"
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", 6, None)
    assert details["tokens"][5] == {"id": 2, "text": "</s>", "logprob": -0.5, "special": True}
    assert set(details) == {"finish_reason", "generated_tokens", "seed", "prefill", "tokens", "cached_input_tokens"}
    assert (details["prefill"], details["cached_input_tokens"]) == ([], 0)


async def test_http_H3_a_body_without_parameters_samples_with_a_random_seed():
    async with serve() as served:
        for _ in range(2):
            assert (await served.client.post("/generate", json={"inputs": "hello"})).status_code == 200
        first, second = served.requests

    assert first.parameters.do_sample
    assert (first.stopping.max_new_tokens, first.truncate) == (1024, 1024)
    assert first.parameters.seed != second.parameters.seed


async def test_http_H4_empty_parameters_are_greedy():
    async with serve() as served:
        await served.generate()
        (request,) = served.requests

    assert not request.parameters.do_sample


@pytest.mark.parametrize(
    ("return_full_text", "text"), [(None, "hello a b"), (False, " a b")], ids=["H5_null_is_full", "H6_false"]
)
async def test_http_H5_H6_root_answers_a_list(return_full_text: bool | None, text: str):
    parameters = {"max_new_tokens": 2, "return_full_text": return_full_text}
    async with serve() as served:
        response = await served.client.post("/", json={"inputs": "hello", "parameters": parameters})

    assert response.json() == [{"generated_text": text}]


async def test_http_H7_truncate_cuts_the_models_input_but_not_the_full_text():
    async with serve() as served:
        response = await served.generate("one two three", return_full_text=True, truncate=1, max_new_tokens=1)
        (request,) = served.requests

    assert response.json() == {"generated_text": "one two three a"}
    assert response.headers["x-prompt-tokens"] == "1"
    assert (request.truncate, request.num_slots) == (1, 1)


async def test_http_H8_a_stop_string_stays_in_the_text():
    async with serve() as served:
        body = (await served.generate(stop=[" c"], details=True, max_new_tokens=20)).json()

    assert body["generated_text"] == " a b c"
    assert (body["details"]["finish_reason"], body["details"]["generated_tokens"]) == ("stop_sequence", 3)


async def test_http_H9_top_n_tokens_gives_alternatives_for_each_token():
    async with serve() as served:
        body = (await served.generate(details=True, top_n_tokens=2, max_new_tokens=2)).json()

    assert [len(position) for position in body["details"]["top_tokens"]] == [2, 2]
    assert body["details"]["top_tokens"][0][1] == {"id": 1010, "text": " a1", "logprob": -1.5, "special": False}


async def test_http_H10_decoder_input_details_imply_details():
    async with serve() as served:
        body = (await served.generate(decoder_input_details=True, max_new_tokens=1)).json()

    first, second = body["details"]["prefill"]
    assert first["logprob"] is None
    assert second["logprob"] == -1.0


def alternating(*logprobs: float) -> Callable[[Request], Reply]:
    """Each request in turn has the next log-probability."""
    left = list(logprobs)
    return lambda _: Reply((" a",), logprob=left.pop(0))


async def test_http_H11_best_of_puts_the_likeliest_on_top():
    async with serve(script=alternating(-0.9, -0.4)) as served:
        response = await served.generate(best_of=2, do_sample=True, details=True, max_new_tokens=1)

    details = response.json()["details"]
    (other,) = details["best_of_sequences"]
    assert (details["tokens"][0]["logprob"], other["tokens"][0]["logprob"]) == (-0.4, -0.9)
    assert isinstance(details["seed"], int)
    assert isinstance(other["seed"], int)


async def stream(client: httpx.AsyncClient, path: str = "/generate_stream", **parameters: object) -> httpx.Response:
    stream_flag = {"stream": True} if path == "/" else {}
    return await client.post(path, json={"inputs": "hello", "parameters": parameters, **stream_flag})


async def test_http_H12_a_stream_is_one_event_a_token_and_just_ends():
    async with serve() as served:
        response = await stream(served.client, details=True, max_new_tokens=2)

    first, last = events_of(response.text)
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert (first["index"], first["generated_text"], first["details"]) == (1, None, None)
    assert (last["index"], last["generated_text"]) == (2, " a b")
    assert last["details"] == {
        "finish_reason": "length",
        "generated_tokens": 2,
        "seed": None,
        "input_length": 2,
        "cached_input_tokens": 0,
    }


async def test_http_H13_root_streams_with_the_full_text():
    async with serve() as served:
        events = events_of((await stream(served.client, "/", max_new_tokens=2)).text)

    assert events[-1]["generated_text"] == "hello a b"
    assert events[-1]["details"] is None


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"best_of": 0}, "`best_of` != 1 is not supported when streaming tokens"),
        (
            {"decoder_input_details": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
    ],
    ids=["H14_best_of", "H14_best_of_0", "H15_decoder_input_details"],
)
async def test_http_H14_H15_streams_refuse_in_an_event(parameters: dict[str, object], text: str):
    async with serve() as served:
        response = await stream(served.client, **parameters)

    assert response.status_code == 200
    assert events_of(response.text) == [{"error": f"Input validation error: {text}", "error_type": "validation"}]


async def test_http_H16_a_failed_step_is_424():
    shard = ScriptedShard()
    shard.failures["prefill"] = ShardError("CUDA oom")
    async with serve(shard=shard) as served:
        response = await served.generate()

    assert response.status_code == 424
    assert response.json() == {
        "error": "Request failed during generation: Server error: CUDA oom",
        "error_type": "generation",
    }


async def test_http_H17_a_failure_in_a_stream_is_its_last_event_and_makes_health_thorough():
    async with serve(script=lambda _: Reply((" a", " b"), fail_after=1)) as served:
        response = await stream(served.client)
        before = len(served.shard.called("prefill"))
        served.shard.script = lambda _: Reply((" a",))
        health = await served.client.get("/health")
        probes = served.shard.called("prefill")[before:]

    token, error = events_of(response.text)
    assert token["index"] == 1
    assert error["error_type"] == "generation"
    assert health.status_code == 200
    assert len(probes) == 1


async def test_http_H18_a_generation_without_an_end_is_incomplete():
    held = asyncio.Event()

    async def hold(method: str) -> None:
        if method == "prefill":
            await held.wait()

    async with serve(shard=ScriptedShard(gate=hold)) as served:
        single = asyncio.create_task(served.generate())
        streamed = asyncio.create_task(stream(served.client))
        while await served.metric("tgi_request_input_length_count") != "2":  # noqa: ASYNC110  # both must be queued
            await asyncio.sleep(0)
        served.loop_task.cancel()
        answer, events = await single, events_of((await streamed).text)

    assert answer.status_code == 500
    assert answer.json() == {"error": "Incomplete generation", "error_type": "incomplete_generation"}
    assert events == [{"error": "Incomplete generation stream", "error_type": "incomplete_generation_stream"}]

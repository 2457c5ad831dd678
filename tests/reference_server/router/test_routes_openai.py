from dataclasses import replace

from reference_server.messages import GeneratedText
from reference_server.router.generation_stream import Finished, GeneratedToken, TokenArrived
from reference_server.router.infer import CompletedGeneration
from reference_server.router.routes.openai import usage_of
from reference_server.router.routes.openai_bodies import ChatBodies, CompletionBodies, Usage
from reference_server.router.routes.openai_calls import completion_calls
from reference_server.router.schemas.openai import ChatRequest, CompletionRequest
from reference_server.router.server_info import ServerInfo
from reference_server.router.telemetry.request_context import NO_CONTEXT
from reference_server.router.validation.request_rules import GenerationLimits
from tests.support.servers.serving import events_of

FACTS = ServerInfo("m", GenerationLimits(1024, 2048), version="0.0.0")
TOKEN = GeneratedToken(11, ' "a"', -0.3400000035762787, False)
EOS = GeneratedToken(2, "</s>", -0.25, True)


def ended(token: GeneratedToken, cached: int = 0) -> Finished:
    generated = GeneratedText(' "a"', 2, "length")  # type: ignore[arg-type]
    return Finished(token, (), replace(generated), 0, 0, cached)


def test_chunks_are_escaped_and_framed_by_hand_as_json_would():
    bodies = ChatBodies(FACTS, 1.5, ChatRequest(messages=[], model='x"y', logprobs=True))
    (chunk,) = events_of(bodies.render_token(3, TokenArrived(TOKEN, (TOKEN,))).decode())

    assert chunk == {
        "object": "chat.completion.chunk",
        "id": "",
        "created": 1,
        "model": 'x"y',
        "system_fingerprint": "0.0.0-native",
        "choices": [
            {
                "index": 3,
                "delta": {"role": "assistant", "content": ' "a"'},
                "logprobs": {
                    "content": [
                        {
                            "token": ' "a"',
                            "logprob": -0.34,
                            "top_logprobs": [{"token": ' "a"', "logprob": -0.34}],
                        }
                    ]
                },
                "finish_reason": None,
            }
        ],
        "usage": None,
    }


def test_special_tokens_are_not_text():
    completion = CompletionBodies(FACTS, 1)
    chat = ChatBodies(FACTS, 1, ChatRequest(messages=[]))
    (token,) = events_of(completion.render_token(0, TokenArrived(EOS, ())).decode())
    (last,) = events_of(completion.render_end(0, ended(EOS), Usage(1, 2, 0)).decode())
    (delta,) = events_of(chat.render_end(0, ended(EOS), Usage(1, 2, 0)).decode())

    assert (token["choices"][0]["text"], last["choices"][0]["text"]) == ("", "")
    assert delta["choices"][0]["delta"]["content"] == ""


def test_usage_reports_cached_tokens_also_if_there_are_none():
    assert Usage(5, 2, 0).to_json() == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert Usage(5, 2, 4).to_json()["prompt_tokens_details"] == {"cached_tokens": 4}


def test_usage_counts_a_prompt_once_for_all_its_choices():
    answers = [CompletedGeneration(input_len, [TOKEN], end=ended(TOKEN, cached=1)) for input_len in (3, 3, 5, 5)]

    assert usage_of(answers, choices=2) == Usage(8, 8, 2)


def test_completions_sample_and_never_request_prompt_details():
    single, streamed = (
        completion_calls(CompletionRequest(prompt=["a"], stream=stream, temperature=0.5), 1, NO_CONTEXT)[0]
        for stream in (False, True)
    )

    assert (single.parameters.decoder_input_details, streamed.parameters.decoder_input_details) == (False, False)
    assert (single.parameters.do_sample, single.parameters.temperature) == (True, 0.5)

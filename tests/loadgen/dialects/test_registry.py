import json

import pytest

from loadgen.dialects.dialect import BadPayloadError, NotThisApiError, ParsedAnswer, Sampling
from loadgen.dialects.openai import OpenAiChat, OpenAiCompletions
from loadgen.dialects.tgi import Tgi
from loadgen.generator.recorder import first_tokens
from loadgen.workloads.prompts.prompt import Prompt

PROMPT = Prompt("p", text="hello", output_tokens=9)


def read(dialect, *payloads):
    answer = ParsedAnswer()
    for at_ns, payload in enumerate(payloads, start=1):
        dialect.read(payload if isinstance(payload, bytes) else json.dumps(payload).encode(), at_ns, answer)
    return answer


def test_tgi_requests_forced_lengths_by_extension_fields():
    forced = json.loads(Tgi(Sampling(("ignore_eos_token", "min_new_tokens"))).body(PROMPT))
    capped = json.loads(Tgi(Sampling()).body(PROMPT))

    assert forced["parameters"] == {
        "details": True,
        "do_sample": False,
        "max_new_tokens": 9,
        "ignore_eos_token": True,
        "min_new_tokens": 9,
    }
    assert capped["parameters"] == {"details": True, "do_sample": False, "max_new_tokens": 9}


def test_http_streaming_example_of_two_tokens_is_read_whole():
    token = {"id": 11, "text": " a", "logprob": -0.5, "special": False}
    details = {"finish_reason": "length", "generated_tokens": 2, "seed": None, "input_length": 3}

    answer = read(
        Tgi(Sampling()),
        {"index": 1, "token": token, "generated_text": None, "details": None},
        {"index": 2, "token": token, "generated_text": " a b", "details": details},
    )

    assert answer.event_ns == [1, 2]
    assert answer.is_complete
    assert (answer.finish_reason, answer.usage_output_tokens, answer.input_tokens) == ("length", 2, 3)


def test_a_tgi_error_event_keeps_the_tokens_before_it():
    answer = read(Tgi(Sampling()), {"token": {"id": 1}}, {"error": "Model is overloaded", "error_type": "overloaded"})

    assert answer.error == "overloaded"
    assert len(answer.event_ns) == 1


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b'{"index":', BadPayloadError),
        ({"token": "x"}, BadPayloadError),
        ({"token": {}, "details": 3}, BadPayloadError),
        ([1, 2], NotThisApiError),
        ({"choices": []}, NotThisApiError),
    ],
)
def test_events_that_tgi_never_sends_are_refused(payload, error):
    with pytest.raises(error):
        read(Tgi(Sampling()), payload)


def chat(content=None, finish=None, usage=None, **delta):
    delta = {"role": "assistant", **delta} | ({} if content is None else {"content": content})
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}


def test_role_empty_and_usage_chunks_are_not_token_events():
    answer = read(
        OpenAiChat(Sampling()),
        chat(""),
        chat("one"),
        chat("two"),
        chat("", finish="stop"),
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}},
        b"[DONE]",
    )

    assert answer.event_ns == [2, 3]
    assert (answer.finish_reason, answer.usage_output_tokens, answer.input_tokens) == ("stop", 3, 5)
    assert not answer.counts_are_exact


def test_reasoning_is_counted_apart_from_the_answer():
    answer = read(OpenAiChat(Sampling()), chat(reasoning_content="hm"), chat("yes"))

    assert answer.event_ns == [1, 2]
    assert answer.first_answer_ns == 2


def test_tool_arguments_are_a_token_event():
    call = {"index": 0, "function": {"name": None, "arguments": '{"a"'}}

    assert read(OpenAiChat(Sampling()), chat(tool_calls=[call])).event_ns == [1]


def test_a_delta_that_is_not_a_text_is_an_event_of_one_character():
    answer = read(OpenAiChat(Sampling()), chat([{"type": "text", "text": "hello"}]), chat(7), chat("abc"))

    assert (len(answer.event_ns), answer.first_characters, answer.characters) == (3, 1, 5)


def test_trust_T6_the_first_event_has_its_share_of_the_characters():
    """Twelve tokens by usage, in two events of 10 and 20 characters; one token each where the counts agree."""
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 12}}
    answer = read(OpenAiChat(Sampling()), chat("a" * 10), chat("b" * 20), usage)

    assert first_tokens(answer, 12) == 4
    assert first_tokens(answer, 2) == 1


def test_usage_that_comes_chunk_by_chunk_counts_each_event():
    usage = [{"prompt_tokens": 5, "completion_tokens": count} for count in (2, 3, 6)]

    answer = read(
        OpenAiChat(Sampling()),
        chat("a b", usage=usage[0]),
        chat("c", usage=usage[1]),
        chat("d e f", finish="stop", usage=usage[2]),
    )

    assert answer.event_tokens == [2, 1, 3]
    assert answer.counts_are_exact


def test_the_usage_of_tgis_last_completion_chunk_is_a_total():
    text = {"choices": [{"index": 0, "text": " A", "finish_reason": None}]}
    last = {
        "choices": [{"index": 0, "text": " B", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }

    answer = read(OpenAiCompletions(Sampling()), text, last, b"[DONE]")

    assert answer.event_tokens == [1, 1]
    assert answer.usage_output_tokens == 2


def test_messages_are_sent_as_they_are_and_a_text_as_one_user_message():
    messages = ({"role": "system", "content": "brief"}, {"role": "user", "content": "hi"})

    given = json.loads(OpenAiChat(Sampling(model="m")).body(Prompt("p", messages=messages, output_tokens=4)))
    made = json.loads(OpenAiChat(Sampling(model="m")).body(PROMPT))

    assert given["messages"] == list(messages)
    assert made["messages"] == [{"role": "user", "content": "hello"}]
    assert (made["max_tokens"], made["model"], made["stream_options"]) == (9, "m", {"include_usage": True})


def test_a_single_tool_call_object_is_read_like_a_list_of_one():
    call = {"index": 0, "function": {"name": "f", "arguments": "{"}}

    assert read(OpenAiChat(Sampling()), chat(tool_calls=call)).event_ns == [1]

import json

import pytest

from loadgen.dialects.anthropic import AnthropicMessages
from loadgen.dialects.dialect import BadPayloadError, NotThisApiError, ParsedAnswer, Sampling
from loadgen.generator.recorder import count_output
from loadgen.http.framing import SSE
from loadgen.workloads.prompts.prompt import Prompt
from reports.run_schema import TokensSource
from tests.support.servers.dialect_server import anthropic_events, anthropic_message

BODY = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "one two three"}], "stream": True}


def read(*events, dialect=None):
    answer = ParsedAnswer(pieces=[])
    for at_ns, event in enumerate(events, start=1):
        payload = event if isinstance(event, bytes) else json.dumps(event).encode()
        (dialect or AnthropicMessages(Sampling())).read(payload, at_ns, answer)
    return answer


def delta(**fields):
    return {"type": "content_block_delta", "index": 0, "delta": fields}


def test_a_stream_is_read_the_same_at_every_cut():
    stream = b"".join(anthropic_events(BODY))
    cuts = [[stream[:at], stream[at:]] for at in range(len(stream) + 1)]

    for pieces in (*cuts, [bytes([byte]) for byte in stream]):
        splitter = SSE.splitter(10_000)
        answer = read(*(event for piece in pieces for event in splitter.feed(piece)), *splitter.finish())

        assert (answer.text, len(answer.event_ns), answer.is_terminated) == (" 0 1 2", 3, True)
        assert (answer.finish_reason, answer.input_tokens, answer.cached_input_tokens) == ("max_tokens", 8, 2)
        assert count_output(answer) == (3, TokensSource.SERVER_USAGE)


def test_a_whole_response_has_its_counts():
    answer = ParsedAnswer(pieces=[])
    AnthropicMessages(Sampling(streams=False)).read_whole(anthropic_message(BODY), answer)

    assert (answer.text, answer.input_tokens, answer.usage_output_tokens) == (" 0 1 2", 8, 3)
    assert answer.is_complete


def test_prompt_tokens_are_the_sum_of_new_read_and_written_ones():
    usage = {"input_tokens": 4, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 6, "output_tokens": 1}

    answer = read({"type": "message_start", "message": {"usage": usage}})

    assert (answer.input_tokens, answer.cached_input_tokens) == (40, 30)


def test_thinking_and_tool_arguments_are_events_and_a_signature_is_none():
    answer = read(
        delta(type="thinking_delta", thinking="hm"),
        delta(type="signature_delta", signature="abc"),
        delta(type="input_json_delta", partial_json=""),
        delta(type="input_json_delta", partial_json='{"a"'),
    )

    assert answer.event_ns == [1, 4]
    assert (answer.reasoning_events, answer.first_answer_ns, answer.text) == (1, 4, '{"a"')


def test_an_error_ends_a_stream_and_an_unknown_event_does_not():
    answer = read(
        {"type": "ping"},
        {"type": "some_later_event", "x": 1},
        delta(type="text_delta", text="a"),
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
    )

    assert (answer.error, answer.event_ns, answer.is_complete) == ("overloaded_error", [3], False)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"choices": []}, NotThisApiError),
        ({"type": "content_block_delta", "delta": 3}, BadPayloadError),
        ({"type": "message_start", "message": {"usage": [1]}}, BadPayloadError),
        (b'{"type":', BadPayloadError),
    ],
)
def test_damaged_events_are_refused(event, error):
    with pytest.raises(error):
        read(event)


def test_the_system_message_has_its_own_field_and_lengths_are_never_forced():
    messages = ({"role": "system", "content": "brief"}, {"role": "user", "content": "hi"})
    prompt = Prompt("p", messages=messages, output_tokens=9, fields={"top_k": 5})

    body = json.loads(AnthropicMessages(Sampling(("ignore_eos",), model="m")).body(prompt))

    assert body == {
        "model": "m",
        "max_tokens": 9,
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": "hi"}],
        "system": "brief",
        "top_k": 5,
    }


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        (Prompt("p", fields={"response_format": {}}), "`response_format`"),
        (Prompt("p", messages=({"role": "tool", "content": "x"},)), "a message of role 'tool'"),
        (Prompt("p", messages=({"role": "system", "content": "x"},) * 2), "several messages of role 'system'"),
        (Prompt("p", messages=({"role": "user", "content": [{"type": "image_url"}]},)), "a message with `image_url`"),
        (Prompt("p", text="x", fields={"tools": []}), None),
    ],
)
def test_parts_that_the_api_lacks_are_named(prompt, part):
    assert AnthropicMessages(Sampling()).refused(prompt) == part

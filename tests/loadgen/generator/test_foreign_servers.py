"""Streams of other servers as they are on the wire, cut by TCP at every byte."""

import json

import pytest

from loadgen.dialects.dialect import ParsedAnswer, Sampling
from loadgen.dialects.registry import DIALECTS
from loadgen.generator.recorder import count_output
from loadgen.http.http1 import ResponseParser
from loadgen.http.sse import EventSplitter
from reports.run_schema import TokensSource


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chat(delta, finish_reason=None, usage=None):
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return event({"object": "chat.completion.chunk", "choices": [choice], "usage": usage})


def usage(completion_tokens):
    return {"prompt_tokens": 11, "completion_tokens": completion_tokens, "total_tokens": 11 + completion_tokens}


def last_usage(completion_tokens):
    return event({"object": "chat.completion.chunk", "choices": [], "usage": usage(completion_tokens)})


DONE = event(b"[DONE]")
# Role first, several tokens in one chunk (speculation), usage with every chunk and once more at the end.
VLLM = (
    chat({"role": "assistant", "content": ""}, usage=usage(0))
    + chat({"content": "Hello"}, usage=usage(1))
    + chat({"content": " to you all"}, usage=usage(4))
    + chat({"content": "!"}, "stop", usage=usage(5))
    + last_usage(5)
    + DONE
)
# Content null in the chunk with the role, timings in the last chunk, comments in between, CRLF line ends, no [DONE].
LLAMA_CPP = (
    chat({"role": "assistant", "content": None})
    + b": keep-alive\n\n"
    + chat({"content": "Hello"})
    + chat({"content": " you"})
    + event(
        {
            "choices": [{"finish_reason": "stop", "index": 0, "delta": {}}],
            "usage": usage(2),
            "timings": {"prompt_n": 11, "predicted_n": 2, "predicted_ms": 12.5},
        }
    )
).replace(b"\n", b"\r\n")
TGI = (
    event({"index": 1, "token": {"id": 5, "text": "He", "logprob": -1.0, "special": False}, "details": None})
    + b":\n\n"
    + event(
        {
            "index": 2,
            "token": {"id": 6, "text": "llo", "logprob": -1.0, "special": False},
            "generated_text": "Hello",
            "details": {"finish_reason": "length", "generated_tokens": 2, "seed": None, "input_length": 3},
        }
    )
)


def chunked(body):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [body[at : at + 37] for at in range(0, len(body), 37)]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def read(api, *segments):
    """The answer in a response that came in these TCP segments."""
    dialect, answer = DIALECTS[api](Sampling()), ParsedAnswer()
    parser, splitter = ResponseParser(), EventSplitter()
    for at_ns, segment in enumerate(segments, start=1):
        for payload in splitter.feed(parser.feed(segment)):
            dialect.read(payload, at_ns, answer)
    for payload in splitter.finish():
        dialect.read(payload, len(segments) + 1, answer)
    assert parser.is_complete
    return answer


@pytest.mark.parametrize(
    ("api", "body", "event_tokens", "source"),
    [
        ("openai-chat", VLLM, [1, 3, 1], (5, TokensSource.SERVER_STREAM)),
        ("openai-chat", LLAMA_CPP, [1, 1], (2, TokensSource.SERVER_USAGE)),
        ("tgi", TGI, [1, 1], (2, TokensSource.SERVER_STREAM)),
    ],
)
def test_a_stream_is_read_the_same_in_reads_of_any_size(api, body, event_tokens, source):
    response = chunked(body)

    for cut in range(1, len(response)):
        answer = read(api, response[:cut], response[cut:])

        assert answer.is_complete
        assert answer.error is None
        assert (answer.event_tokens, count_output(answer)) == (event_tokens, source)
    bytewise = read(api, *(response[at : at + 1] for at in range(len(response))))
    assert bytewise.event_tokens == event_tokens
    assert bytewise.event_ns == sorted(set(bytewise.event_ns))


def test_an_error_object_inside_a_200_ends_a_foreign_stream_too():
    failed = chat({"content": "He"}) + event({"error": {"message": "oom", "type": "InternalServerError", "code": 500}})

    answer = read("openai-chat", chunked(failed + DONE))

    assert (answer.error, answer.event_tokens) == ("InternalServerError", [1])

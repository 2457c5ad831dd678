import json

import pytest

from loadgen.dialects.dialect import BadPayloadError, NotThisApiError, ParsedAnswer, Sampling
from loadgen.dialects.ollama import OllamaChat, OllamaGenerate
from loadgen.generator.recorder import count_output
from loadgen.http.framing import NDJSON
from loadgen.http.sse import LineTooLongError
from loadgen.workloads.prompts.prompt import Prompt
from reports.run_schema import TokensSource
from tests.support.servers.dialect_server import ollama_lines

PROMPT = Prompt("p", text="one two three", output_tokens=3)
DIALECTS = [OllamaChat, OllamaGenerate]


def read(dialect, *events):
    answer = ParsedAnswer(pieces=[])
    for at_ns, event in enumerate(events, start=1):
        dialect.read(event if isinstance(event, bytes) else json.dumps(event).encode(), at_ns, answer)
    return answer


@pytest.mark.parametrize(("kind", "input_tokens"), [(OllamaChat, 8), (OllamaGenerate, 4)])
def test_a_stream_is_read_the_same_at_every_cut(kind, input_tokens):
    dialect = kind(Sampling())
    stream = b"".join(ollama_lines(dialect.path, json.loads(dialect.body(PROMPT))))
    cuts = [[stream[:at], stream[at:]] for at in range(len(stream) + 1)]

    for pieces in (*cuts, [bytes([byte]) for byte in stream], [stream.rstrip(b"\n")], [stream.replace(b"\n", b"\r\n")]):
        splitter = NDJSON.splitter(10_000)
        answer = read(dialect, *(each for piece in pieces for each in splitter.feed(piece)), *splitter.finish())

        assert (answer.text, len(answer.event_ns), answer.is_terminated) == (" 0 1 2", 3, True)
        assert (answer.finish_reason, answer.input_tokens) == ("length", input_tokens)
        assert count_output(answer) == (3, TokensSource.SERVER_USAGE)


@pytest.mark.parametrize("kind", DIALECTS)
def test_a_blocking_answer_is_one_object_without_events(kind):
    dialect, answer = kind(Sampling(streams=False)), ParsedAnswer(pieces=[])
    dialect.read_whole(b"".join(ollama_lines(dialect.path, json.loads(dialect.body(PROMPT)))), answer)

    assert (answer.text, answer.usage_output_tokens, answer.event_ns) == (" 0 1 2", 3, [])
    assert answer.is_complete


def test_lengths_are_a_limit_and_sampling_is_greedy_by_default():
    chat = json.loads(OllamaChat(Sampling(("ignore_eos",), model="m")).body(PROMPT))
    raw = json.loads(OllamaGenerate(Sampling(temperature=0.5, seed=7, model="m")).body(PROMPT))

    assert chat == {
        "messages": [{"role": "user", "content": "one two three"}],
        "model": "m",
        "stream": True,
        "options": {"temperature": 0, "num_predict": 3},
    }
    assert (raw["prompt"], raw["raw"]) == ("one two three", True)
    assert raw["options"] == {"temperature": 0.5, "seed": 7, "num_predict": 3}


def test_options_of_a_row_are_merged_with_those_of_the_load():
    prompt = Prompt("p", text="x", output_tokens=3, fields={"options": {"top_k": 5}})

    assert json.loads(OllamaChat(Sampling()).body(prompt))["options"] == {
        "temperature": 0,
        "num_predict": 3,
        "top_k": 5,
    }


def test_thinking_is_counted_apart_and_an_error_ends_the_stream():
    answer = read(
        OllamaChat(Sampling()),
        {"message": {"role": "assistant", "content": "", "thinking": "hm"}, "done": False},
        {"message": {"role": "assistant", "content": "yes"}, "done": False},
        {"error": "model runner has unexpectedly stopped"},
    )

    assert (answer.event_ns, answer.reasoning_events, answer.first_answer_ns) == ([1, 2], 1, 2)
    assert (answer.error, answer.is_complete) == ("error", False)


@pytest.mark.parametrize(
    ("event", "error"),
    [({"choices": []}, NotThisApiError), ({"message": "x"}, BadPayloadError), (b"{", BadPayloadError)],
)
def test_damaged_events_are_refused(event, error):
    with pytest.raises(error):
        read(OllamaChat(Sampling()), event)


@pytest.mark.parametrize(("before", "piece"), [(b"", b"x" * 101), (b"x" * 60, b"x" * 60), (b"", b"x" * 101 + b"\n")])
def test_a_line_without_end_is_refused(before, piece):
    splitter = NDJSON.splitter(100)
    splitter.feed(before)
    with pytest.raises(LineTooLongError):
        splitter.feed(piece)


@pytest.mark.parametrize(
    ("dialect", "prompt", "part"),
    [
        (OllamaChat, Prompt("p", fields={"tools": []}), None),
        (OllamaGenerate, Prompt("p", fields={"tools": []}), "`tools`"),
        (OllamaChat, Prompt("p", fields={"response_format": {}}), "`response_format`"),
        (
            OllamaChat,
            Prompt("p", messages=({"role": "user", "content": [{"type": "text"}]},)),
            "a message with parts of content",
        ),
    ],
)
def test_parts_that_the_api_lacks_are_named(dialect, prompt, part):
    assert dialect(Sampling()).refused(prompt) == part

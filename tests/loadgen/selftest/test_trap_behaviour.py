import json

import pytest

from loadgen.selftest.trap_behaviour import Behaviour, TrapRequest, answer_events, prelude

REQUEST = TrapRequest(("hello",) * 100, 8, is_chat=True)


def chunks(behaviour, index=0, request=REQUEST):
    """The JSON payloads of an answer, without comments and `[DONE]`."""
    data = b"".join(event.data for event in answer_events(behaviour, request, index, 0))
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def deltas(found):
    return [each["choices"][0]["delta"] for each in found if each.get("choices")]


def test_an_honest_answer_has_one_token_an_event_a_finish_reason_and_usage():
    found = chunks(Behaviour())

    assert [delta["content"] for delta in deltas(found)[:-1]] == [f" w{number:03}" for number in range(8)]
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert (found[-1]["usage"]["prompt_tokens"], found[-1]["usage"]["completion_tokens"]) == (100, 8)
    assert [event.tokens for event in answer_events(Behaviour(), REQUEST, 0, 0)] == [0, *[1] * 7, 0, 0]


def test_deceptions_of_counts():
    assert len(deltas(chunks(Behaviour(event_tokens=4)))) == 3
    assert chunks(Behaviour(usage_factor=1.5))[-1]["usage"]["completion_tokens"] == 12
    assert chunks(Behaviour(prompt_factor=1.5))[-1]["usage"]["prompt_tokens"] == 150
    assert chunks(Behaviour(length_factor=0.5))[-1]["usage"]["completion_tokens"] == 4


def test_deceptions_of_ends_concern_every_fourth_request():
    long = TrapRequest(("hello",), 32, is_chat=True)

    failed = chunks(Behaviour(error_every=4), 3, long)
    unfinished = chunks(Behaviour(unfinished_every=4), 3, long)

    assert ("error" in failed[-1], len(failed)) == (True, 9)
    assert len(unfinished) == 8
    assert {each["choices"][0]["finish_reason"] for each in unfinished} == {None}
    assert len(chunks(Behaviour(error_every=4), 4, long)) == 34


def test_deceptions_before_the_text():
    found = deltas(chunks(Behaviour(reasoning_tokens=2, tool_tokens=1)))

    assert ["reasoning_content" in delta for delta in found[:3]] == [True, True, False]
    assert found[2]["tool_calls"][0]["function"]["arguments"] == " w002"
    assert found[3] == {"content": " w003"}
    assert prelude(Behaviour(), REQUEST) == b""
    assert b'"role":"assistant"' in prelude(Behaviour(role_at_once=True), REQUEST)


@pytest.mark.parametrize(
    ("behaviour", "load_s", "in_flight", "token_s"),
    [
        (Behaviour(), 5.0, 8, 0.02),
        (Behaviour(ramp_s=20.0), 0.0, 8, 0.06),
        (Behaviour(ramp_s=20.0), 20.0, 8, 0.02),
        (Behaviour(halves_after_s=9.0), 8.9, 8, 0.02),
        (Behaviour(halves_after_s=9.0), 9.0, 8, 0.04),
        (Behaviour(shares_speed=True), 0.0, 16, 0.04),
    ],
)
def test_the_time_of_a_token(behaviour, load_s, in_flight, token_s):
    assert behaviour.token_s(load_s, in_flight) == pytest.approx(token_s)


def test_a_request_is_read_from_either_api():
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}], "max_completion_tokens": 3}

    assert TrapRequest.of(json.dumps(chat).encode(), is_chat=True) == TrapRequest(("a", "b"), 3, True)
    assert TrapRequest.of(b'{"prompt":"a b c","max_tokens":2}', is_chat=False).words == ("a", "b", "c")


def test_a_behaviour_survives_its_json():
    behaviour = Behaviour(slots=4, release_s=1.0)

    assert Behaviour.from_json(behaviour.to_json()) == behaviour

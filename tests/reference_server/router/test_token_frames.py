"""Events of tokens that are not the last, rendered for a whole step or one by one."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.messages import Generation, Tokens
from reference_server.router.generation_stream import GeneratedToken, TokenArrived
from reference_server.router.routes.native import NativeTokens
from reference_server.router.routes.openai_bodies import ChatBodies, CompletionBodies
from reference_server.router.schemas.openai import ChatRequest
from reference_server.router.server_info import ServerInfo
from reference_server.router.sse import EventStream
from reference_server.router.validation.request_rules import GenerationLimits

INFO = ServerInfo("an/é", GenerationLimits(10, 20), "0")
TOKEN = st.tuples(
    st.integers(0, 2**32 - 1), st.text(max_size=8), st.floats(width=32) | st.sampled_from([-0.34, 0.1]), st.booleans()
)
TOKENS = st.lists(TOKEN, min_size=1, max_size=5)


def step_of(tokens: list[tuple[int, str, float, bool]]) -> Tokens:
    ids, texts, logprobs, is_special = zip(*tokens, strict=True)
    return Tokens(ids, logprobs, texts, is_special)


def arrivals(tokens: list[tuple[int, str, float, bool]]) -> list[TokenArrived]:
    return [TokenArrived(GeneratedToken(*token), ()) for token in tokens]


@settings(max_examples=40)
@given(TOKENS)
def test_chunks_of_completions_are_the_same_for_a_step_and_for_each_token(tokens):
    bodies = CompletionBodies(INFO, 1.0)

    assert bodies.render_texts(step_of(tokens)) == b"".join(bodies.render_token(0, each) for each in arrivals(tokens))


@settings(max_examples=40)
@given(TOKENS)
def test_chunks_of_a_chat_are_the_same_for_a_step_and_for_each_token(tokens):
    request = ChatRequest.model_validate({"model": 'a "model"', "messages": [{"role": "user", "content": "x"}]})
    bodies = ChatBodies(INFO, 1.0, request)

    assert bodies.render_texts(step_of(tokens)) == b"".join(bodies.render_token(0, each) for each in arrivals(tokens))


@settings(max_examples=40)
@given(TOKENS)
async def test_native_events_are_the_same_for_a_step_and_for_each_token(tokens):
    sent: list[bytes] = []
    written: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    def write(frame: bytes) -> bool:
        written.append(frame)
        return True

    one_by_one = NativeTokens(EventStream(send, []))
    for each in arrivals(tokens):
        await one_by_one.send(each)
    whole = NativeTokens(EventStream(send, [], write_now=write))

    assert whole.write(Generation(1, step_of(tokens)))
    assert written == [b"".join(sent)]
    assert whole.count == one_by_one.count == len(tokens)


@pytest.mark.parametrize("is_refused", [False, True], ids=["no_writer", "client_too_slow"])
async def test_a_step_that_cannot_be_written_at_once_is_not_counted(is_refused: bool):
    async def send(message: Any) -> None:
        raise AssertionError(message)

    stream = EventStream(send, [], write_now=(lambda _: False) if is_refused else None)
    events = NativeTokens(stream)

    assert not events.write(Generation(1, step_of([(1, "a", -0.5, False)])))
    assert events.count == 0

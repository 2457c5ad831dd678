"""`text_generation.Client` and `AsyncClient`, TGI's own client as it was last released."""

import asyncio

from features import (
    MAX_TOKENS,
    MESSAGES,
    PROMPT,
    TOOL,
    TOOL_HISTORY,
    TRIP,
    URL,
    check_text,
    check_trip,
    feature,
    refused,
    run_features,
)
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import Grammar, GrammarType, Message, Tool

client = Client(URL, timeout=60)
messages = [Message(**message) for message in MESSAGES]


def whole_text() -> str:
    return client.generate(PROMPT, max_new_tokens=MAX_TOKENS).generated_text


@feature
def generate() -> str:
    answer = client.generate(PROMPT, max_new_tokens=MAX_TOKENS, decoder_input_details=True, top_n_tokens=2)
    details = answer.details
    assert details.finish_reason.value in ("length", "eos_token"), details
    assert details.generated_tokens == len(details.tokens) == len(details.top_tokens)
    assert details.prefill[0].logprob is None
    assert len(details.prefill) > 1
    return check_text(answer.generated_text, "".join(token.text for token in details.tokens if not token.special))


@feature
def generate_stream() -> str:
    parts = list(client.generate_stream(PROMPT, max_new_tokens=MAX_TOKENS))
    assert parts[-1].details.generated_tokens == len(parts)
    assert parts[-1].generated_text == whole_text()
    return check_text(whole_text(), "".join(part.token.text for part in parts if not part.token.special))


@feature
def chat() -> str:
    answer = client.chat(messages, temperature=0.0, max_tokens=MAX_TOKENS)
    assert answer.choices[0].finish_reason in ("length", "stop"), answer
    return check_text(answer.choices[0].message.content)


@feature
def tools() -> object:
    asked = [Message(**TOOL_HISTORY[0])]
    answer = client.chat(asked, temperature=0.0, tools=[Tool(**TOOL)], tool_choice="plan_trip")
    assert answer.choices[0].finish_reason == "tool_calls", answer
    (call,) = answer.choices[0].message.tool_calls
    assert call["function"]["name"] == "plan_trip", call
    return check_trip(call["function"]["arguments"])


@feature
def json_schema() -> object:
    grammar = Grammar(type=GrammarType.Json, value=TRIP)
    return check_trip(client.generate(PROMPT, max_new_tokens=64, grammar=grammar).generated_text)


@feature
def async_() -> str:
    async def use() -> tuple[str, str, str]:
        several = AsyncClient(URL, timeout=60)
        answer = await several.generate(PROMPT, max_new_tokens=MAX_TOKENS)
        stream = several.generate_stream(PROMPT, max_new_tokens=MAX_TOKENS)
        parts = [part.token.text async for part in stream if not part.token.special]
        told = await several.chat(messages, temperature=0.0, max_tokens=MAX_TOKENS)
        return answer.generated_text, "".join(parts), told.choices[0].message.content

    text, parts, content = asyncio.run(use())
    check_text(content)
    return check_text(text, parts)


@feature
def errors() -> str:
    return refused(lambda: client.generate(PROMPT, max_new_tokens=0), ValidationError, "`max_new_tokens` must be")


if __name__ == "__main__":
    run_features()

"""The `openai` package: both routes, streamed and not, blocking and not."""

import asyncio
from typing import Any, Literal

import openai
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
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="-", max_retries=0)
model = client.models.list().data[0].id
#: Greedy, so that two calls have equal texts.
chat_arguments: dict[str, Any] = {
    "model": model,
    "messages": MESSAGES,
    "temperature": 0,
    "max_completion_tokens": MAX_TOKENS,
}
tool_arguments: dict[str, Any] = {
    "model": model,
    "messages": TOOL_HISTORY[:1],
    "temperature": 0,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "plan_trip"}},
}
REQUIRED = {"tool_choice": "required"}


class Trip(BaseModel):
    """A trip."""

    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


def complete() -> str:
    choice = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=MAX_TOKENS).choices[0]
    assert choice.finish_reason in ("length", "stop"), choice
    return choice.text


@feature
def completions() -> str:
    batch = client.completions.create(model=model, prompt=[PROMPT, PROMPT], temperature=0, max_tokens=MAX_TOKENS)
    assert [choice.index for choice in batch.choices] == [0, 1]
    assert {choice.text for choice in batch.choices} == {complete()}
    return check_text(batch.choices[0].text)


@feature
def completions_stream() -> str:
    parts = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=MAX_TOKENS, stream=True)
    return check_text(complete(), "".join(part.choices[0].text for part in parts))


@feature
def chat() -> str:
    answer = client.chat.completions.create(**chat_arguments, logprobs=True, top_logprobs=2)
    choice, usage = answer.choices[0], answer.usage
    assert choice.finish_reason in ("length", "stop"), choice
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert usage is not None
    assert usage.completion_tokens == len(choice.logprobs.content)
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    return check_text(choice.message.content)


@feature
def chat_stream() -> str:
    whole = client.chat.completions.create(**chat_arguments)
    stream = client.chat.completions.create(**chat_arguments, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return check_text(whole.choices[0].message.content, streamed)


@feature
def tools() -> object:
    choice = client.chat.completions.create(**tool_arguments).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "plan_trip"), call
    assert call.id
    free = client.chat.completions.create(**tool_arguments | {"tool_choice": "auto"}).choices[0].message
    assert bool(free.content) != bool(free.tool_calls), free
    barred = client.chat.completions.create(**tool_arguments | {"tool_choice": "none", "max_tokens": 8}).choices[0]
    assert barred.message.tool_calls is None, barred
    told = client.chat.completions.create(**tool_arguments | {"messages": TOOL_HISTORY} | REQUIRED)
    check_trip(told.choices[0].message.tool_calls[0].function.arguments)
    made = client.chat.completions.parse(**tool_arguments | {"tools": [openai.pydantic_function_tool(Trip)]} | REQUIRED)
    assert isinstance(made.choices[0].message.tool_calls[0].function.parsed_arguments, Trip), made
    return check_trip(call.function.arguments)


@feature
def tools_stream() -> object:
    whole = client.chat.completions.create(**tool_arguments).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(**tool_arguments) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    assert call.id
    assert call.function.name == whole.name
    trip = check_trip(call.function.arguments)
    assert trip == check_trip(whole.arguments)
    return trip


@feature
def json_schema() -> object:
    layout = {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP, "strict": True}}
    answer = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, response_format=layout)
    parsed = client.chat.completions.parse(model=model, messages=MESSAGES, temperature=0, response_format=Trip)
    assert isinstance(parsed.choices[0].message.parsed, Trip), parsed
    return check_trip(answer.choices[0].message.content)


@feature
def async_() -> str:
    async def use() -> tuple[str | None, str, str]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="-", max_retries=0) as several:
            answer, stream, completion = await asyncio.gather(
                several.chat.completions.create(**chat_arguments),
                several.chat.completions.create(**chat_arguments, stream=True),
                several.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=MAX_TOKENS),
            )
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return answer.choices[0].message.content, "".join(parts), completion.choices[0].text

    whole, streamed, completion = asyncio.run(use())
    assert completion == complete()
    return check_text(whole, streamed)


@feature
def errors() -> str:
    return refused(
        lambda: client.chat.completions.create(**chat_arguments | {"top_p": 2.0}),
        openai.UnprocessableEntityError,
        "`top_p` must be",
    )


if __name__ == "__main__":
    run_features()

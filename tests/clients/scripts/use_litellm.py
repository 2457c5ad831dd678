"""`litellm` with its OpenAI-compatible providers."""

import asyncio
from typing import Any

import litellm
from features import (
    MAX_TOKENS,
    MESSAGES,
    PROMPT,
    TOOL,
    TOOL_HISTORY,
    TRIP,
    URL,
    check_chat_stream,
    check_text,
    check_tools,
    check_trip,
    feature,
    refused,
    run_features,
)

address: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "-", "temperature": 0, "num_retries": 0}
chat_arguments: dict[str, Any] = {"model": "openai/tgi", "messages": MESSAGES, "max_tokens": MAX_TOKENS, **address}
completion_arguments: dict[str, Any] = {
    "model": "text-completion-openai/tgi",
    "prompt": PROMPT,
    "max_tokens": MAX_TOKENS,
    **address,
}
tool_arguments: dict[str, Any] = {
    "model": "openai/tgi",
    "messages": TOOL_HISTORY[:1],
    "tools": [TOOL],
    "tool_choice": "required",
    **address,
}


@feature
def completions() -> str:
    return check_text(litellm.text_completion(**completion_arguments).choices[0].text)


@feature
def completions_stream() -> str:
    whole = litellm.text_completion(**completion_arguments).choices[0].text
    parts = litellm.text_completion(**completion_arguments, stream=True)
    return check_text(whole, "".join(part.choices[0].text or "" for part in parts))


@feature
def chat() -> str:
    answer = litellm.completion(**chat_arguments)
    assert answer.choices[0].finish_reason in ("length", "stop"), answer
    assert answer.usage.completion_tokens > 1
    return check_text(answer.choices[0].message.content)


@feature
def chat_stream() -> str:
    return check_chat_stream(litellm.completion, chat_arguments)


@feature
def tools() -> object:
    return check_tools(litellm.completion, tool_arguments)


@feature
def tools_stream() -> object:
    chunks = list(litellm.completion(**tool_arguments, stream=True))
    choice = litellm.stream_chunk_builder(chunks, messages=TOOL_HISTORY[:1]).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    assert call.function.name == "plan_trip", call
    return check_trip(call.function.arguments)


@feature
def json_schema() -> object:
    layout = {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP, "strict": True}}
    answer = litellm.completion(model="openai/tgi", messages=MESSAGES, response_format=layout, **address)
    return check_trip(answer.choices[0].message.content)


@feature
def async_() -> str:
    async def use() -> tuple[str, str]:
        answer = await litellm.acompletion(**chat_arguments)
        stream = await litellm.acompletion(**chat_arguments, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return answer.choices[0].message.content, "".join(parts)

    return check_text(*asyncio.run(use()))


@feature
def errors() -> str:
    return refused(
        lambda: litellm.completion(**chat_arguments | {"top_p": 2.0}), litellm.BadRequestError, "`top_p` must be"
    )


if __name__ == "__main__":
    run_features()

"""`huggingface_hub.InferenceClient` and its asynchronous twin: TGI's routes and the chat route."""

import asyncio
from typing import Any

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
from huggingface_hub import (
    AsyncInferenceClient,
    ChatCompletionInputFunctionName,
    ChatCompletionInputToolChoiceClass,
    InferenceClient,
)
from huggingface_hub.errors import ValidationError

client = InferenceClient(URL)
#: Greedy, so that two calls have equal texts.
chat_arguments: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": MAX_TOKENS}
tool_arguments: dict[str, Any] = {
    "messages": TOOL_HISTORY[:1],
    "temperature": 0,
    "tools": [TOOL],
    "tool_choice": "required",
}


def whole_text() -> str:
    return client.text_generation(PROMPT, max_new_tokens=MAX_TOKENS, return_full_text=False)


@feature
def generate() -> str:
    answer = client.text_generation(
        PROMPT, max_new_tokens=MAX_TOKENS, details=True, decoder_input_details=True, top_n_tokens=2
    )
    details = answer.details
    assert details.finish_reason in ("length", "eos_token"), details
    assert details.generated_tokens == len(details.tokens) == len(details.top_tokens)
    assert len(details.prefill) > 1
    assert answer.generated_text == PROMPT + whole_text()
    return check_text(whole_text(), "".join(token.text for token in details.tokens if not token.special))


@feature
def generate_stream() -> str:
    parts = list(client.text_generation(PROMPT, max_new_tokens=MAX_TOKENS, details=True, stream=True))
    assert parts[-1].details.generated_tokens == len(parts)
    assert parts[-1].details.input_length > 1
    return check_text(whole_text(), "".join(part.token.text for part in parts if not part.token.special))


@feature
def chat() -> str:
    answer = client.chat_completion(**chat_arguments, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.finish_reason in ("length", "stop"), choice
    assert answer.usage.completion_tokens == len(choice.logprobs.content)
    return check_text(choice.message.content)


@feature
def chat_stream() -> str:
    return check_chat_stream(client.chat_completion, chat_arguments)


@feature
def tools() -> object:
    typed = ChatCompletionInputToolChoiceClass(function=ChatCompletionInputFunctionName(name="plan_trip"))
    (chosen,) = client.chat_completion(**tool_arguments | {"tool_choice": typed}).choices[0].message.tool_calls
    assert chosen.function.name == "plan_trip", chosen
    return check_tools(client.chat_completion, tool_arguments)


@feature
def tools_stream() -> object:
    (whole,) = client.chat_completion(**tool_arguments).choices[0].message.tool_calls
    choices = [chunk.choices[0] for chunk in client.chat_completion(**tool_arguments, stream=True)]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function.name] == ["plan_trip"], calls
    assert choices[-1].finish_reason == "tool_calls", choices[-1]
    trip = check_trip("".join(call.function.arguments for call in calls))
    assert trip == check_trip(whole.function.arguments)
    return trip


@feature
def json_schema() -> object:
    grammar = {"type": "json", "value": TRIP}
    check_trip(client.text_generation(PROMPT, max_new_tokens=64, grammar=grammar, return_full_text=False))
    layout = {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP, "strict": True}}
    answer = client.chat_completion(MESSAGES, temperature=0, response_format=layout)
    return check_trip(answer.choices[0].message.content)


@feature
def async_() -> str:
    async def use() -> tuple[str, str, str, str]:
        async with AsyncInferenceClient(URL) as several:
            text = await several.text_generation(PROMPT, max_new_tokens=MAX_TOKENS, return_full_text=False)
            tokens = await several.text_generation(PROMPT, max_new_tokens=MAX_TOKENS, stream=True)
            parts = [part async for part in tokens]
            answer = await several.chat_completion(**chat_arguments)
            deltas = await several.chat_completion(**chat_arguments, stream=True)
            contents = [delta.choices[0].delta.content or "" async for delta in deltas]
        return text, "".join(parts), answer.choices[0].message.content, "".join(contents)

    text, parts, content, contents = asyncio.run(use())
    assert text == whole_text()
    assert text.startswith(parts), parts  # a stream of texts leaves out what ends it
    return check_text(content, contents)


@feature
def errors() -> str:
    return refused(lambda: client.text_generation(PROMPT, top_k=0), ValidationError, "`top_k` must be")


if __name__ == "__main__":
    run_features()

"""`langchain-openai` on the OpenAI routes and `langchain-huggingface` on TGI's."""

import asyncio
from typing import Literal

from features import (
    MAX_TOKENS,
    PROMPT,
    TOOL,
    TOOL_HISTORY,
    URL,
    check_text,
    check_trip,
    feature,
    run_features,
)
from langchain_core.messages import AIMessage, BaseMessageChunk, HumanMessage, ToolMessage
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

chat_model = ChatOpenAI(
    base_url=f"{URL}/v1", api_key="-", model="tgi", temperature=0, max_retries=0, max_completion_tokens=128
)
# It sends a `top_p` of 1 by default.
completion_model = OpenAI(base_url=f"{URL}/v1", api_key="-", model="tgi", seed=1, max_retries=0, max_tokens=MAX_TOKENS)
endpoint = HuggingFaceEndpoint(
    endpoint_url=URL, max_new_tokens=MAX_TOKENS, top_p=None, typical_p=None, temperature=None
)


class Trip(BaseModel):
    """A trip."""

    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


@feature
def generate() -> str:
    return check_text(endpoint.invoke(PROMPT))


@feature
def generate_stream() -> str:
    return check_text(endpoint.invoke(PROMPT), "".join(endpoint.stream(PROMPT)))


@feature
def completions() -> str:
    return check_text(completion_model.invoke(PROMPT))


@feature
def completions_stream() -> str:
    return check_text(completion_model.invoke(PROMPT), "".join(completion_model.stream(PROMPT)))


@feature
def chat() -> str:
    answer = chat_model.invoke("Hello")
    assert answer.response_metadata["finish_reason"] in ("length", "stop"), answer
    assert answer.usage_metadata["output_tokens"] > 1
    check_text(ChatHuggingFace(llm=endpoint).invoke("Hello").content)
    return check_text(answer.content)


@feature
def chat_stream() -> str:
    chunks = list(chat_model.stream("Hello", stream_usage=True))
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 1
    return check_text(chat_model.invoke("Hello").content, "".join(chunk.content for chunk in chunks))


@feature
def tools() -> object:
    model = chat_model.bind_tools([TOOL], tool_choice="plan_trip")
    (call,) = model.invoke(TOOL_HISTORY[0]["content"]).tool_calls
    assert call["name"] == "plan_trip", call
    history = [
        HumanMessage(TOOL_HISTORY[0]["content"]),
        AIMessage("", tool_calls=[call]),
        ToolMessage("Three days in Oslo.", tool_call_id=call["id"]),
    ]
    (again,) = chat_model.bind_tools([Trip], tool_choice="any").invoke(history).tool_calls
    check_trip(again["args"])
    return check_trip(call["args"])


@feature
def tools_stream() -> object:
    model = chat_model.bind_tools([TOOL], tool_choice="required")
    whole: BaseMessageChunk | None = None
    for chunk in model.stream(TOOL_HISTORY[0]["content"]):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    assert call["name"] == "plan_trip", call
    return check_trip(call["args"])


@feature
def json_schema() -> object:
    trip = chat_model.with_structured_output(Trip, method="json_schema").invoke("Hello")
    assert isinstance(trip, Trip)
    return check_trip(trip.model_dump())


@feature
def async_() -> str:
    async def use() -> tuple[str, str, str, str]:
        streamed = "".join([chunk.content async for chunk in chat_model.astream("Hello")])
        generated = "".join([part async for part in endpoint.astream(PROMPT)])
        answer, text = await asyncio.gather(chat_model.ainvoke("Hello"), endpoint.ainvoke(PROMPT))
        return answer.content, streamed, text, generated

    content, streamed, text, generated = asyncio.run(use())
    check_text(text, generated)
    return check_text(content, streamed)


if __name__ == "__main__":
    run_features()

from typing import Any

import pytest

from reference_server.errors import ToolError
from reference_server.router.chat.tools import ToolOffer, offer_of
from reference_server.router.schemas.openai import DEFAULT_TOOL_PROMPT, ChatRequest

GET_W = {"type": "function", "function": {"name": "get_w", "parameters": {"properties": {"city": {}}}}}
PING = {"type": "function", "function": {"name": "ping", "description": "P"}}


def offered(**body: Any) -> ToolOffer | None:
    return offer_of(ChatRequest.model_validate({"messages": [], "tools": [GET_W, PING], **body}))


def names(offer: ToolOffer | None) -> list[str] | None:
    return None if offer is None else [tool.function.name for tool in offer.tools]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ["get_w", "ping", "no_tool"]),
        ("auto", ["get_w", "ping", "no_tool"]),
        ("required", ["get_w", "ping"]),
        ("none", None),
        ("ping", ["ping"]),
        ({"type": "function", "function": {"name": "get_w"}}, ["get_w"]),
    ],
    ids=str,
)
def test_http_4_6_a_choice_offers_its_tools(choice: Any, expected: list[str] | None):
    assert names(offered(tool_choice=choice)) == expected


def test_a_function_named_like_a_choice_is_chosen_by_an_object():
    tools = [{"type": "function", "function": {"name": name}} for name in ("auto", "none")]

    assert names(offered(tools=tools, tool_choice={"type": "function", "function": {"name": "none"}})) == ["none"]
    with pytest.raises(ToolError, match="Tool with name get_w not found"):
        offered(tools=tools, tool_choice="get_w")


@pytest.mark.parametrize("prompt", [None, ""])
def test_http_4_5_an_empty_tool_prompt_is_the_default(prompt: str | None):
    offer = offered(tool_prompt=prompt)

    assert offer is not None
    assert offer.prompt == f"\n{DEFAULT_TOOL_PROMPT}\n"


def test_templates_see_the_schema_as_text_and_the_declining_tool_last():
    offer = offered()

    assert offer is not None
    functions = [tool["function"] for tool in offer.described]
    assert functions == [
        {"description": None, "name": "get_w", "arguments": '{"properties":{"city":{}}}'},
        {"description": "P", "name": "ping", "arguments": '{"type":"object","properties":{}}'},
        {
            "description": "Open ended response with no specific tool selected",
            "name": "no_tool",
            "arguments": '{"type":"object"}',
        },
    ]
    assert list(functions[0]) == ["description", "name", "arguments"]


def test_a_calls_schema_keeps_the_order_and_the_tools_other_keywords():
    parameters = {
        "type": "object",
        "title": "W",
        "properties": {"b": {}, "a": {}},
        "required": ["a", "b"],
        "maxProperties": 2,
        "additionalProperties": True,
    }
    offer = offered(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])

    assert offer is not None
    value = offer.grammar().value
    (call, _) = value["properties"]["function"]["anyOf"]
    assert call == {
        "$id": "urn:tool:0",
        "type": "object",
        "title": "W",
        "properties": {"_name": {"const": "f"}, "b": {}, "a": {}},
        "required": ["_name", "a", "b"],
        "maxProperties": 3,
        "additionalProperties": False,
    }
    assert list(call["properties"]) == ["_name", "b", "a"]

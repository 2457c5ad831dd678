"""Shared by the scripts: requests, checks, and one JSON line for each feature.

Runs in a client's own environment, so it imports the standard library alone.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

URL, TOKENIZER = sys.argv[1:3]

PROMPT = "The river runs"
MESSAGES = [{"role": "user", "content": "Hello"}]
MAX_TOKENS = 12

#: A JSON schema whose values are few, so that a small model ends it soon.
TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "plan_trip", "description": "Plan a trip.", "parameters": TRIP}}
#: A conversation in which the tool was called and has answered.
TOOL_HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Plan a trip to Oslo."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "plan_trip", "arguments": '{"city": "Oslo", "days": 3}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "Three days in Oslo."},
]

_features: dict[str, Callable[[], object]] = {}


def feature(function: Callable[[], object]) -> Callable[[], object]:
    """Register a feature under its function's name. The function returns a detail, and raises if the feature fails."""
    _features[function.__name__.rstrip("_")] = function
    return function


def run_features() -> None:
    """Run all features in the order of their definitions."""
    for name, function in _features.items():
        begun_s = time.monotonic()
        try:
            line = {"passed": True, "detail": repr(function())}
        except Exception:
            line = {"passed": False, "detail": traceback.format_exc()}
        print(json.dumps({"feature": name, **line, "seconds": round(time.monotonic() - begun_s, 2)}), flush=True)


def check_text(text: str | None, streamed: str | None = None) -> str:
    """The text of an answer, which must not be empty and must equal the streamed text."""
    assert text, "no text came"
    assert streamed in (None, text), f"streamed {streamed!r}, whole {text!r}"
    return text


def check_trip(value: Any) -> Any:
    """A value, or its JSON text, that is valid under the schema `TRIP`."""
    trip = json.loads(value) if isinstance(value, str) else value
    assert set(trip) == {"city", "days"}, trip
    assert trip["city"] in ("Oslo", "Paris"), trip
    assert type(trip["days"]) is int, trip
    assert 1 <= trip["days"] <= 9, trip
    return trip


def check_chat_stream(complete: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """A chat with equal text and token counts, streamed and blocking. `complete` is that of OpenAI's client."""
    whole = complete(**arguments)
    chunks = list(complete(**arguments, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return check_text(whole.choices[0].message.content, streamed)


def check_tools(complete: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """A chat that calls the tool, and calls it again after its result. `complete` is that of OpenAI's client."""
    choice = complete(**arguments).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    assert call.function.name == "plan_trip", call
    told = complete(**arguments | {"messages": TOOL_HISTORY}).choices[0].message.tool_calls
    check_trip(told[0].function.arguments)
    return check_trip(call.function.arguments)


def refused(call: Callable[[], object], error: type[Exception], says: str) -> str:
    """The message of the error that a call must raise: in its text, or in its `body`."""
    try:
        call()
    except error as raised:
        told = f"{type(raised).__name__}: {raised} {getattr(raised, 'body', '')}"
        assert says in told, told
        return told
    raise AssertionError(f"no {error.__name__}")

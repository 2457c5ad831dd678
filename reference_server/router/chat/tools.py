"""The tools that a request offers to the model, and the grammar that constrains the answer to a call of one of them.

tool_calls.py parses the call.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reference_server.errors import ToolError, ValidationError
from reference_server.router.schemas.openai import (
    DEFAULT_TOOL_PROMPT,
    ChatRequest,
    FunctionDefinition,
    Tool,
    ToolChoiceObject,
)
from reference_server.router.schemas.tgi import RequestGrammar

#: The function that a model calls to use no tool, if `tool_choice` is `auto`.
NO_TOOL = "no_tool"
_DECLINING = Tool(
    type="function",
    function=FunctionDefinition(
        name=NO_TOOL,
        description="Open ended response with no specific tool selected",
        parameters={"type": "object"},
    ),
)
#: Keywords that count properties; the added `_name` is one more.
_COUNTS = frozenset(("minProperties", "maxProperties"))


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools that an answer may call, and the text about them in the prompt."""

    tools: Sequence[Tool]
    prompt: str

    @property
    def described(self) -> list[dict[str, Any]]:
        """The tools as templates get them: `arguments` is the JSON text of the schema."""
        return [{"type": tool.type, "function": _described(tool.function)} for tool in self.tools]

    def grammar(self) -> RequestGrammar:
        """An object whose `function` is the name and the arguments of one tool. Raises `ValidationError`."""
        calls = [_call_schema(tool.function, f"urn:tool:{number}") for number, tool in enumerate(self.tools)]
        # TGI does not require `function`, so its models may answer {}, which is not a call.
        return RequestGrammar(
            type="json", value={"properties": {"function": {"anyOf": calls}}, "required": ["function"]}
        )


def offer_of(request: ChatRequest) -> ToolOffer | None:
    """The tools of a request; None for plain chat. Raises `ToolError`."""
    tools = request.tools or []
    if tools and request.response_format is not None and request.response_format.type != "text":
        raise ToolError("Grammar and tools are mutually exclusive")
    if not tools or request.tool_choice == "none":
        return None
    chosen = _chosen(tools, request.tool_choice)
    _check_names([tool.function.name for tool in tools])
    return ToolOffer(chosen, request.tool_prompt or f"\n{DEFAULT_TOOL_PROMPT}\n")


def _chosen(tools: Sequence[Tool], choice: str | ToolChoiceObject | None) -> Sequence[Tool]:
    match choice:
        case None | "auto":
            return [*tools, _DECLINING]
        case "required":
            return tools
    name = choice.function.name if isinstance(choice, ToolChoiceObject) else choice
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise ToolError(f"Tool with name {name} not found")
    return named


def _check_names(names: Sequence[str]) -> None:
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise ToolError(f"`tools` may have a function only once. Given: {count} named {name}")
    if NO_TOOL in names:
        raise ToolError(f"`tools` may not have a function named {NO_TOOL}, which stands for calling none")


def _described(function: FunctionDefinition) -> dict[str, Any]:
    arguments = json.dumps(function.schema_of_arguments, ensure_ascii=False, separators=(",", ":"))
    return {"description": function.description, "name": function.name, "arguments": arguments}


def _call_schema(function: FunctionDefinition, id_: str) -> dict[str, Any]:
    """The schema of a call: `_name`, then the arguments, all in one object.

    Other keywords of `parameters` stay, so that compiling the grammar refuses those that it does not support. `$id`
    makes it a schema of its own, whose references resolve inside it; TGI resolves them at the grammar's root and fails.
    """
    parameters = function.schema_of_arguments
    if not isinstance(parameters, Mapping):
        raise _uncompilable(function, "`parameters` is not an object")
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, Mapping):
        raise _uncompilable(function, "`properties` is not an object")
    if not isinstance(required, list):
        raise _uncompilable(function, "`required` is not a list")
    if "_name" in properties:
        raise _uncompilable(function, "the argument name `_name` is reserved for the name of the function")
    return {
        "$id": id_,
        **{key: _with_name(value) if key in _COUNTS else value for key, value in parameters.items()},
        "properties": {"_name": {"const": function.name}, **properties},
        "required": ["_name", *required],
        "additionalProperties": False,
    }


def _with_name(count: Any) -> Any:
    return count + 1 if isinstance(count, int | float) else count


def _uncompilable(function: FunctionDefinition, detail: str) -> ValidationError:
    return ValidationError(f"cannot compile regex from schema: function {function.name}: {detail}")
